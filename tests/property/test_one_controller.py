"""The simulator is steered by the live fleet's controller: told the same with tokens, that orders the same."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import digest, pack

from paceline.config import FleetSettings, Variant
from paceline.control.controller import Controller
from paceline.control.events import Action, Deliver, Event, Reported, RunChunk
from paceline.planning.dispatch import DispatchSettings
from paceline.planning.latency_profile import AffineLatency, StepLatency
from paceline.sim.costs import EngineCosts
from paceline.sim.rollout import FleetPlan, simulate_rollout
from paceline.sim.speculation import Plain
from paceline.sim.workload import Workload

BLOCK, CHUNK, LIMIT = 4, 8, 30


class Watched(Controller):
    """Notes what it was told, and what it answered."""

    heard: list[tuple[Event, list[Action]]]

    def decide(self, event: Event) -> list[Action]:
        actions = super().decide(event)
        type(self).heard.append((event, actions))
        return actions


def with_tokens(event: Event) -> Event:
    """What a live worker would tell: token i of a response is i."""
    if not isinstance(event, Reported):
        return event
    endings = []
    for one in event.report.endings:
        rest = pack(range(one.start, one.start + one.num_tokens))
        endings.append(replace(one, rest=rest, digest=digest(rest)))
    return replace(event, report=replace(event.report, endings=tuple(endings)))


def orders(actions: list[Action]) -> list[tuple[object, ...]]:
    """What is to be done about responses, without their tokens."""
    return [
        (one.worker, one.life, one.chunk, one.index, one.version, one.request.max_tokens, one.request.keep_kv)
        if isinstance(one, RunChunk)
        else (type(one).__name__, getattr(one, "index", None), getattr(one, "finish_reason", None))
        for one in actions
    ]


@given(
    st.sampled_from(["even", "context", "no-context", "oracle", "sticky", "group"]),
    st.lists(st.lists(st.integers(1, LIMIT), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(40, 200),
    st.integers(1, 8),
)
@settings(max_examples=80)
def test_the_controller_orders_the_same_with_tokens(
    variant: Variant, lengths: list[list[int]], num_workers: int, kv_tokens: int, seats: int
) -> None:
    flat = [length for group in lengths for length in group]
    work = Workload(3, np.full(len(lengths), 3, np.int32), np.array(flat, np.int32), LIMIT)
    engine = EngineCosts(
        1, StepLatency(AffineLatency(1.0, 0.25), 0.0), 0.001, kv_tokens, seats, kv_load_token_s=0.0
    )
    plan = FleetPlan(engine, num_workers, DispatchSettings(variant, CHUNK, BLOCK, guard_interval=2), Plain)
    Watched.heard = []
    with mock.patch("paceline.sim.rollout.Controller", Watched):
        simulate_rollout(plan, work)

    live = Controller(
        FleetSettings(workers=num_workers, variant=variant, chunk_tokens=CHUNK, guard_interval=2)
    )
    delivered: dict[int, int] = {}
    for event, actions in Watched.heard:
        found = live.decide(with_tokens(event))
        assert orders(found) == orders(actions)
        delivered |= {one.index: len(one.response.tokens) for one in found if isinstance(one, Deliver)}
    assert delivered == dict(enumerate(flat))
    assert live.num_unfinished == 0

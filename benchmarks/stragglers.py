"""A fleet of two workers, and rollouts in whose tail the free one always helps in the way that is asked for, whether it
pays or not: what exactness.py compares and chaos.py kills.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from pairs import PAIRS
from racing import make_requests

if TYPE_CHECKING:
    from paceline.planning.help import Help, HelpChoice, Helper, Load

MAX_STARTS = 20
"""Kills are no reason to give a worker up."""


def start_fleet(model: str, drafter: str, dtype: str, max_tokens: int, *, compiled: bool) -> Any:
    """The fleet, with both workers up. Every step verifies drafts, and tells what it has soon."""
    from paceline.config import BudgetSettings, EngineSettings, FleetSettings
    from paceline.fleet.fleet import Fleet

    fleet = Fleet(
        model,
        FleetSettings(workers=2, help="auto", variant="even", progress_ms=20.0, max_failed_starts=MAX_STARTS),
        EngineSettings(
            model_drafter=drafter,
            batch_invariant=True,
            compiled=compiled,
            budget=BudgetSettings(policy="fixed", fixed_tokens=4),
        ),
        dtype=dtype,
        max_model_len=max_tokens + 64,
        kv_cache_bytes=1 << 27,
    )
    await_workers(fleet)
    return fleet


def await_workers(fleet: Any) -> None:
    """Until all workers are up."""
    while any(fleet._controller.state_of(name) in {"starting", "loading"} for name in fleet.board.workers):
        fleet.advance()


def straggling_requests(fleet: Any, count: int, max_tokens: int, seed: int) -> list[Any]:
    """`count` long responses for one worker and many short ones for the other, which falls free soon."""
    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    facts = next(worker.facts for worker in fleet._controller._workers.values() if worker.facts is not None)
    pair = PAIRS["countdown"]
    long = [
        RolloutRequest(prompt, max_tokens, key=derive_key(seed, prompt, 1), group=index)
        for index, prompt in enumerate(pair.draw_prompts(pair.policy, count, seed))
    ]
    return make_requests(long, Namespace(max_tokens=max_tokens), facts.block_tokens, seed)


@contextmanager
def forced(kind: Help) -> Iterator[None]:
    """Free workers help in this way wherever they can, and go on with it."""
    from paceline.control import helping

    with (
        mock.patch.object(helping, "decide_help", partial(choose, kind)),
        mock.patch.object(helping, "judge_help", return_value=None),
    ):
        yield


def choose(kind: Help, load: Load, helper: Helper) -> HelpChoice:
    """In place of `decide_help`: this kind, where it is possible and the worker has no help yet."""
    from paceline.planning.help import Help, HelpChoice

    can = {Help.COPY: helper.can_copy, Help.DRAFT: bool(helper.ahead)}.get(kind, False)
    return HelpChoice(kind if can and not load.is_helped else Help.NOTHING, 0.0, window=8)


def roll_out(fleet: Any, requests: list[Any]) -> list[Any]:
    """One rollout to the limits of its responses."""
    from vllm import SamplingParams

    found: dict[int, Any] = {}
    fleet.submit(requests, SamplingParams(temperature=1.0, ignore_eos=True))
    while fleet.num_unfinished:
        for one in fleet.advance(0.02):
            if one.index in found:
                raise SystemExit(f"response {one.index} came twice")
            found[one.index] = one.response
    fleet.advance(0.0)  # who still helped rests
    return [found[index] for index in range(len(requests))]

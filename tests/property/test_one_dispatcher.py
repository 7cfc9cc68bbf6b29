"""The live controller orders what the simulator's dispatcher orders: told of the same ends, in the same order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import FleetSettings, Variant
from paceline.fleet.controller import Controller
from paceline.fleet.events import Ending, Opened, Report, Reported, RunChunk, Submitted, WorkerUp
from paceline.planning.dispatch import Assignment, Dispatcher, DispatchSettings
from paceline.types import RolloutRequest

BLOCK, CHUNK, LIMIT, PROMPT = 4, 8, 30, (1, 2, 3)
Place = tuple[int, int]


def orders(dispatcher: Dispatcher) -> list[Assignment]:
    """All that it gives out now, as the simulator asks for it."""
    found = []
    while (assignment := dispatcher.next_assignment()) is not None:
        found.append(assignment)
    return found


@given(
    st.sampled_from(["even", "context", "no-context", "oracle", "group"]),
    st.lists(st.lists(st.integers(1, LIMIT), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(9, 30), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_the_controller_orders_what_its_dispatcher_does_alone(
    variant: Variant, lengths: list[list[int]], rooms: list[tuple[int, int]], seed: int
) -> None:
    random_ = random.Random(seed)
    places = [(group, sample) for group, row in enumerate(lengths) for sample in range(len(row))]
    true = dict(enumerate(lengths)) if variant == "oracle" else None
    alone = Dispatcher(DispatchSettings(variant, CHUNK, BLOCK, guard_interval=2), true)
    fleet = Controller(
        FleetSettings(workers=len(rooms), variant=variant, chunk_tokens=CHUNK, guard_interval=2)
    )
    fleet.decide(Opened())
    for number, (blocks, seats) in enumerate(rooms):
        alone.worker_up(f"w{number}", blocks, seats)
        fleet.decide(WorkerUp(f"w{number}", 0, 0, blocks, BLOCK, seats))
    for group, row in enumerate(lengths):
        alone.submit(group, len(row), len(PROMPT), LIMIT)
    requests = tuple(
        RolloutRequest(PROMPT, LIMIT, key=10 * group + sample, group=group, sample=sample)
        for group, sample in places
    )
    told = lengths if variant == "oracle" else []
    actions = fleet.decide(Submitted(requests, true_lengths=tuple(n for row in told for n in row)))
    wanted = orders(alone)
    running: list[tuple[Assignment, RunChunk]] = []
    held: dict[Place, int] = dict.fromkeys(places, 0)
    while True:
        given_out = [action for action in actions if isinstance(action, RunChunk)]
        assert [(divmod(run.request.key or 0, 10), run.worker) for run in given_out] == [
            ((order.group, order.sample), order.worker) for order in wanted
        ]
        for order, run in zip(wanted, given_out, strict=True):
            assert run.request.max_tokens - len(run.request.generated) == order.chunk_tokens
            running.append((order, run))
        if not running:
            break
        order, run = running.pop(random_.randrange(len(running)))
        place = order.group, order.sample
        end = min(held[place] + order.chunk_tokens, lengths[order.group][order.sample])
        tokens, start = tuple(range(held[place], end)), held[place]
        held[place] = end
        is_over = end == lengths[order.group][order.sample]
        alone.chunk_finished(order, end, is_over)
        wanted = orders(alone)
        reason = "stop" if is_over and end < LIMIT else "length"
        ending = Ending(run.chunk, start, tokens, (-1.0,) * len(tokens), 1, 0, reason)
        actions = fleet.decide(Reported(run.worker, 0, Report(1, endings=(ending,))))
    assert held == {(group, sample): lengths[group][sample] for group, sample in places}
    assert fleet.num_unfinished == 0

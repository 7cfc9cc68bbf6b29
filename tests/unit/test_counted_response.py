"""Ledger entries of simulated responses: they count what live ones store."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.control.events import Ending, Kept
from paceline.control.live_response import RunningChunk
from paceline.control.packed import Digest, Packed
from paceline.errors import EngineError
from paceline.planning.dispatch import Assignment
from paceline.sim.counted_response import CountedResponse, make_requests
from paceline.sim.workload import Workload
from paceline.types import RolloutRequest

REQUEST = RolloutRequest((1, 2), max_tokens=10)
CHUNK = RunningChunk(
    Assignment(0, 0, 0, "w", chunk_tokens=4), CountedResponse(0, REQUEST), "w", start=2, end=6, num_steps=0
)


def ending(start: int, num_tokens: int) -> Ending:
    return Ending(0, start, num_tokens, Packed(), Digest(), 0, 0, "length")


def test_tokens_are_counted_once() -> None:
    counted = CountedResponse(0, REQUEST)
    assert [counted.absorb_end(ending(0, 4)), counted.absorb_end(ending(2, 3))] == [True, True]
    assert counted.num_tokens == 5
    assert not counted.tokens  # nothing is stored


def test_counts_go_on_from_what_was_kept() -> None:
    kept = Kept(Packed.of((5, 6, 7), (-1.0, -1.0, -1.0)), num_steps=3)
    assert CountedResponse(0, REQUEST, kept).num_tokens == 3


def test_losses_in_a_row_end_with_a_new_token() -> None:
    counted = CountedResponse(0, REQUEST)
    counted.num_losses = 2
    counted.absorb_end(ending(0, 0))
    assert counted.num_losses == 2
    counted.absorb_end(ending(0, 1))
    assert counted.num_losses == 0


@pytest.mark.parametrize("end", [8, 10])
def test_a_racer_may_pass_the_chunk(end: int) -> None:
    CountedResponse(0, REQUEST).check_extent(CHUNK, 2, end)


@pytest.mark.parametrize(("start", "end"), [(2, 11), (1, 4), (5, 4)])
def test_nobody_may_pass_the_response_or_begin_before_the_chunk(start: int, end: int) -> None:
    with pytest.raises(EngineError, match=f"tokens {start} to {end} of response 0.* 2 to 10"):
        CountedResponse(0, REQUEST).check_extent(CHUNK, start, end)


def test_requests_are_numbered_as_in_the_workload() -> None:
    work = Workload(2, np.array([3, 5], dtype=np.int32), np.array([1, 2, 3, 4], dtype=np.int32), max_tokens=9)
    requests = make_requests(work)
    assert [(r.key, r.group, r.sample, len(r.prompt)) for r in requests] == [
        (0, 0, 0, 3),
        (1, 0, 1, 3),
        (2, 1, 0, 5),
        (3, 1, 1, 5),
    ]
    assert {request.max_tokens for request in requests} == {9}

"""What ran where: every chunk is told of once, whatever ended it. Random events: test_controller_events.py."""

from __future__ import annotations

import sys

import pytest
from reports import make_ending, make_growths

from paceline.control.events import (
    CancelChunk,
    Report,
    Reported,
    RunChunk,
    StopWorker,
    WorkerLost,
)
from paceline.fleet.chunk_log import ChunkLog, ChunkSpan
from paceline.types import RolloutRequest


def order(chunk: int, index: int = 0, have: int = 0, worker: str = "w0", life: int = 0) -> RunChunk:
    request = RolloutRequest((1, 2), have + 8, key=index, generated=tuple(range(have)))
    return RunChunk(worker, life, chunk, request, 0, index)


def ended(chunk: int, start: int, count: int, reason: str, num_told: int = 0) -> Report:
    return Report(1, endings=(make_ending(chunk, start, (7,) * count, reason, num_told=num_told),))


def grown(chunk: int, start: int, count: int) -> Report:
    return Report(1, growths=make_growths(chunk, start, (7,) * count))


@pytest.fixture
def log() -> ChunkLog:
    return ChunkLog()


def test_a_chunk_is_told_of_once_it_has_ended(log: ChunkLog) -> None:
    log.note([order(0, index=3, have=16)], 1.0)
    assert log.take() == []
    log.hear(Reported("w0", 0, ended(0, 16, 8, "length")), 2.5)
    assert log.take() == [ChunkSpan(3, "w0", 1.0, 2.5, 16, 8, "length")]
    log.hear(Reported("w0", 0, ended(0, 16, 8, "length")), 3.0)
    assert log.take() == []


def test_a_chunk_that_stops_says_so(log: ChunkLog) -> None:
    log.note([order(0)], 1.0)
    log.hear(Reported("w0", 0, ended(0, 0, 5, "stop")), 2.0)
    [span] = log.take()
    assert (span.num_tokens, span.finish_reason) == (5, "stop")


def test_a_token_counts_for_whoever_told_it_first(log: ChunkLog) -> None:
    log.note([order(0)], 1.0)
    log.hear(Reported("w0", 0, grown(0, 0, 2)), 1.5)
    log.note([order(1, have=2, worker="w1")], 2.0)
    log.hear(Reported("w1", 0, grown(1, 2, 3)), 2.5)
    log.hear(Reported("w0", 0, grown(0, 2, 1)), 2.6)
    log.hear(Reported("w1", 0, ended(1, 2, 4, "stop", num_told=3)), 3.0)
    log.note([CancelChunk("w0", 0, 0)], 3.0)
    spans = {span.worker: span for span in log.take()}
    assert {name: span.num_tokens for name, span in spans.items()} == {"w0": 2, "w1": 4}
    assert spans["w0"].finish_reason == "abort"


def test_what_a_lost_worker_had_told_is_counted(log: ChunkLog) -> None:
    log.note([order(0, have=4), order(1, index=1), order(2, index=2, worker="w1")], 1.0)
    log.hear(Reported("w0", 0, grown(0, 4, 3)), 1.5)
    log.hear(Reported("w0", 0, grown(0, 9, 1)), 1.6)  # beyond a gap
    log.hear(WorkerLost("w0", 0, "killed"), 2.0)
    spans = {span.index: span for span in log.take()}
    assert spans[0] == ChunkSpan(0, "w0", 1.0, 2.0, 4, 3, "lost")
    assert spans[1].num_tokens == 0
    assert 2 not in spans


def test_a_chunk_whose_report_was_lost_has_what_came_before(log: ChunkLog) -> None:
    log.note([order(0, have=4)], 1.0)
    log.hear(Reported("w0", 0, grown(0, 4, 3)), 1.5)
    log.hear(Reported("w0", 0, ended(0, 4, 6, "stop", num_told=5)), 2.0)
    assert log.take() == [ChunkSpan(0, "w0", 1.0, 2.0, 4, 3, "lost")]


def test_late_and_foreign_reports_change_nothing(log: ChunkLog) -> None:
    log.note([order(0, life=1)], 1.0)
    log.hear(Reported("w0", 0, ended(0, 0, 8, "length")), 2.0)
    log.hear(Reported("w1", 1, ended(0, 0, 8, "length")), 2.0)
    log.hear(WorkerLost("w0", 0, "killed"), 2.0)
    assert log.take() == []
    log.hear(WorkerLost("w0", 1, "killed"), 3.0)
    assert len(log.take()) == 1


def test_cancelled_chunks_and_stopped_workers_end_too(log: ChunkLog) -> None:
    log.note([order(0), order(1, worker="w1")], 1.0)
    log.note([CancelChunk("w0", 0, 0), StopWorker("w1", 0)], 2.0)
    assert [(span.worker, span.finish_reason) for span in log.take()] == [("w0", "abort"), ("w1", "lost")]


def test_no_tokens_are_held(log: ChunkLog) -> None:
    """A tuple of Python numbers has 36 bytes a token, and thousands of responses run."""
    long = order(0, have=9)
    held = sys.getrefcount(long.request)
    log.note([long], 1.0)
    now = sys.getrefcount(long.request)
    assert now == held

"""When each chunk ran on which worker, for who watches. Kept by Fleet from what it hears and orders; decides nothing.

Invariants: an ordered chunk is told of exactly once, when it has ended, whatever ended it; late and foreign reports
change nothing; as long as a response runs in one place at a time, its chunks follow one another without a gap, so that
their tokens add up to those that it gained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.control.events import (
    Action,
    CancelChunk,
    Ending,
    Event,
    Growth,
    Reported,
    RunChunk,
    StopWorker,
    WorkerLost,
)

MOST_CHUNKS = 1 << 16
"""Ended chunks that are kept for a reader; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk that has ended."""

    index: int
    """Place of its response's request in the rollout."""
    worker: str
    start_s: float
    """When it was ordered, by the clock that was given."""
    end_s: float
    start: int
    """Tokens that the response had before."""
    num_tokens: int
    """Tokens that it gained: of a chunk that was lost or cancelled, those that had been told."""
    finish_reason: Literal["stop", "length", "abort", "lost"]
    """abort: cancelled; lost: with its worker."""


@dataclass(slots=True)
class _Open:
    """A chunk that runs."""

    order: RunChunk
    start_s: float
    end: int
    """Tokens of the response, as far as told."""


class ChunkLog:
    """Give it every event before the controller has it, and every action after."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._done: deque[ChunkSpan] = deque(maxlen=MOST_CHUNKS)

    def hear(self, event: Event, now_s: float) -> None:
        """Something happened."""
        match event:
            case Reported(worker, life, report):
                for growth in report.growths:
                    self._grow(worker, life, growth)
                for ending in report.endings:
                    self._end(worker, life, ending, now_s)
            case WorkerLost(worker, life):
                self._lose(worker, life, now_s)

    def note(self, actions: Iterable[Action], now_s: float) -> None:
        """Something was ordered."""
        for action in actions:
            match action:
                case RunChunk():
                    self._open[action.chunk] = _Open(action, now_s, len(action.request.generated))
                case CancelChunk(_, _, chunk):
                    self._close(chunk, "abort", now_s)
                case StopWorker(worker, life):
                    self._lose(worker, life, now_s)

    def take(self) -> list[ChunkSpan]:
        """Chunks that ended since the last call, in that order (at most the latest `MOST_CHUNKS`)."""
        done = list(self._done)
        self._done.clear()
        return done

    def _find(self, worker: str, life: int, chunk: int) -> _Open | None:
        """The chunk if this worker runs it; the controller believes nobody else either."""
        found = self._open.get(chunk)
        return (
            found if found is not None and (found.order.worker, found.order.life) == (worker, life) else None
        )

    def _grow(self, worker: str, life: int, growth: Growth) -> None:
        chunk = self._find(worker, life, growth.chunk)
        if (
            chunk is not None and growth.start <= chunk.end
        ):  # what lies beyond a gap, the controller leaves out
            chunk.end = max(chunk.end, growth.start + len(growth.tokens))

    def _end(self, worker: str, life: int, ending: Ending, now_s: float) -> None:
        chunk = self._find(worker, life, ending.chunk)
        if chunk is not None:
            chunk.end = ending.start + len(ending.tokens)
            self._close(ending.chunk, "stop" if ending.finish_reason == "stop" else "length", now_s)

    def _lose(self, worker: str, life: int, now_s: float) -> None:
        lost = [number for number in self._open if self._find(worker, life, number) is not None]
        for number in lost:
            self._close(number, "lost", now_s)

    def _close(
        self, number: int, finish_reason: Literal["stop", "length", "abort", "lost"], now_s: float
    ) -> None:
        chunk = self._open.pop(number, None)
        if chunk is None:
            return
        order, start = chunk.order, len(chunk.order.request.generated)
        span = ChunkSpan(
            order.index, order.worker, chunk.start_s, now_s, start, chunk.end - start, finish_reason
        )
        self._done.append(span)

"""When each chunk ran on which worker, for who watches. Kept by Fleet from what it hears and orders; decides nothing.

Invariants: an ordered chunk is told of exactly once, when it has ended, whatever ended it; late and foreign reports
change nothing; a token counts for the chunk that told it first, so that the chunks' tokens add up to those that the
response gained. As long as it runs in one place at a time, they follow one another without a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.control.events import (
    Action,
    CancelChunk,
    Ending,
    Event,
    Growths,
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
    finish_reason: str
    """"stop", "length", "error" (the response has failed), "abort" (cancelled) or "lost" (with its worker, or with a
    report on the way)."""


@dataclass(slots=True)
class _Open:
    """A chunk that runs. Its order is not held: it has all tokens of the response."""

    index: int
    worker: str
    life: int
    start_s: float
    start: int
    gained: int = 0
    """Tokens of the response that were told here first."""


class ChunkLog:
    """Give it every event before the controller has it, and every action after."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._done: deque[ChunkSpan] = deque(maxlen=MOST_CHUNKS)
        self._known: dict[int, int] = {}  # tokens of each response, as far as told

    def hear(self, event: Event, now_s: float) -> None:
        """Something happened."""
        match event:
            case Reported(worker, life, report):
                self._grow(worker, life, report.growths)
                for ending in report.endings:
                    self._end(worker, life, ending, now_s)
            case WorkerLost(worker, life):
                self._lose(worker, life, now_s)

    def note(self, actions: Iterable[Action], now_s: float) -> None:
        """Something was ordered."""
        for action in actions:
            match action:
                case RunChunk():
                    self._open[action.chunk] = chunk = _begin(action, now_s)
                    self._known[action.index] = chunk.start
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
        is_theirs = found is not None and found.worker == worker and found.life == life
        return found if is_theirs else None

    def _grow(self, worker: str, life: int, growths: Growths) -> None:
        for number, start, count, _ in growths.extents():
            chunk = self._open.get(number)
            if chunk is not None and chunk.worker == worker and chunk.life == life:
                self._extend(chunk, start, start + count)

    def _extend(self, chunk: _Open, start: int, end: int) -> None:
        """Tokens `start` to `end` were told; what is known counts elsewhere, what lies beyond a gap is left out."""
        known = self._known[chunk.index]
        if start <= known < end:
            chunk.gained += end - known
            self._known[chunk.index] = end

    def _end(self, worker: str, life: int, ending: Ending, now_s: float) -> None:
        chunk = self._find(worker, life, ending.chunk)
        if chunk is None:
            return
        end = ending.start + ending.num_tokens
        rest = end - len(ending.rest)
        is_whole = rest <= self._known[chunk.index]
        self._extend(chunk, rest, end)
        self._close(ending.chunk, ending.finish_reason if is_whole else "lost", now_s)

    def _lose(self, worker: str, life: int, now_s: float) -> None:
        lost = [number for number in self._open if self._find(worker, life, number) is not None]
        for number in lost:
            self._close(number, "lost", now_s)

    def _close(self, number: int, finish_reason: str, now_s: float) -> None:
        chunk = self._open.pop(number, None)
        if chunk is None:
            return
        span = ChunkSpan(
            chunk.index, chunk.worker, chunk.start_s, now_s, chunk.start, chunk.gained, finish_reason
        )
        self._done.append(span)


def _begin(order: RunChunk, now_s: float) -> _Open:
    start = len(order.request.generated)
    return _Open(order.index, order.worker, order.life, now_s, start)

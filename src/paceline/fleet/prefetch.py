"""The prefetch of the KV pool: what will run next is brought from disk to memory before it runs (Seer 4.2).

The controller foresees who is next, a thread of its own moves their entries, and the loop waits for neither: it is
asked again once the thread is done. A wrong guess costs a copy, never a token. Owned by `FleetKvPool`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from paceline.config import KvPoolSettings
from paceline.kvpool import KvPool, response_identity
from paceline.types import KvPoolCounters, RolloutRequest

LOOK_AHEAD = 32
"""Responses whose entries are brought up; those that do not fit into memory together stay on disk."""
LEAST_PAUSE_S = 0.1
HANDED_OUT_S = 2.0
"""How long an entry stays where it is after its response has left the queue: its worker may not have loaded it yet."""

Queue: TypeAlias = Callable[[int], Sequence[RolloutRequest]]
"""The requests that will run next, at most so many, the first one first."""


class Prefetcher:
    """A thread, and its handle on the pool. Close it."""

    def __init__(self, settings: KvPoolSettings) -> None:
        """Raises ConfigError as `KvPool.open` does."""
        self._pool = KvPool.open(settings)
        self._thread = ThreadPoolExecutor(1, "paceline prefetch")
        self._last: Future[int] = Future()
        self._last.set_result(0)
        self._next_s = 0.0
        self._names: list[str] = []
        self._handed_out: dict[str, float] = {}  # when, of those that have left the queue lately, by name

    def look_ahead(self, queue: Queue) -> None:
        """Begin to bring up what is next, unless that is being done or was done just now. Returns at once."""
        now_s = time.monotonic()
        if now_s < self._next_s or not self._last.done():
            return
        self._last.result()  # the pool raises nothing: an error is one of the program
        self._next_s = now_s + LEAST_PAUSE_S
        self._turn_to([_name(request) for request in queue(LOOK_AHEAD)], now_s)
        self._last = self._thread.submit(self._pool.prefetch, self._names, list(self._handed_out))

    def _turn_to(self, names: list[str], now_s: float) -> None:
        waiting = set(names)
        left = dict.fromkeys((name for name in self._names if name not in waiting), now_s)
        self._handed_out = {
            name: since_s
            for name, since_s in (self._handed_out | left).items()
            if name not in waiting and now_s < since_s + HANDED_OUT_S
        }
        self._names = names

    def counters(self) -> KvPoolCounters:
        """What the thread has done with the pool."""
        return self._pool.counters()

    def close(self) -> None:
        """Wait until the thread has ended."""
        self._thread.shutdown()
        self._pool.close()


def _name(request: RolloutRequest) -> str:
    assert request.key is not None
    return response_identity(request.key, request.prompt)

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

    def look_ahead(self, queue: Queue) -> None:
        """Begin to bring up what is next, unless that is being done or was done just now. Returns at once."""
        now_s = time.monotonic()
        if now_s < self._next_s or not self._last.done():
            return
        self._last.result()  # the pool raises nothing: an error is one of the program
        self._next_s = now_s + LEAST_PAUSE_S
        self._last = self._thread.submit(self._bring, queue(LOOK_AHEAD))

    def _bring(self, requests: Sequence[RolloutRequest]) -> int:
        return self._pool.prefetch(_name(request) for request in requests)

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

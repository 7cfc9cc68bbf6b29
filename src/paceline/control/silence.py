"""How long nothing has been heard of a worker of which something is expected. Used by the controller."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from paceline.config import FleetSettings
from paceline.control.worker import Worker

LONGEST_TICK_S = 1.0
"""Of a longer time between two ticks so much counts as silence: the driver was busy elsewhere and has heard nobody."""


class Silent(NamedTuple):
    """A worker that has been silent for too long."""

    worker: Worker
    reason: str
    may_wait: bool
    """It only did not start, while others generate: it may wait for room."""


class Silence:
    """One per controller. It is measured while the driver listens."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._last_tick_s: float | None = None
        self._listened_s = 0.0

    def look(
        self, now_s: float, workers: Collection[Worker], helpers: Collection[str], *, is_idle: bool
    ) -> Iterable[Silent]:
        """Time goes on: who has been silent for too long?

        helpers: the workers without chunks of which something is expected all the same. is_idle: there is no rollout.
        Read it as you go: who is lost meanwhile is another one behind it.
        """
        listened_s = self._listen(now_s)
        goes_on = any(worker.state == "up" if is_idle else worker.chunks for worker in workers)
        for worker in workers:
            if worker.state == "up":
                if not worker.chunks and worker.name not in helpers:
                    worker.waiting_since_s = None
                    continue
                limit_s = self._settings.silence_s
            elif worker.state == "given up":
                continue
            else:
                limit_s = self._settings.start_timeout_s
            if worker.waiting_since_s is None:
                worker.waiting_since_s = listened_s
            elif listened_s - worker.waiting_since_s > limit_s:
                yield Silent(worker, self._describe(worker), worker.state == "starting" and goes_on)

    def _listen(self, now_s: float) -> float:
        """Gives the seconds that the driver has listened so far."""
        before_s, self._last_tick_s = self._last_tick_s, now_s
        if before_s is not None:
            self._listened_s += min(now_s - before_s, LONGEST_TICK_S)
        return self._listened_s

    def _describe(self, worker: Worker) -> str:
        """What a worker has not done for too long."""
        if worker.state == "up":
            step = "engine step" if worker.chunks else "turn of drafting"
            return f"it finished no {step} after {self._settings.silence_s:g} s"
        hint = " (`ray status` tells whether there was room for it)" if worker.state == "starting" else ""
        return f"it was still {worker.state} after {self._settings.start_timeout_s:g} s{hint}"

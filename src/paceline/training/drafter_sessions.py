"""When a drafter's trainer runs beside a rollout (TLT 4.2): its sessions, on one engine or on a fleet.

The decisions are those of planning/harvest.py either way. Called by adaptive_rollouts.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.distillation.spot_link import SpotLink
from paceline.planning import harvest
from paceline.planning.harvest import HarvestSettings, HarvestState
from paceline.record import DrafterSession, RecordWriter
from paceline.terminal.meter import RolloutMeter

if TYPE_CHECKING:
    from paceline.fleet.fleet import Fleet
    from paceline.training.rollouts import Watcher

WORKER = "engine"


class Sessions(Protocol):
    """Rollouts beside which the trainer may run."""

    def open(self, step: int) -> None:
        """The rollout of this train step begins."""
        ...

    def close(self) -> None:
        """It is over: the trainer has stopped. Means nothing where none was opened."""
        ...


class TailSessions:
    """On one engine, a fleet of one worker: in the tail of a rollout, from where few responses run to its end.

    Stands between the rollouts and who watches them.
    """

    def __init__(self, link: SpotLink, max_running: int, record: RecordWriter, watcher: Watcher) -> None:
        """max_running: responses that may run beside the trainer."""
        self._link, self._max_running, self._record, self._watcher = link, max_running, record, watcher
        self._harvest, _ = harvest.worker_up(HarvestState(), WORKER)
        self._begin_s, self._step = 0.0, 0

    def open(self, step: int) -> None:
        self._step = step
        self._carry_out(harvest.rollout_started(self._harvest))

    def close(self) -> None:
        self._carry_out(harvest.rollout_ended(self._harvest))

    def show_rollout(self, meter: RolloutMeter) -> None:
        """A step has ended: has the tail begun?"""
        self._watcher.show_rollout(meter)
        few = meter.num_responses - meter.num_finished <= self._max_running
        if few and self._harvest.is_rollout:
            self._carry_out(harvest.worker_idle(self._harvest, WORKER, HarvestSettings()))

    def _carry_out(self, decision: harvest.Decision) -> None:
        self._harvest, actions = decision
        for action in actions:
            now_s = self._record.now_s()
            if action.kind == "stop":
                self._end(self._link.pause(WORKER, None), now_s)
            else:
                self._begin_s = now_s
                self._link.resume(WORKER, WORKER)

    def _end(self, core_s: float | None, now_s: float) -> None:
        """core_s: processor time that the trainer has used; None: none has run."""
        if core_s is not None:
            self._record.write(
                DrafterSession(t_start_s=self._begin_s, t_end_s=now_s, step=self._step, core_s=core_s)
            )


class FleetSessions:
    """On a fleet: while workers are free and find nobody to help. Its controller decides, its recording tells."""

    def __init__(self, fleet: Fleet, link: SpotLink) -> None:
        self._fleet, self._link = fleet, link

    def open(self, step: int) -> None:
        self._fleet.use_trainer(self._link)

    def close(self) -> None:
        self._fleet.use_trainer(None)

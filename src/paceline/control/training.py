"""Which free worker lends its cores to the drafter's trainer (planning/harvest.py).

There is one trainer, so one worker trains at a time; when it is needed, the next one takes over. Used by the
controller, which says who is free. Invariant: whoever trains has no chunk and helps nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.control.events import EndTraining, TrainDrafter, Training
from paceline.control.helping import Place
from paceline.planning import harvest
from paceline.planning.harvest import HarvestSettings, HarvestState

SETTINGS = HarvestSettings(max_members=1)


@dataclass(slots=True)
class TrainingSessions:
    """One per controller."""

    leader: Place | None = None
    """Who trains now."""
    _state: HarvestState = field(default_factory=HarvestState)
    _places: dict[str, Place] = field(default_factory=dict)  # of the workers in the state

    @property
    def is_wanted(self) -> bool:
        """Whether there is a rollout in which a drafter is trained."""
        return self._state.is_rollout

    def begin(self) -> None:
        """Such a rollout begins."""
        self._state, _ = harvest.rollout_started(self._state)

    def end(self) -> list[Training]:
        """It is over."""
        return self._settle(harvest.rollout_ended(self._state)[0])

    def observe(self, up: Collection[Place], free: Collection[Place], *, may_begin: bool) -> list[Training]:
        """Who may train has changed.

        up: all workers that are up. free: those of them without chunks that help nobody. may_begin: help was looked for
        just now; else those that have fallen free since then wait.
        """
        state, places = self._state, {place.worker: place for place in up}
        members = sorted(state.workers, key=lambda name: name == state.leader)  # who follows it is known then
        for name in members:
            if self._places[name] != places.get(name):
                state, _ = harvest.worker_lost(state, name, SETTINGS)
            elif state.workers[name].phase != "BUSY" and places[name] not in free:
                state, _ = harvest.worker_needed(state, name, SETTINGS)
        for name in sorted(places.keys() - state.workers.keys()):
            state, _ = harvest.worker_up(state, name)
        self._places = places
        for place in sorted(free) if may_begin else ():
            state, _ = harvest.worker_idle(state, place.worker, SETTINGS)
        return self._settle(state)

    def _settle(self, state: HarvestState) -> list[Training]:
        """The state from now on, and what that means for the trainer."""
        before, self._state = self.leader, state
        self.leader = None if state.leader is None else self._places[state.leader]
        if self.leader == before:
            return []
        ended: list[Training] = [] if before is None else [EndTraining(*before)]
        return ended if self.leader is None else [*ended, TrainDrafter(*self.leader)]

"""Which free workers lend their cores to the drafter's trainers (planning/harvest.py).

As many train at a time as there are trainers; when a worker is needed, another one takes over. Used by the controller,
which says who is free. Invariant: whoever trains has no chunk and helps nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.control.events import EndTraining, TrainDrafter, Training
from paceline.control.helping import Place
from paceline.planning import harvest
from paceline.planning.harvest import HarvestSettings, HarvestState


@dataclass(slots=True)
class TrainingSessions:
    """One per controller."""

    members: tuple[Place, ...] = ()
    """Who trains now, the leader first."""
    _settings: HarvestSettings = field(default_factory=HarvestSettings)
    _state: HarvestState = field(default_factory=HarvestState)
    _places: dict[str, Place] = field(default_factory=dict)  # of the workers in the state

    @property
    def is_wanted(self) -> bool:
        """Whether there is a rollout in which a drafter is trained."""
        return self._state.is_rollout

    def begin(self, num_trainers: int) -> None:
        """Such a rollout begins."""
        self._settings = HarvestSettings(max_members=num_trainers)
        self._state, _ = harvest.rollout_started(self._state)

    def end(self) -> list[Training]:
        """It is over."""
        return self._settle(harvest.rollout_ended(self._state)[0])

    def observe(self, up: Collection[Place], free: Collection[Place], *, may_begin: bool) -> list[Training]:
        """Who may train has changed.

        up: all workers that are up. free: those of them without chunks that help nobody. may_begin: help was looked for
        just now; else those that have fallen free since then wait.
        """
        state, settings, places = self._state, self._settings, {place.worker: place for place in up}
        members = sorted(state.workers, key=lambda name: name == state.leader)  # who follows it is known then
        for name in members:
            if self._places[name] != places.get(name):
                state, _ = harvest.worker_lost(state, name, settings)
            elif state.workers[name].phase != "BUSY" and places[name] not in free:
                state, _ = harvest.worker_needed(state, name, settings)
        for name in sorted(places.keys() - state.workers.keys()):
            state, _ = harvest.worker_up(state, name)
        self._places = places
        for place in sorted(free) if may_begin else ():
            state, _ = harvest.worker_idle(state, place.worker, settings)
        return self._settle(state)

    def _settle(self, state: HarvestState) -> list[Training]:
        """The state from now on, and what that means for the trainers: those that stop before those that begin."""
        before, self._state = self.members, state
        names = sorted(state.named("TRAINING"), key=lambda name: name != state.leader)
        self.members = tuple(self._places[name] for name in names)
        leads = next((place.worker for place in self.members if place in before), None)  # of those that go on
        ended: list[Training] = [EndTraining(*place, leads) for place in before if place not in self.members]
        begun: list[Training] = [
            TrainDrafter(*place, str(state.leader)) for place in self.members if place not in before
        ]
        return [*ended, *begun]

"""Drafter training on workers that fell idle, in the simulated fleet: how many worker seconds does it get?

Carries out TLT's worker coordinator (`planning.harvest`). Owned by the fleet.
"""

from __future__ import annotations

from paceline.planning import harvest


class Training:
    """The training sessions of one rollout."""

    def __init__(self, settings: harvest.HarvestSettings, num_workers: int) -> None:
        self._settings = settings
        state = harvest.HarvestState()
        for number in range(num_workers):
            state, _ = harvest.worker_up(state, str(number))
        self._state, _ = harvest.rollout_started(state)
        self._since: dict[str, float] = {}
        self._total_s = 0.0

    def idle(self, worker: int, now_s: float) -> None:
        """A worker has nothing left to generate."""
        self._carry_out(harvest.worker_idle(self._state, str(worker), self._settings), now_s)

    def needed(self, worker: int, now_s: float) -> None:
        """A worker gets responses."""
        self._carry_out(harvest.worker_needed(self._state, str(worker), self._settings), now_s)

    def end(self, now_s: float) -> float:
        """The rollout is over; gives the worker seconds spent on training."""
        self._carry_out(harvest.rollout_ended(self._state), now_s)
        return self._total_s

    def _carry_out(self, decision: harvest.Decision, now_s: float) -> None:
        self._state, actions = decision
        for action in actions:
            if action.kind == "stop":
                self._total_s += now_s - self._since.pop(action.worker)
            else:
                self._since[action.worker] = now_s

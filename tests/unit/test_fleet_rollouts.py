"""Watched rollouts on a fleet, without workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from paceline.fleet.fleet import Finished
from paceline.fleet.help_log import HelpLog
from paceline.record import Note
from paceline.training.fleet_rollouts import FleetRollouts
from paceline.training.rollouts import DEAD_DRAFTER
from paceline.types import DrafterScore, DraftSharingCounters, Response, RolloutRequest

REQUEST = RolloutRequest(prompt=(1, 2), max_tokens=5, key=3)


class Fleet:
    """Finishes its one response at once; a worker finds its drafter dead."""

    def __init__(self) -> None:
        self.num_unfinished = self.num_alarms = 0
        self.board: Any = SimpleNamespace(
            take_steps=list, draft_sharing=DraftSharingCounters(), drafters=("small",)
        )
        self.chunks = SimpleNamespace(take=list)
        self.helps = HelpLog()

    def submit(self, requests: Any, params: Any, journal: Any) -> None:
        self.num_unfinished = 1

    def advance(self) -> list[Finished]:
        self.num_unfinished, self.num_alarms = 0, 1
        return [Finished(0, Response(REQUEST, (7,), (-0.5,), "stop", 0, 0, 0, 0, 0, 1), None)]

    def abandon(self) -> None:
        pass

    def drafter_score(self) -> DrafterScore:
        return DrafterScore(alarms=self.num_alarms)


def test_a_dead_drafter_is_noted() -> None:
    events: list[Any] = []
    record: Any = SimpleNamespace(now_s=lambda: 1.0, write=events.append)
    quiet: Any = SimpleNamespace(check=lambda: None, show_rollout=lambda meter: None)
    fleet, params = Fleet(), None
    rollouts = FleetRollouts(fleet, record, quiet, quiet, None)  # type: ignore[arg-type]
    rollouts.run([REQUEST], params, 1)  # type: ignore[arg-type]
    assert [event.text for event in events if isinstance(event, Note)] == [DEAD_DRAFTER]

"""Which drafter each step of a training run begins with, and what is kept of it; without engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("transformers", reason="transformers is not installed")

from paceline.engine.rollout_engine import TokenEvent
from paceline.errors import RecordError
from paceline.record import Note
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried, read_ladder, write_ladder
from paceline.training.ladder_rollouts import LadderRollouts
from paceline.training.rollouts import WatchedRollouts
from paceline.types import DrafterScore, Response, RolloutRequest

REQUESTS = [RolloutRequest(prompt=(1, 2), max_tokens=9, key=key) for key in range(12)]
LADDER = Ladder(8, (0.3, 0.9), (Rungs("small", (0.9, 1.5)), Rungs("tiny", (1.0, 1.4))))
MADE = LadderFile(ladder=LADDER)
"""Nothing is known of how often the drafters are right."""


class Engine:
    """Each of its drafters is right in so many of a hundred tokens of a response."""

    def __init__(self, right: tuple[int, int]) -> None:
        self.policy_version, self.place, self.right, self.longest = 0, 0, right, 24
        self.score = DrafterScore()

    def stream(
        self, requests: Sequence[RolloutRequest], params: Any, *, on_failure: str = "raise"
    ) -> Iterator[TokenEvent]:
        for index, request in enumerate(requests):
            self.score += DrafterScore(100, self.right[self.place])
            tokens = tuple(range(self.longest - index % 9))
            logprobs = (-0.5,) * len(tokens)
            yield TokenEvent(
                index, tokens, logprobs, Response(request, tokens, logprobs, "stop", 0, 0, 0, 0, 0, 2)
            )

    def take_observations(self) -> list[Any]:
        return []

    def use_drafter(self, place: int) -> None:
        self.place = place

    def drafter_score(self) -> DrafterScore:
        return self.score


class Run:
    """Rollouts with everything around them made up. measured: lengths of the responses of each measurement."""

    def __init__(self, folder: Path, right: tuple[int, int], made: LadderFile | None = MADE) -> None:
        """made: what is measured; None: its worker is lost meanwhile."""
        self.engine, self.made = Engine(right), made
        self.notes: list[str] = []
        self.measured: list[list[int]] = []
        clock = itertools.count()
        record: Any = SimpleNamespace(now_s=lambda: next(clock), write=self.write, add_step=None)
        quiet: Any = SimpleNamespace(check=lambda: None, show_rollout=lambda meter: None)
        engine: Any = self.engine
        watched = WatchedRollouts(engine, record, quiet, quiet)
        self.rollouts = LadderRollouts(watched, ("small", "tiny"), self.measure, folder)

    def measure(self, responses: Sequence[Response], params: Any) -> LadderFile | None:
        self.measured.append([len(one.tokens) for one in responses])
        self.engine.use_drafter(0)
        return self.made

    def write(self, event: Note) -> None:
        self.notes.append(event.text)

    def step(self, number: int | None) -> int:
        """Returns the drafter's place."""
        params: Any = None
        self.rollouts.run(REQUESTS, params, number)
        return self.engine.place


def test_the_ladder_is_measured_once_and_steps_begin_with_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, right=(40, 80))
    assert run.step(None) == 0
    assert run.measured == [], "an evaluation is no step"
    assert [run.step(number) for number in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert run.measured == [[24, 24, 23, 23, 22, 22, 21, 20]]
    assert [note.split(":")[0].partition(" in ")[0] for note in run.notes] == [
        "the draft ladder was measured",
        "drafter tiny from step 2 on",
    ]


def test_a_resumed_run_goes_on_with_what_it_knew(tmp_path: Path) -> None:
    before = Run(tmp_path, right=(40, 80))
    for number in (1, 2):
        before.step(number)
    kept = read_ladder(tmp_path / "ladder.json")
    assert kept.ladder == LADDER
    assert set(kept.tried) == {"small", "tiny"}
    resumed = Run(tmp_path, right=(40, 80))
    assert resumed.step(3) == 1
    assert resumed.measured == []


def test_a_ladder_that_could_not_be_measured_is_measured_after_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, right=(40, 80), made=None)
    assert [run.step(number) for number in (1, 2)] == [0, 0]
    run.made = MADE
    assert [run.step(number) for number in (3, 4)] == [0, 1]
    assert len(run.measured) == 3


def test_a_drafter_that_was_measured_to_be_seldom_right_is_not_tried(tmp_path: Path) -> None:
    tried = {"small": Tried(99.0, 100.0), "tiny": Tried(10.0, 100.0)}
    run = Run(tmp_path, right=(40, 80), made=LadderFile(ladder=LADDER, tried=tried))
    assert [run.step(number) for number in (1, 2, 3)] == [0, 0, 0]
    kept = read_ladder(tmp_path / "ladder.json").tried
    assert kept["small"].tried == pytest.approx(1200 * (1 + 0.9 + 0.81)), "the step has shown more of it"


def test_a_ladder_of_other_drafters_is_refused(tmp_path: Path) -> None:
    write_ladder(LadderFile(ladder=replace(LADDER, drafters=LADDER.drafters[:1])), tmp_path / "ladder.json")
    with pytest.raises(RecordError, match="is the ladder of small, the drafters are small, tiny"):
        Run(tmp_path, right=(40, 80))


def test_the_first_drafter_stays_where_no_other_could_be_faster(tmp_path: Path) -> None:
    run = Run(tmp_path, right=(90, 90))
    assert [run.step(number) for number in range(1, 6)] == [0] * 5
    assert len(run.notes) == 1


def test_short_responses_are_not_measured_with(tmp_path: Path) -> None:
    run = Run(tmp_path, right=(40, 80))
    run.engine.longest = 15
    assert [run.step(number) for number in (1, 2)] == [0, 0]
    assert run.measured == []
    run.engine.longest = 16
    assert [run.step(number) for number in (3, 4)] == [0, 1]
    assert len(run.measured) == 1

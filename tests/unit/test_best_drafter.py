"""`rollout --ladder`: which drafter a rollout begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.commands.inputs.best_drafter import begin_with_best
from paceline.config import EngineSettings
from paceline.errors import ConfigError, RecordError
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried, write_ladder

LADDER = Ladder(8, (0.3, 0.9), (Rungs("small", (0.9, 1.5)), Rungs("tiny", (1.0, 1.4))))
TRIED = {"small": Tried(30.0, 100.0), "tiny": Tried(80.0, 100.0)}
SETTINGS = EngineSettings(model_drafter="models/small", further_drafters=("models/tiny",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_ladder(LadderFile(ladder=LADDER, tried=TRIED), tmp_path / "ladder.json")
    return tmp_path / "ladder.json"


def test_the_best_one_drafts(path: Path) -> None:
    made, rung, known = begin_with_best(SETTINGS, path, keeps_others=False)
    assert known.tried == TRIED
    assert made.model_drafters == ("models/tiny",)
    assert (rung.drafter, rung.acceptance) == ("tiny", pytest.approx(81 / 101))


def test_where_all_of_them_draft_the_best_one_is_the_first(path: Path) -> None:
    made, *_ = begin_with_best(SETTINGS, path, keeps_others=True)
    assert made.model_drafters == ("models/tiny", "models/small")


def test_what_cannot_be_chosen_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give both"):
        begin_with_best(EngineSettings(model_drafter="models/small"), path, keeps_others=False)
    others = SETTINGS.model_copy(update={"further_drafters": ("other",)})
    with pytest.raises(RecordError, match="the ladder of small, tiny, the drafters are small, other"):
        begin_with_best(others, path, keeps_others=False)
    write_ladder(LadderFile(ladder=None), tmp_path / "empty.json")
    with pytest.raises(ConfigError, match="no rungs yet"):
        begin_with_best(SETTINGS, tmp_path / "empty.json", keeps_others=False)

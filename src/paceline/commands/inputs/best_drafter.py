"""`rollout --ladder`: the drafters in the order of a draft ladder, the best one first."""

from __future__ import annotations

from pathlib import Path

from paceline.config import EngineSettings
from paceline.errors import ConfigError
from paceline.planning.ladder import Rung, rank_tried
from paceline.record.ladder_file import read_ladder


def begin_with_best(settings: EngineSettings, path: Path) -> tuple[EngineSettings, Rung]:
    """The settings with the drafter that promises most as the model drafter, and its rung.

    The others stay where they draft too. Raises RecordError for a file that cannot be read or is of other drafters,
    ConfigError where it has no ladder, or there is no choice.
    """
    names = settings.drafter_names
    if len(names) < 2:
        raise ConfigError("--ladder chooses between --model-drafter and each --further-drafter: give both")
    known = read_ladder(path, names)
    if known.ladder is None:
        raise ConfigError(f"--ladder {path} has no rungs yet: measure them with 'paceline ladder'")
    ranked = rank_tried(known.ladder, known.tried)
    first, *others = [settings.model_drafters[names.index(rung.drafter)] for rung in ranked]
    further = tuple(others) if settings.draft_worker else ()
    return settings.model_copy(update={"model_drafter": first, "further_drafters": further}), ranked[0]

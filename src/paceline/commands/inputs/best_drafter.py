"""`rollout --ladder`: the drafters in the order of a draft ladder, the best one first."""

from __future__ import annotations

from pathlib import Path

from paceline.config import EngineSettings
from paceline.errors import ConfigError
from paceline.planning.ladder import Rung, rank_tried
from paceline.record.ladder_file import LadderFile, read_ladder


def begin_with_best(
    settings: EngineSettings, path: Path, *, keeps_others: bool
) -> tuple[EngineSettings, Rung, LadderFile]:
    """The settings with the drafter that promises most as the model drafter, its rung, and all that is known.

    keeps_others: they draft too. Raises RecordError for a file that cannot be read or is of other drafters, ConfigError
    where it has no ladder, or there is no choice.
    """
    names = settings.drafter_names
    if len(names) < 2:
        raise ConfigError("--ladder chooses between --model-drafter and each --further-drafter: give both")
    known = read_ladder(path, names)
    if known.ladder is None:
        raise ConfigError(f"--ladder {path} has no rungs yet: measure them with 'paceline ladder'")
    ranked = rank_tried(known.ladder, known.tried)
    first, *others = [settings.model_drafters[names.index(rung.drafter)] for rung in ranked]
    further = tuple(others) if keeps_others else ()
    chosen = settings.model_copy(update={"model_drafter": first, "further_drafters": further})
    return chosen, ranked[0], known

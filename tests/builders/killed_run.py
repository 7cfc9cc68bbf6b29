"""A training run that ends like one whose machine's memory ran out: killed, in the middle of a step's rollout."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from digit_task import DigitTask
from rich.console import Console

import paceline.control.controller as controller
import paceline.training.run as training_run
from paceline.control.events import Keep
from paceline.fleet.cluster import import_ray
from paceline.fleet.journal import Journal
from paceline.training.recipe import Recipe


def main(recipe_file: str, folder: str, step: str, num_finished: str) -> None:
    """Run until the journal of this step has so many finished responses, and an unfinished one if there is a fleet."""
    recipe = Recipe.model_validate_json(Path(recipe_file).read_text())
    write, finished, begun = Journal.write, set[int](), set[int]()

    def write_and_end(journal: Journal, keeps: Sequence[Keep]) -> None:
        write(journal, keeps)
        if journal.path.name == f"step-{step}":
            finished.update(keep.index for keep in keeps if keep.finish_reason is not None)
            begun.update(keep.index for keep in keeps if keep.finish_reason is None)
            if len(finished) >= int(num_finished) and (recipe.fleet is None or begun - finished):
                os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = write_and_end  # type: ignore[method-assign]
    controller.KEEP_S = 0.0
    training_run.load_task = lambda name, **options: DigitTask()  # type: ignore[assignment, misc]
    if recipe.fleet is not None:
        import_ray().cloudpickle.register_pickle_by_value(sys.modules[DigitTask.__module__])
    training_run.TrainingRun(recipe, Path(folder), Console(file=io.StringIO())).run()


if __name__ == "__main__":
    main(*sys.argv[1:])

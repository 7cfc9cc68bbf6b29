"""The folder of a training run: what may be in it, what an earlier run left, where to go on.

    record.jsonl          every measurement (paceline.record)
    checkpoints/          the trainer's checkpoints, from which --resume continues exactly (checkpoints.py)
    rollouts/             what the rollouts since the last checkpoint have, for --resume (rollout_journals.py)
    drafter/              the drafter that grew in the run, if asked for (adaptive_rollouts.py)
    ladder.json           what each of several drafters gains, and how often it was right (ladder_rollouts.py)
    decisions/            what was decided, if asked for (paceline.record.decisions)
    policy/               the trained policy in Hugging Face format, once the run has finished
    report.html           the page of the run
    bench.json            methods run side by side, if `paceline bench --json` was asked to leave them here
    log.txt               what the libraries printed

Imports nothing heavy: a folder that cannot take the run is refused at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.record import FILE_NAME, Comparison, Evaluation, RecordReader
from paceline.record.decisions import DECISIONS_FOLDER
from paceline.record.ladder_file import FILE_NAME as LADDER
from paceline.report.side_by_side import FILE_NAME as SIDE_BY_SIDE

CHECKPOINTS, ROLLOUTS, POLICY, DRAFTER = "checkpoints", "rollouts", "policy", "drafter"
GROWN = "model"
"""In the drafter's folder: what the engine starts with, and in the end what has become of it."""
REPORT, LOG = "report.html", "log.txt"


@dataclass(slots=True)
class Past:
    """What the record of a resumed run tells."""

    config: Mapping[str, Any] = field(default_factory=dict)
    solve_rates: dict[int, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)


def read_past(folder: Path) -> Past:
    """Read the record of a run that is to be resumed. Raises RecordError."""
    with RecordReader(folder) as reader:
        past = Past(config=reader.header.config)
        for event in reader:
            if isinstance(event, Evaluation):
                past.solve_rates[event.step] = event.solve_rate
            elif isinstance(event, Comparison):
                past.comparisons.append(event)
    return past


def check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise ConfigError if `folder` cannot take the run: it exists and no option says what to do with it."""
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: give one of them")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file: give a folder")
    held = {path.name for path in folder.iterdir()} - {LOG}
    if resume:
        if held and FILE_NAME not in held:
            raise ConfigError(
                f"--out {folder} has no {FILE_NAME} to go on with, and holds something else: bring that back, or give "
                "another folder"
            )
        if FILE_NAME in held and not (folder / FILE_NAME).stat().st_size:
            raise ConfigError(
                f"--out {folder} has an empty {FILE_NAME}, as where a run was ended while it replaced another: begin "
                "anew with --overwrite"
            )
        return
    if held and not overwrite:
        raise ConfigError(
            f"--out {folder} exists: continue that run with --resume, replace it with --overwrite, or give "
            "another folder"
        )
    if held and FILE_NAME not in held:
        raise ConfigError(f"--out {folder} holds something other than a run: --overwrite will not delete it")


def clear_folder(folder: Path) -> None:
    """Delete what an earlier run left in its folder, and nothing else."""
    for name in (CHECKPOINTS, ROLLOUTS, POLICY, DRAFTER, DECISIONS_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (REPORT, SIDE_BY_SIDE, LADDER):
        (folder / name).unlink(missing_ok=True)

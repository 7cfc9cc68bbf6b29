"""Measures what one drafted token costs over the batch: the drafters' half of a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from paceline.drafting.suffix import SuffixForest, prior_calibration
from paceline.errors import CheckpointError
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.record.profile import DraftPoint
from paceline.types import DraftQuery

DEPTH = 8
"""Tokens of each measured draft."""
CALLS = 8
"""Measured drafts of each batch."""
PERIOD = 64
"""Tokens after which the text that suffix trees draft from repeats itself."""

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)


def measure_model(folder: Path, batches: Sequence[int], context: int, dtype: str) -> tuple[DraftPoint, ...]:
    """A small model drafting for requests of `context` tokens.

    Raises CheckpointError as `ModelDrafter` does, and for a model whose longest sequence is shorter than that.
    """
    from paceline.drafting.model import ModelDrafter

    room = context + CALLS + DEPTH + 1
    drafter = ModelDrafter(
        folder,
        max_model_len=room,
        max_requests=max(batches),
        dtype=dtype,
    )
    if drafter.max_model_len < room:
        raise CheckpointError(
            f"{folder}: the drafter takes {drafter.max_model_len} positions, profiling needs {room}: lower --contexts"
        )
    tokens = np.random.default_rng(0).integers(0, drafter.vocab_size, (max(batches), room), dtype=np.int32)

    def draft(batch: int, length: int) -> int:
        contexts = [row[:length] for row in tokens[:batch]]
        made, _ = drafter.draft(
            contexts,
            _query(batch, length),
            DEPTH,
            sharpness=1.0,
            sharpness_grid=GRID,
            calibration=np.ones(drafter.NUM_CELLS, np.float32),
            floor=0.0,
        )
        return int(made.num_tokens.max())

    return _measure(draft, batches, context)


def measure_suffix(batches: Sequence[int], context: int) -> tuple[DraftPoint, ...]:
    """Suffix trees, one group of responses to one prompt that repeat a text."""
    rng = np.random.default_rng(0)
    forest, calibration = SuffixForest(), prior_calibration()
    text = np.tile(rng.integers(0, 1000, PERIOD, dtype=np.int32), max(context // PERIOD, 2))
    forest.open_group(0, text[:1])
    for response in range(max(batches)):
        forest.append(0, response, text)

    def draft(batch: int, length: int) -> int:
        made = forest.draft(
            _query(batch, length), sharpness=1.0, sharpness_grid=GRID, calibration=calibration, floor=0.0
        )
        return int(made.num_tokens.max())

    return _measure(draft, batches, context)


def _query(batch: int, length: int) -> DraftQuery:
    return DraftQuery(
        groups=np.zeros(batch, np.int64),
        responses=np.arange(batch),
        keys=np.arange(1, batch + 1, dtype=np.uint64),
        positions=np.full(batch, length, np.int64),
        temperatures=np.ones(batch, np.float32),
        max_tokens=np.full(batch, DEPTH, np.int32),
    )


def _measure(
    draft: Callable[[int, int], int], batches: Sequence[int], context: int
) -> tuple[DraftPoint, ...]:
    """draft(batch, context length) makes a draft and says how long it became."""
    points = []
    for batch in batches:
        seconds = []
        for call in range(CALLS + 1):
            started_s = time.perf_counter()
            num_tokens = draft(batch, context + call)
            seconds.append((time.perf_counter() - started_s) / num_tokens)
        points.append(DraftPoint(batch, median(seconds[1:])))
    return tuple(points)

"""The fast loop puts off its question where no draft pays, and asks whenever other drafters' tokens are there."""

from __future__ import annotations

import numpy as np

from paceline.config import EngineSettings
from paceline.engine.fast_loop import FastLoop
from paceline.types import DraftQuery, StepObservation

BATCH = 32


def query(position: int) -> DraftQuery:
    return DraftQuery(
        groups=np.zeros(BATCH, np.int64),
        responses=np.arange(BATCH, dtype=np.int64),
        keys=np.arange(BATCH, dtype=np.uint64),
        positions=np.full(BATCH, position, np.int64),
        temperatures=np.ones(BATCH, np.float32),
        max_tokens=np.full(BATCH, 8, np.int32),
    )


def asked(loop: FastLoop, num_steps: int, token_s: float) -> int:
    """Steps that were asked about, of steps whose time is proportional to their tokens."""
    count = 0
    for step in range(num_steps):
        drafted = 0
        if not loop.pauses(BATCH):
            count += 1
            drafted = int(loop.propose(query(10 + step), 0).lengths.sum())
        loop.observe(StepObservation(BATCH, drafted, 0, 0, token_s * (BATCH + drafted)))
    return count


def test_a_loop_without_drafts_is_asked_ever_less() -> None:
    loop = FastLoop(EngineSettings())
    assert asked(loop, 100, 0.001) < 25


def test_after_new_weights_it_is_asked_again() -> None:
    loop = FastLoop(EngineSettings())
    asked(loop, 100, 0.001)
    loop.forget_tokens()
    assert asked(loop, 4, 0.001) == 4

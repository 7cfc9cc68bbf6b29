"""Two drafters, one draft: what a token is worth when a model-free and a model drafter both propose it.

Owns the merge of two candidate drafts. Where both propose the same tokens from the start of the draft, the estimate is
that of a table of its own, by the two drafters' single estimates: two independent witnesses are worth more than
either. From the first difference on, the drafter that promises more goes on alone. Called once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.types import DraftBatch, Float32Array, Int32Array

EDGES: Float32Array = np.array([0.3, 0.5, 0.65, 0.78, 0.87, 0.93, 0.97], dtype=np.float32)
"""Bounds of the levels of one drafter's acceptance estimate."""

LEVELS = len(EDGES) + 1
NUM_CELLS = LEVELS * LEVELS
"""Cells of the agreement table: level of the model-free estimate * LEVELS + level of the model's."""


@dataclass(frozen=True, slots=True)
class Merged:
    """One draft per request out of two candidates."""

    batch: DraftBatch
    """`cells` are those of the drafter that goes on alone (`from_model`); for the agreed prefix see `both_cells`."""
    from_model: NDArray[np.bool_]  # [num_requests] which drafter goes on behind the agreed prefix
    agreed: Int32Array  # [num_requests] first tokens that both propose
    both_cells: Int32Array  # [num_requests, max_draft_tokens] cells of the agreement table


def prior_calibration() -> Float32Array:
    """Acceptance assumed of each cell: that of two witnesses whose errors are independent. [NUM_CELLS] float32"""
    middle = np.concatenate([[0.15], (EDGES[1:] + EDGES[:-1]) / 2, [0.985]])
    wrong = (1 - middle)[:, None] * (1 - middle)[None, :]
    right = middle[:, None] * middle[None, :]
    table: Float32Array = (right / (right + wrong)).ravel().astype(np.float32)
    return table


def merge(free: DraftBatch, model: DraftBatch, calibration: Float32Array) -> Merged:
    """Merge the candidates of each request.

    Behind the agreed prefix the drafter with more expected accepted tokens goes on, ties to the model-free one.

    Args:
        free: the model-free drafter's candidates.
        model: the model drafter's candidates, in the same request order.
        calibration: acceptance estimate of each agreement cell. [NUM_CELLS] float32
    """
    width = max(free.tokens.shape[1], model.tokens.shape[1])
    one, other = _widen(free, width), _widen(model, width)
    column = np.arange(width)
    both = (column < one.num_tokens[:, None]) & (column < other.num_tokens[:, None])
    same = np.logical_and.accumulate(both & (one.tokens == other.tokens), axis=1)
    levels = np.searchsorted(EDGES, one.acceptance) * LEVELS + np.searchsorted(EDGES, other.acceptance)
    both_cells = levels.astype(np.int32)
    shared = calibration[both_cells]
    paths = [_path(batch, same, shared, column) for batch in (one, other)]
    from_model = paths[1].sum(axis=1) > paths[0].sum(axis=1)
    pick = from_model[:, None]
    batch = DraftBatch(
        tokens=np.where(pick, other.tokens, one.tokens),
        num_tokens=np.where(from_model, other.num_tokens, one.num_tokens).astype(np.int32),
        acceptance=np.where(same, shared, np.where(pick, other.acceptance, one.acceptance)),
        cells=np.where(pick, other.cells, one.cells),
        probes=np.where(pick, other.probes, one.probes),
    )
    return Merged(batch, from_model, same.sum(axis=1).astype(np.int32), both_cells)


def _path(
    batch: DraftBatch, same: NDArray[np.bool_], shared: Float32Array, column: NDArray[np.integer]
) -> Float32Array:
    factors = np.where(same, shared, batch.acceptance)
    inside = column < batch.num_tokens[:, None]
    product: Float32Array = np.cumprod(np.where(inside, factors, np.float32(0.0)), axis=1, dtype=np.float32)
    return product


def _widen(batch: DraftBatch, width: int) -> DraftBatch:
    missing = width - batch.tokens.shape[1]
    if not missing:
        return batch
    space = ((0, 0), (0, missing))
    return DraftBatch(
        np.pad(batch.tokens, space),
        batch.num_tokens,
        np.pad(batch.acceptance, space),
        np.pad(batch.cells, space),
        batch.probes,
    )

"""Two drafters, one draft: whose tokens are offered to the budget when a model-free and a model drafter both propose?

Each request takes the draft that promises more accepted tokens. That both agree on a token is no evidence here
(docs/decisions/0002-draft-budget.md says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.types import DraftBatch


@dataclass(frozen=True, slots=True)
class Choice:
    """One draft per request out of two candidates."""

    batch: DraftBatch
    """`cells` are those of the drafter whose draft it is."""
    from_model: NDArray[np.bool_]  # [num_requests] whose draft it is


def choose(free: DraftBatch, model: DraftBatch) -> Choice:
    """Choose between the candidates of each request by expected accepted tokens, ties to the model-free one.

    Args:
        free: the model-free drafter's candidates.
        model: the model drafter's candidates, in the same request order.
    """
    from_model = model.path_probability.sum(axis=1) > free.path_probability.sum(axis=1)
    width = max(free.tokens.shape[1], model.tokens.shape[1])
    one, other = _widen(free, width), _widen(model, width)
    pick = from_model[:, None]
    batch = DraftBatch(
        tokens=np.where(pick, other.tokens, one.tokens),
        num_tokens=np.where(from_model, other.num_tokens, one.num_tokens).astype(np.int32),
        acceptance=np.where(pick, other.acceptance, one.acceptance),
        cells=np.where(pick, other.cells, one.cells),
        probes=np.where(pick, other.probes, one.probes),
    )
    return Choice(batch, from_model)


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

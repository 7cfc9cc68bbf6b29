"""Calibrated acceptance: the probability that a draft token of a given kind is accepted, learned online.

A drafter sorts its tokens into cells (by its own probability, the match length, …) and gives each cell a
prior. The table counts what the target accepted, cell by cell. Invariant: only verified positions are
counted, that is those up to and including the first rejection, so an estimate is P(accepted | everything
before it was accepted), the factor of which path probabilities are made. Counts decay with every step in which
something was verified, so a table follows the policy, and a cell that the budget has stopped verifying, while it
verifies others, drifts back to its prior and gets tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline import _step
from paceline.errors import EngineError
from paceline.types import Float32Array, Float64Array, Int32Array

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AcceptanceTable:
    """Decayed counts per cell. Make one with `initial`, read it with `estimate`."""

    accepted: Float64Array  # [num_cells] decayed number of accepted draft tokens
    verified: Float64Array  # [num_cells] decayed number of verified draft tokens
    prior: Float32Array  # [num_cells] acceptance assumed before anything was verified
    prior_strength: float
    """Verified tokens that the prior counts for."""
    half_life_steps: float
    """Updates after which an observation counts half."""

    @classmethod
    def initial(
        cls, prior: ArrayLike, prior_strength: float = 8.0, half_life_steps: float = 2000.0
    ) -> AcceptanceTable:
        """A table that believes `prior` [num_cells]; raises EngineError for a prior outside [0, 1]."""
        prior = np.asarray(prior, dtype=np.float32)
        if prior.ndim != 1 or not ((prior >= 0) & (prior <= 1)).all():
            raise EngineError("acceptance priors must be one row of probabilities: pass values from 0 to 1")
        if not (prior_strength > 0 and half_life_steps > 0):
            raise EngineError(
                f"prior strength {prior_strength} and half-life {half_life_steps} must both be positive"
            )
        zeros = np.zeros(prior.shape)
        return cls(zeros, zeros, prior, prior_strength, half_life_steps)


class Outcomes(NamedTuple):
    """What a step says about the draft tokens of each cell."""

    accepted: Float64Array  # [num_cells]
    verified: Float64Array  # [num_cells] tokens up to the first rejection of each draft, that one included

    def and_also(self, others: Outcomes) -> Outcomes:
        """With what the same step says about other drafts."""
        return Outcomes(self.accepted + others.accepted, self.verified + others.verified)


def count_outcomes(
    cells: Int32Array, num_verified: Int32Array, num_accepted: Int32Array, num_cells: int
) -> Outcomes:
    """What `judge` says about drafts, counted. Raises EngineError for cells that the table does not have.

    cells: [num_drafts, width]. num_verified, num_accepted: as there. [num_drafts] int32
    """
    try:
        return Outcomes(*_step.count_outcomes(cells, num_verified, num_accepted, num_cells))
    except ValueError as error:
        raise EngineError(
            f"{error}: {num_cells} cells in the table, drafts of shape {cells.shape}; build it with the drafter's own "
            "number of cells"
        ) from None


def pool_outcomes(
    cells: Int32Array, accepted: ArrayLike, num_cells: int, verified: Float64Array | None = None
) -> Outcomes:
    """Counts of tokens that are given one by one; arguments as for `update_acceptance`."""
    if cells.size and not 0 <= int(cells.min()) <= int(cells.max()) < num_cells:
        raise EngineError(
            f"acceptance cells {int(cells.min())}..{int(cells.max())} do not fit a table of {num_cells}: "
            "build it with the drafter's own number of cells"
        )
    counts = (np.bincount(cells, weights=one, minlength=num_cells) for one in (accepted, verified))
    return Outcomes(*(count.astype(np.float64, copy=False) for count in counts))


def estimate(table: AcceptanceTable) -> Float32Array:
    """Posterior mean acceptance of each cell, [num_cells] float32 in [0, 1]."""
    strength = table.prior_strength
    mean: Float32Array = ((table.accepted + strength * table.prior) / (table.verified + strength)).astype(
        np.float32
    )
    return mean


def update_acceptance(
    table: AcceptanceTable, cells: Int32Array, accepted: BoolArray, verified: Float64Array | None = None
) -> AcceptanceTable:
    """The table after one engine step.

    cells: [num_verified] the cell of each draft token that `judge` says is told.
    accepted: [num_verified] whether the target's token was the same (or the number accepted, see `verified`).
    verified: [num_verified] how many tokens each entry stands for; None: one each.
    """
    return update_outcomes(table, pool_outcomes(cells, accepted, table.prior.shape[0], verified))


def update_outcomes(table: AcceptanceTable, outcomes: Outcomes) -> AcceptanceTable:
    """`update_acceptance` with what the step says already counted."""
    decay = 0.5 ** (1.0 / table.half_life_steps)
    return replace(
        table,
        accepted=table.accepted * decay + outcomes.accepted,
        verified=table.verified * decay + outcomes.verified,
    )


def judge(width: int, num_verified: Int32Array, num_accepted: Int32Array) -> tuple[BoolArray, BoolArray]:
    """Which draft tokens a step says something about, and which of them it accepted. [num_paths, width] each

    num_verified: [num_paths] draft tokens that the target saw (the budget's decision).
    num_accepted: [num_paths] accepted ones, at most num_verified.
    Positions behind the first rejection say nothing: min(num_verified, num_accepted + 1) of each path are told.
    """
    position = np.arange(width, dtype=np.int32)
    return position < np.minimum(num_verified, num_accepted + 1)[:, None], position < num_accepted[:, None]

"""Alternatives: draft paths beyond one per request, chosen for a step and learned from.

A part of the fast loop with a state of its own, the trust in what alternatives promise; the decision itself is
planning/paths.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.loop_log import EngineLog
from paceline.planning import paths
from paceline.planning.acceptance import BoolArray, Outcomes, judge, pool_outcomes
from paceline.planning.budget import BudgetState
from paceline.types import DraftChains, DraftPaths, DraftQuery, Float32Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Draft paths beyond one per request, in the order in which they were chosen."""

    owners: Int64Array  # [num_alternatives] row of the request in the query
    tokens: Int32Array  # [num_alternatives, max_draft_tokens]
    lengths: Int32Array  # [num_alternatives] draft tokens to verify
    path_probability: Float32Array  # [num_alternatives, max_draft_tokens] 0 beyond the path
    covered: Int32Array  # [num_alternatives] first tokens that an earlier path of the request verifies too
    cells: Int32Array  # [num_alternatives, max_draft_tokens] calibration cells of its drafter
    is_free: BoolArray  # [num_alternatives] the model-free drafter's

    @property
    def expected_accepted(self) -> float:
        """What the tokens to verify promise beyond the drafts, by the path probabilities alone."""
        columns = np.arange(self.path_probability.shape[1])
        added = (columns >= self.covered[:, None]) & (columns < self.lengths[:, None])
        return float(self.path_probability[added].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Paths that might be taken, the best one of every request first, then everyone's second, and so on."""

    ranks: Int64Array  # [num_candidates] among the paths of the request
    owners: Int64Array  # [num_candidates]
    tokens: Int32Array  # [num_candidates, max_draft_tokens]
    lengths: Int32Array  # [num_candidates]
    factors: Float32Array  # [num_candidates, max_draft_tokens] acceptance of each token, 0 behind the path
    cells: Int32Array  # [num_candidates, max_draft_tokens]
    is_free: BoolArray  # [num_candidates]


def _candidates(made: DraftPaths, step: StepDrafts, num_paths: int, is_free: bool) -> _Candidates:
    """A drafter's paths: `num_paths` of each request with the one that is its draft already, one fewer without."""
    is_first = paths.shared_prefix(made.tokens[:, 0], step.batch.tokens) >= step.lengths
    most = np.where(is_first, num_paths, num_paths - 1)
    ranks, owners = np.nonzero(
        (made.num_tokens > 0).T & (np.arange(made.num_tokens.shape[1])[:, None] < most)
    )
    lengths = made.num_tokens[owners, ranks]
    inside = np.arange(made.tokens.shape[2]) < lengths[:, None]
    return _Candidates(
        ranks,
        owners,
        made.tokens[owners, ranks],
        lengths,
        np.where(inside, made.acceptance[owners, ranks], np.float32(0.0)),
        made.cells[owners, ranks],
        np.full(len(owners), is_free),
    )


def _join(parts: list[_Candidates]) -> _Candidates:
    """Those of several drafters; of equal rank the first drafter's come first."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.shape[1] for part in parts)
    order = np.argsort(np.concatenate([part.ranks for part in parts]), kind="stable")

    def join(name: str) -> Any:
        columns = [getattr(part, name) for part in parts]
        if columns[0].ndim == 2:
            columns = [np.pad(column, ((0, 0), (0, width - column.shape[1]))) for column in columns]
        return np.concatenate(columns)[order]

    return _Candidates(*(join(field.name) for field in fields(_Candidates)))


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What was decided about a step before alternatives are thought of."""

    query: DraftQuery
    batch: DraftChains
    """Each request's draft."""
    lengths: Int32Array  # [num_requests] draft tokens to verify
    num_other_tokens: int
    expected_accepted: float


class AlternativePaths:
    """One per engine."""

    def __init__(self, settings: EngineSettings, log: EngineLog) -> None:
        self._settings = settings
        self._log = log
        self._trust = paths.PathTrust()

    @property
    def worth(self) -> float:
        """What a promised token is worth, at most 1."""
        return self._trust.worth

    def choose(
        self,
        step: StepDrafts,
        draft_free: Callable[[], DraftPaths] | None,
        model: DraftPaths | None,
        state: BudgetState,
        policy: BudgetSettings,
        max_alternatives: int,
    ) -> Alternatives | None:
        """Take those of the drafters' paths that are worth a row; None: one path each is best.

        draft_free: has the model-free drafter propose its own; called if any could pay. model: the model drafter's.
        state: what the budget has learned, at the step's context. max_alternatives: as many as the step has room for.
        """
        if draft_free is None and model is None:
            return None
        if not paths.may_pay(
            step.batch.path_probability,
            step.lengths,
            step.num_other_tokens,
            step.expected_accepted,
            state,
            policy,
        ):
            self._log.write_no_paths()
            return None
        proposed = [(None if draft_free is None else draft_free(), True), (model, False)]
        parts = [
            _candidates(made, step, self._settings.num_paths, is_free)
            for made, is_free in proposed
            if made is not None
        ]
        found = _join(parts)
        owners, own = found.owners, step.lengths[found.owners]
        snapshot = paths.PathSnapshot(
            num_requests=len(step.query.groups),
            num_other_tokens=step.num_other_tokens,
            num_draft_tokens=int(step.lengths.sum()),
            expected_accepted=step.expected_accepted,
            owners=owners,
            tokens=found.tokens,
            path_probability=np.cumprod(found.factors, axis=1, dtype=np.float32),
            limits=np.minimum(found.lengths, own),
            covered=np.minimum(paths.shared_prefix(found.tokens, step.batch.tokens[owners]), own),
            contexts=step.query.positions[owners],
            max_rows=max_alternatives,
        )
        choice = paths.choose_paths(snapshot, state, policy, self._trust)
        self._log.write_paths(snapshot, choice)
        if not len(choice.candidates):
            return None
        rows = choice.candidates
        return Alternatives(
            owners[rows],
            found.tokens[rows],
            choice.lengths,
            snapshot.path_probability[rows],
            choice.covered,
            found.cells[rows],
            found.is_free[rows],
        )

    def learn(
        self, alternatives: Alternatives | None, accepted: Int32Array, others_accepted: Int32Array
    ) -> float:
        """Score a step, with alternatives or not: lost trust comes back and is tried again. Gives the accepted tokens
        that the alternatives had been counted on for.

        alternatives: as far as they were verified: what was not sent has promised nothing.
        accepted: of each request's own draft. others_accepted: of each alternative.
        """
        promised, gained, worth = 0.0, 0.0, self.worth
        if alternatives is not None:
            most = accepted.copy()
            np.maximum.at(most, alternatives.owners, others_accepted)
            promised, gained = alternatives.expected_accepted, float((most - accepted).sum())
        self._log.write_paths_gain(promised, gained)
        self._trust = paths.update_trust(self._trust, promised, gained)
        return promised * worth


def outcomes_of(
    alternatives: Alternatives, verified: Int32Array, accepted: Int32Array, num_cells: int
) -> Outcomes:
    """What a step says about the model-free alternatives; tokens shared with an earlier path are counted once."""
    told, right = judge(alternatives.cells.shape[1], verified, accepted)
    told &= (np.arange(told.shape[1]) >= alternatives.covered[:, None]) & alternatives.is_free[:, None]
    return pool_outcomes(alternatives.cells[told], right[told], num_cells)

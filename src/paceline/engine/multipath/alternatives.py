"""Alternatives: draft paths beyond one per request, chosen for a step and learned from.

A part of the fast loop with a state of its own, the trust in what alternatives promise; the decision itself is
planning/paths.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.drafter import PathDrafter
from paceline.drafting.learned import Learned
from paceline.engine.loop_log import EngineLog
from paceline.planning import paths
from paceline.planning.acceptance import BoolArray, judge
from paceline.planning.budget import BudgetState
from paceline.types import DraftChains, DraftQuery, Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Draft paths beyond one per request, in the order in which they were chosen."""

    owners: Int64Array  # [num_alternatives] row of the request in the query
    tokens: Int32Array  # [num_alternatives, max_draft_tokens]
    lengths: Int32Array  # [num_alternatives] draft tokens to verify
    covered: Int32Array  # [num_alternatives] first tokens that an earlier path of the request verifies too
    cells: Int32Array  # [num_alternatives, max_draft_tokens] calibration cells, of the model-free drafter
    expected_accepted: float
    """What they promise beyond the drafts, by the path probabilities alone."""


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
        drafter: PathDrafter,
        learned: Learned,
        state: BudgetState,
        policy: BudgetSettings,
        max_alternatives: int,
    ) -> Alternatives | None:
        """Have the drafter propose paths and take those that are worth a row; None: one path each is best.

        learned: the drafter's sharpness and calibration. state: what the budget has learned, at the step's context.
        max_alternatives: as many as the step has room for.
        """
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
        made = drafter.draft_paths(
            step.query,
            num_paths=self._settings.num_paths,
            sharpness=learned.beta,
            calibration=learned.calibration,
            floor=self._settings.draft_floor,
        )
        is_first = paths.shared_prefix(made.tokens[:, 0], step.batch.tokens) >= step.lengths
        most = np.where(is_first, self._settings.num_paths, self._settings.num_paths - 1)
        # The best path of every request first, then everyone's second, and so on.
        rank, owners = np.nonzero(
            (made.num_tokens > 0).T & (np.arange(made.num_tokens.shape[1])[:, None] < most)
        )
        tokens, num_tokens = made.tokens[owners, rank], made.num_tokens[owners, rank]
        inside = np.arange(tokens.shape[1]) < num_tokens[:, None]
        factors = np.where(inside, made.acceptance[owners, rank], np.float32(0.0))
        own = step.lengths[owners]
        snapshot = paths.PathSnapshot(
            num_requests=len(step.query.groups),
            num_other_tokens=step.num_other_tokens,
            num_draft_tokens=int(step.lengths.sum()),
            expected_accepted=step.expected_accepted,
            owners=owners,
            tokens=tokens,
            path_probability=np.cumprod(factors, axis=1, dtype=np.float32),
            limits=np.minimum(num_tokens, own),
            covered=np.minimum(paths.shared_prefix(tokens, step.batch.tokens[owners]), own),
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
            tokens[rows],
            choice.lengths,
            choice.covered,
            made.cells[owners, rank][rows],
            choice.expected_accepted,
        )

    def learn(
        self, alternatives: Alternatives | None, accepted: Int32Array, others_accepted: Int32Array
    ) -> None:
        """Score a step, with alternatives or not: lost trust comes back and is tried again.

        accepted: of each request's own draft. others_accepted: of each alternative.
        """
        promised = gained = 0.0
        if alternatives is not None:
            most = accepted.copy()
            np.maximum.at(most, alternatives.owners, others_accepted)
            promised, gained = alternatives.expected_accepted, float((most - accepted).sum())
        self._log.write_paths_gain(promised, gained)
        self._trust = paths.update_trust(self._trust, promised, gained)


def outcomes_of(
    alternatives: Alternatives, verified: Int32Array, accepted: Int32Array
) -> tuple[Int32Array, BoolArray]:
    """(cells, outcomes) that a step tells of its alternatives; tokens shared with an earlier path are counted once."""
    told, right = judge(alternatives.cells.shape[1], verified, accepted)
    told &= np.arange(told.shape[1]) >= alternatives.covered[:, None]
    return alternatives.cells[told], right[told]

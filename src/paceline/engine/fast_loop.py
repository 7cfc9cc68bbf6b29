"""The fast loop: which draft tokens does this engine step verify, and what does its outcome teach?

Owns the drafters of the engine process and everything that they and the budget have learned; the decisions themselves
are pure functions in planning/. Knows nothing of vLLM: the scheduler hands it arrays. One step is

    propose -> (the target runs) -> learn, append, observe

Model-free drafts are made in `propose`; a model drafter's arrive by `receive`, made in the worker after the step
before. Of a request's candidates the one with the most expected accepted tokens is offered to the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.config import EngineSettings
from paceline.drafting.drafter import Drafter
from paceline.planning import acceptance, budget, sharpness
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.types import (
    DraftBatch,
    DraftOrder,
    DraftQuery,
    Float32Array,
    Int32Array,
    ModelDrafts,
    StepObservation,
)

GRID = np.asarray(sharpness.SHARPNESS_GRID, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was drafted for one step and how much of it goes to the target."""

    batch: DraftBatch
    """Each request's best candidate."""
    lengths: Int32Array  # [num_requests] draft tokens to verify
    from_model: np.ndarray  # [num_requests] bool: the candidate came from the model drafter
    candidates: tuple[DraftBatch | None, DraftBatch | None]
    """All model-free and all model candidates, for the sharpness of both drafters."""


class _Learned:
    """What is learned about one drafter."""

    def __init__(self, prior: Float32Array, fixed_sharpness: float | None) -> None:
        self.table = acceptance.AcceptanceTable.initial(prior)
        self.calibration = acceptance.estimate(self.table)
        self._sharpness = sharpness.SharpnessState.initial()
        self._fixed = fixed_sharpness

    @property
    def beta(self) -> float:
        """Exponent on the drafter's distribution."""
        return self._sharpness.beta if self._fixed is None else self._fixed

    def learn(self, drafts: DraftBatch, verified: Int32Array, accepted: Int32Array) -> None:
        cells, outcomes = acceptance.verified_outcomes(drafts, verified, accepted)
        if cells.size:
            self.table = acceptance.update_acceptance(self.table, cells, outcomes)
            self.calibration = acceptance.estimate(self.table)

    def learn_sharpness(self, probes: Int32Array, targets: Int32Array) -> None:
        if self._fixed is None and len(targets):
            self._sharpness = sharpness.update_sharpness(self._sharpness, probes, targets)


class FastLoop:
    """One per engine. Not thread-safe: the scheduler's thread alone uses it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.drafter, prior = _make_drafter(settings)
        self.free = _Learned(prior, settings.sharpness)
        self.model = _Learned(_model_prior(settings), settings.sharpness)
        self.budget = budget.BudgetState.initial(settings.budget)
        self._model_time = StepTimeModel.initial()
        self._model_positions = acceptance.AcceptanceTable.initial(
            np.full(settings.max_draft_tokens, 0.7, dtype=np.float32)
        )
        self._arrived: ModelDrafts | None = None
        self._pending: tuple[StepObservation, float] | None = None
        self._batch_size = 0
        self._expected = 0.0
        self._rested_steps = 0
        self.drafting = True
        self._resting: Drafter | None = None

    # -- responses

    def open(self, group: int, response: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A response begins (or resumes with `generated` tokens)."""
        if self.drafter is None:
            return
        self.drafter.open_group(group, np.asarray(prompt, dtype=np.int32))
        self.drafter.append(group, response, np.asarray(generated, dtype=np.int32))

    def append(self, tokens: Iterable[tuple[int, int, list[int]]]) -> None:
        """(group, response, new tokens) of each response that grew in the step."""
        if self.drafter is None:
            return
        groups, responses, lists = zip(*tokens, strict=True)
        offsets = np.zeros(len(lists) + 1, dtype=np.int32)
        np.cumsum([len(item) for item in lists], out=offsets[1:])
        flat = np.fromiter((token for item in lists for token in item), np.int32, int(offsets[-1]))
        self.drafter.append_batch(
            np.asarray(groups, np.int64), np.asarray(responses, np.int64), offsets, flat
        )

    def close(self, group: int, response: int) -> None:
        """A response has ended; its tokens go on serving its group."""
        if self.drafter is not None:
            self.drafter.close_response(group, response)

    def forget_tokens(self) -> None:
        """Drop all groups; what was learned about acceptance and time stays."""
        if self.drafter is not None:
            self.drafter.clear()
        self._arrived = None

    def set_drafting(self, wanted: bool) -> None:
        """Switch all drafting off (plain decoding) or on again; only between responses. What was learned stays."""
        if wanted != self.drafting:
            self.forget_tokens()
            self.drafter, self._resting = self._resting, self.drafter
            self.drafting = wanted

    # -- a step

    def propose(self, query: DraftQuery, num_other_tokens: int) -> Proposal:
        """Draft for every request of `query` and let the budget cut. `num_other_tokens`: prefill tokens beside it."""
        self._flush()
        self._batch_size = len(query.groups)
        free = self._draft_free(query)
        model = self._match_model(query)
        batch, from_model = _better(free, model, len(query.groups))
        snapshot = budget.BudgetSnapshot(
            num_requests=len(query.groups),
            num_other_tokens=num_other_tokens,
            path_probability=batch.path_probability,
            weights=None,
            max_total_draft_tokens=len(query.groups) * self._settings.max_draft_tokens,
        )
        lengths = budget.decide(snapshot, self.budget, self._settings.budget)
        self._expected = budget.expected_accepted(snapshot, lengths)
        return Proposal(batch, lengths, from_model, (free, model))

    def _draft_free(self, query: DraftQuery) -> DraftBatch | None:
        if self.drafter is None:
            return None
        return self.drafter.draft(
            query,
            sharpness=self.free.beta,
            sharpness_grid=GRID,
            calibration=self.free.calibration,
            floor=self._settings.draft_floor,
        )

    def _match_model(self, query: DraftQuery) -> DraftBatch | None:
        """Line the model drafts up with the query; drafts for another position than the present one are void."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return None
        order = np.argsort(arrived.responses, kind="stable")
        found = np.searchsorted(arrived.responses[order], query.responses)
        row = order[np.minimum(found, len(order) - 1)]
        fits = (arrived.responses[row] == query.responses) & (arrived.positions[row] == query.positions)
        batch = arrived.batch
        lengths = np.where(fits, np.minimum(batch.num_tokens[row], query.max_tokens), 0).astype(np.int32)
        probes = np.where(fits[:, None], batch.probes[row], -1)
        return DraftBatch(batch.tokens[row], lengths, batch.acceptance[row], batch.cells[row], probes)

    def receive(self, drafts: ModelDrafts) -> None:
        """Take the model drafter's work; its time is taken out of the step's, so that T(n) is the target's alone."""
        self._arrived = drafts
        if drafts.forward_s > 0:
            self._model_time = update_measured_time(self._model_time, len(drafts.responses), drafts.forward_s)
        if self._pending is not None:
            step, expected = self._pending
            self._pending = replace(step, step_s=max(step.step_s - drafts.total_s, 1e-6)), expected

    def order(self) -> DraftOrder | None:
        """What the model drafter shall do after the coming step; None without one."""
        if self._settings.model_drafter is None:
            return None
        if not self.drafting:
            return DraftOrder(0, self.model.beta, self.model.calibration, self._settings.draft_floor)
        depth = budget.draft_depth(
            max(self._batch_size, 1),
            acceptance.estimate(self._model_positions),
            self._model_time,
            self.budget.decode_time,
            self._settings.budget.max_growth,
        )
        # A rested drafter is tried again now and then: its time and acceptance were measured under other conditions.
        self._rested_steps = 0 if depth else self._rested_steps + 1
        if self._rested_steps >= self._settings.budget.refresh_steps:
            depth, self._rested_steps = 1, 0
        return DraftOrder(depth, self.model.beta, self.model.calibration, self._settings.draft_floor)

    def learn(
        self, proposal: Proposal, verified: Int32Array, accepted: Int32Array, first: Int32Array
    ) -> None:
        """Score a step's drafts.

        Args:
            proposal: what `propose` returned for the step.
            verified: draft tokens of each request that the target really saw. [num_requests] int32
            accepted: how many of them it accepted. [num_requests] int32
            first: the target's token at each request's first position, -1 where there was none. [num_requests] int32
        """
        known = first >= 0
        for learned, candidate, own in zip(
            (self.free, self.model),
            proposal.candidates,
            (~proposal.from_model, proposal.from_model),
            strict=True,
        ):
            if candidate is None:
                continue
            learned.learn_sharpness(candidate.probes[known], first[known])
            learned.learn(candidate, np.where(own, verified, 0), np.where(own, accepted, 0))
        if proposal.candidates[1] is not None:
            self._learn_depth(np.where(proposal.from_model, verified, 0), accepted)

    def _learn_depth(self, verified: Int32Array, accepted: Int32Array) -> None:
        position = np.arange(self._settings.max_draft_tokens, dtype=np.int32)
        told = position < np.minimum(verified, accepted + 1)[:, None]
        cells = np.broadcast_to(position, told.shape)[told]
        outcomes = (position < accepted[:, None])[told]
        if cells.size:
            self._model_positions = acceptance.update_acceptance(self._model_positions, cells, outcomes)

    def observe(self, step: StepObservation) -> None:
        """A measured step. Kept until the next begins, because a model drafter's share may still be taken out."""
        self._flush()
        self._pending = step, self._expected if step.num_draft_tokens else 0.0

    def _flush(self) -> None:
        if self._pending is not None:
            step, expected = self._pending
            self.budget = budget.update(self.budget, step, self._settings.budget, expected)
            self._pending = None


def _make_drafter(settings: EngineSettings) -> tuple[Drafter | None, Float32Array]:
    """The model-free drafter and the prior of its calibration cells."""
    if settings.drafter == "suffix":
        from paceline.drafting import suffix

        forest = suffix.SuffixForest(settings.suffix_depth, settings.suffix_memory_bytes)
        return forest, suffix.prior_calibration()
    if settings.drafter == "lookup":
        from paceline.drafting import lookup

        return lookup.LookupDrafter(), lookup.prior_calibration()
    return None, np.zeros(1, dtype=np.float32)


def _model_prior(settings: EngineSettings) -> Float32Array:
    if settings.model_drafter is None:
        return np.zeros(1, dtype=np.float32)
    from paceline.drafting.model import prior_calibration

    return prior_calibration()


def _better(
    free: DraftBatch | None, model: DraftBatch | None, num_requests: int
) -> tuple[DraftBatch, np.ndarray]:
    """Of each request's two candidates the one with more expected accepted tokens; ties go to the model-free one."""
    none = np.zeros(num_requests, dtype=bool)
    if model is None:
        return free if free is not None else _empty(num_requests), none
    if free is None:
        return model, ~none
    width = max(free.tokens.shape[1], model.tokens.shape[1])
    from_model = model.path_probability.sum(axis=1) > free.path_probability.sum(axis=1)
    pick = from_model[:, None]

    def choose(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(pick, _widen(other, width), _widen(one, width))

    return (
        DraftBatch(
            choose(free.tokens, model.tokens),
            np.where(from_model, model.num_tokens, free.num_tokens).astype(np.int32),
            choose(free.acceptance, model.acceptance),
            choose(free.cells, model.cells),
            np.where(pick, model.probes, free.probes),
        ),
        from_model,
    )


def _widen(table: np.ndarray, width: int) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])))


def _empty(num_requests: int) -> DraftBatch:
    zero = np.zeros((num_requests, 1))
    return DraftBatch(
        tokens=zero.astype(np.int32),
        num_tokens=np.zeros(num_requests, dtype=np.int32),
        acceptance=zero.astype(np.float32),
        cells=zero.astype(np.int32),
        probes=np.full((num_requests, len(GRID)), -1, dtype=np.int32),
    )

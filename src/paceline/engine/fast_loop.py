"""The fast loop: which draft tokens does this engine step verify, and what does its outcome teach?

Owns the drafters of the engine process and everything that they and the budget have learned; the decisions themselves
are pure functions in planning/. Knows nothing of vLLM: the scheduler hands it arrays. One step is

    propose -> (the target runs) -> learn, append, observe

Model-free drafts are made in `propose`; a model drafter's arrive by `receive`, made in the worker after the step
before. Of a request's candidates the one with the most expected accepted tokens is offered to the budget.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.drafter import Drafter, PathDrafter
from paceline.drafting.learned import Learned
from paceline.engine.loop_log import open_log
from paceline.engine.model_steering import ModelSteering
from paceline.engine.multipath.alternatives import AlternativePaths, Alternatives, StepDrafts, outcomes_of
from paceline.engine.sharing import SharedDrafts, drafter_number
from paceline.errors import RequestError
from paceline.planning import budget, candidates, sharpness
from paceline.planning.acceptance import judge
from paceline.planning.latency import MAX_TOKENS
from paceline.types import (
    DraftBatch,
    DraftOrder,
    DraftQuery,
    DraftSharingCounters,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    ModelDrafts,
    StepObservation,
)

GRID = np.asarray(sharpness.SHARPNESS_GRID, dtype=np.float32)

FIRST_COPY = 1 << 62
"""Numbers in the drafter begin here for responses whose key is running in their group already."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was drafted for one step and how much of it goes to the target."""

    batch: DraftBatch
    """Each request's draft."""
    from_model: NDArray[np.bool_]  # [num_requests] whose draft it is
    lengths: Int32Array  # [num_requests] draft tokens to verify
    candidates: tuple[DraftBatch | None, DraftBatch | None]
    """All model-free and all model candidates, for the sharpness of both drafters."""
    alternatives: Alternatives | None
    """Further paths of some requests; None when one path each is best."""


class PolicyState(NamedTuple):
    """What is learned under one budget policy: step time and confidence, and whether the model drafter pays."""

    budget: budget.BudgetState
    steering: ModelSteering


class FastLoop:
    """One per engine. Not thread-safe: the scheduler's thread alone uses it."""

    def __init__(
        self, settings: EngineSettings, vocab_size: int = 1 << 31, max_step_tokens: int = MAX_TOKENS
    ) -> None:
        """vocab_size: the target's; what other workers tell of other ids is dropped.

        max_step_tokens: the engine's token budget. Drafts get what other tokens of the step leave of it.
        """
        self._settings = settings
        self._max_step_tokens = max_step_tokens
        self.drafter, prior = _make_drafter(settings)
        self.free = Learned(prior, settings.sharpness)
        self.model = Learned(_model_prior(settings), settings.sharpness)
        self.budget = budget.BudgetState.initial(settings.budget)
        self._now = self.budget
        self._steering = ModelSteering()
        self._arrived: ModelDrafts | None = None
        self._pending: tuple[StepObservation, float] | None = None
        self._batch_size = 0
        self._num_drafted = 0
        self._expected = 0.0
        self._log = open_log(settings)
        self._paths = AlternativePaths(settings, self._log)
        self._sharing = _connect(settings, vocab_size)
        self._numbers: dict[int, int] = {}  # the drafter's, of each open response
        self._running: set[tuple[int, int]] = set()  # group and drafter's number of each
        self.drafting = True
        self._resting: Drafter | None = None

    # -- responses

    def open(
        self, group: int, response: int, prompt: Sequence[int], generated: Sequence[int], key: int = 0
    ) -> None:
        """A response begins (or resumes with `generated` tokens). key: its dice key.

        The drafter knows a response by its key: what it has of it, told by whichever worker, is not counted again.
        A group has the first prompt that it was opened with; a response to another one (a later turn, say) shares the
        group's tokens all the same: drafts are proposals, and no mistake of the user's to end the engine for.
        """
        if self.drafter is None:
            return
        with contextlib.suppress(RequestError):
            self.drafter.open_group(group, np.asarray(prompt, dtype=np.int32))
        number = drafter_number(key)
        is_copy = (group, number) in self._running
        if is_copy:
            number = FIRST_COPY + response
        self._numbers[response] = number
        self._running.add((group, number))
        self.drafter.resync(group, number, np.asarray(generated, dtype=np.int32))
        if self._sharing is not None and not is_copy:
            self._sharing.open(group, response, key, generated)

    def append(self, tokens: Iterable[tuple[int, int, list[int]]]) -> None:
        """(group, response, new tokens) of each response that grew in the step."""
        if self.drafter is None:
            return
        groups, responses, lists = zip(*tokens, strict=True)
        if self._sharing is not None:
            for group, response, new in zip(groups, responses, lists, strict=True):
                self._sharing.grow(group, response, new)
        offsets = np.zeros(len(lists) + 1, dtype=np.int32)
        np.cumsum(list(map(len, lists)), out=offsets[1:])
        flat = np.fromiter(itertools.chain.from_iterable(lists), np.int32, int(offsets[-1]))
        self.drafter.append_batch(
            np.asarray(groups, np.int64), self._drafter_numbers(responses), offsets, flat
        )

    def close(self, group: int, response: int) -> None:
        """A response has ended; its tokens go on serving its group."""
        number = self._numbers.pop(response, response)
        self._running.discard((group, number))
        if self.drafter is not None:
            self.drafter.close_response(group, number)
        if self._sharing is not None:
            self._sharing.close(group, response)

    def _drafter_numbers(self, responses: Sequence[int]) -> Int64Array:
        return np.fromiter(map(self._numbers.get, responses, responses), np.int64, len(responses))

    def shut_down(self) -> None:
        """Disconnect from the draft servers, end the decision log."""
        if self._sharing is not None:
            self._sharing.close_client()
            self._sharing = None
        self._log.close()

    def forget_tokens(self) -> None:
        """Drop all groups; what was learned about acceptance and time stays."""
        if self.drafter is not None:
            self.drafter.clear()
        if self._sharing is not None:
            self._sharing.forget()
        self._arrived = None

    def use_epoch(self, epoch: int) -> None:
        """Share drafts with the workers of this epoch; by default each `forget_tokens` begins the next."""
        if self._sharing is not None:
            self._sharing.epoch = epoch

    def set_drafting(self, wanted: bool) -> None:
        """Switch all drafting off (plain decoding) or on again; only between responses. What was learned stays."""
        if wanted != self.drafting:
            self.forget_tokens()
            self.drafter, self._resting = self._resting, self.drafter
            self.drafting = wanted

    def sharing_counters(self) -> DraftSharingCounters:
        """What this engine has told the draft servers and heard from them; zeros without any."""
        return DraftSharingCounters() if self._sharing is None else self._sharing.counters()

    @property
    def policy_state(self) -> PolicyState:
        """What the present budget policy has learned, for a later `use_budget`."""
        self._flush()
        return PolicyState(self.budget, self._steering)

    def use_budget(self, settings: BudgetSettings, state: PolicyState | None = None) -> None:
        """Go on with another policy, and with `state` if it was used before; only between responses.

        The decision log, which tells of one policy, ends here.
        """
        self._flush()
        self._log.close()
        self._settings = self._settings.model_copy(update={"budget": settings})
        fresh = PolicyState(budget.BudgetState.initial(settings), ModelSteering())
        self.budget, self._steering = fresh if state is None else state
        self._now, self._arrived = self.budget, None

    # -- a step

    @property
    def is_fair(self) -> bool:
        """Whether `propose` takes weights."""
        return self._settings.budget.fair and self._settings.budget.policy == "marginal"

    @property
    def may_draft(self) -> bool:
        """Whether `propose` can draft anything; without it a step is plain decoding and needs no proposal."""
        has_drafter = self.drafter is not None or self._settings.model_drafter is not None
        return self.drafting and has_drafter and self._settings.budget.policy != "off"

    def propose(
        self,
        query: DraftQuery,
        num_other_tokens: int,
        max_alternatives: int = 0,
        weight: Float64Array | None = None,
    ) -> Proposal:
        """Draft for every request of `query` and let the budget cut.

        Args:
            query: what to draft for.
            num_other_tokens: tokens of the step that are neither drafts nor the next tokens of the query's requests:
                prefill above all.
            max_alternatives: draft paths beyond one per request that the step has room for.
            weight: what a token of each request counts (`budget.fair_weights`). [num_requests]
        """
        self._flush()
        num_context_tokens = int(query.positions.sum())
        self._now = self.budget.at_context(num_context_tokens)
        self._batch_size = len(query.groups)
        drafter_query = replace(query, responses=self._drafter_numbers(query.responses.tolist()))
        free = self._draft_free(drafter_query)
        model = self._match_model(query)
        batch, from_model = self._choose(free, model, len(query.groups))
        snapshot = self._snapshot(batch, num_other_tokens, weight)
        lengths = budget.decide(snapshot, self._now, self._settings.budget)
        self._expected = budget.expected_accepted(snapshot, lengths)
        self._num_drafted = int(lengths.sum())
        judged = model is not None and num_other_tokens == 0
        alone = free.path_probability if judged and free is not None else None
        self._log.write_budget(num_context_tokens, snapshot, lengths, judged, alone)
        if judged:
            self._steering.judge(snapshot, lengths, alone, self._now, self._settings.budget)
        alternatives = None
        if max_alternatives and isinstance(self.drafter, PathDrafter):
            alternatives = self._paths.choose(
                StepDrafts(drafter_query, batch, from_model, lengths, num_other_tokens, self._expected),
                self.drafter,
                self.free,
                self._now,
                self._settings.budget,
                max_alternatives,
            )
        if alternatives is not None:
            self._expected += alternatives.expected_accepted * self._paths.worth
        return Proposal(batch, from_model, lengths, (free, model), alternatives)

    def _snapshot(
        self, batch: DraftBatch, num_other_tokens: int, weight: Float64Array | None
    ) -> budget.BudgetSnapshot:
        num_requests = len(batch.num_tokens)
        return budget.BudgetSnapshot(
            num_requests=num_requests,
            num_other_tokens=num_other_tokens,
            path_probability=batch.path_probability,
            max_total_draft_tokens=max(self._max_step_tokens - num_requests - num_other_tokens, 0),
            weight=weight,
        )

    def _choose(
        self, free: DraftBatch | None, model: DraftBatch | None, num_requests: int
    ) -> tuple[DraftBatch, NDArray[np.bool_]]:
        """Each request's draft, and whether it is the model drafter's."""
        if free is not None and model is not None:
            choice = candidates.choose(free, model)
            return choice.batch, choice.from_model
        alone = free if free is not None else model if model is not None else _empty(num_requests)
        return alone, np.full(num_requests, model is not None)

    def _draft_free(self, query: DraftQuery) -> DraftBatch | None:
        if self.drafter is None:
            return None
        if self._sharing is not None:
            self._sharing.take_over(self.drafter)
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
        self._log.write_growth(drafts.growth)
        self._steering.receive(drafts.growth)
        if self._pending is not None:
            step, expected = self._pending
            self._pending = replace(step, step_s=max(step.step_s - drafts.total_s, 1e-6)), expected

    def order(self) -> DraftOrder | None:
        """What the model drafter shall do after the coming step; None without one, and while it rests."""
        if self._settings.model_drafter is None or not self.may_draft:
            return None
        batch, step_time = max(self._batch_size, 1), self._now.decode_time
        if not self._steering.advance(batch, self._settings.budget.refresh_steps):
            self._log.write_drafter(None)
            return None
        floor, level_costs = self._steering.limits(
            batch, self._num_drafted, step_time, self._settings.draft_floor
        )
        self._log.write_drafter((floor, level_costs))
        return DraftOrder(
            self._settings.max_draft_tokens,
            self.model.beta,
            self.model.calibration,
            floor,
            level_costs,
        )

    def learn(
        self,
        proposal: Proposal,
        verified: Int32Array,
        accepted: Int32Array,
        first: Int32Array,
        others_verified: Int32Array | None = None,
        others_accepted: Int32Array | None = None,
    ) -> None:
        """Score a step's drafts.

        Args:
            proposal: what `propose` returned for the step.
            verified: draft tokens of each request that the target really saw. [num_requests] int32
            accepted: how many of them it accepted. [num_requests] int32
            first: the target's token at each request's first position, -1 where there was none. [num_requests] int32
            others_verified: as `verified`, of each alternative. [num_alternatives] int32
            others_accepted: as `accepted`, of each alternative. [num_alternatives] int32
        """
        known = first >= 0
        told, right = judge(proposal.batch.tokens.shape[1], verified, accepted)
        by_model = proposal.from_model[:, None]
        for learned, candidate, own in (
            (self.free, proposal.candidates[0], told & ~by_model),
            (self.model, proposal.candidates[1], told & by_model),
        ):
            if candidate is None:
                continue
            learned.learn_sharpness(candidate.probes[known], first[known])
            own = own[:, : candidate.cells.shape[1]]
            cells, outcomes = candidate.cells[own], right[:, : own.shape[1]][own]
            if learned is self.free and proposal.alternatives is not None:
                assert others_verified is not None
                assert others_accepted is not None
                more = outcomes_of(proposal.alternatives, others_verified, others_accepted)
                cells, outcomes = np.concatenate([cells, more[0]]), np.concatenate([outcomes, more[1]])
            learned.learn(cells, outcomes)
        self._paths.learn(proposal.alternatives, accepted, others_accepted)

    def observe(self, step: StepObservation) -> None:
        """A measured step. Kept until the next begins, because a model drafter's share may still be taken out.

        While nothing may be drafted nothing is learned either: plain decoding costs what vLLM's does.
        """
        self._flush()
        if not self.may_draft:
            return
        self._pending = step, self._expected if step.num_draft_tokens else 0.0

    def _flush(self) -> None:
        if self._pending is not None:
            step, expected = self._pending
            self._log.write_step(step, expected)
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

        return lookup.LookupDrafter(memory_bytes=settings.suffix_memory_bytes), lookup.prior_calibration()
    return None, np.zeros(1, dtype=np.float32)


def _connect(settings: EngineSettings, vocab_size: int) -> SharedDrafts | None:
    """The end of the draft servers, if there are any. Raises ConfigError for addresses or a secret that cannot be."""
    if not settings.draft_servers:
        return None
    from paceline.drafting.client import DraftClient
    from paceline.drafting.wire import read_secret

    secret = read_secret(settings.draft_secret_file)
    return SharedDrafts(DraftClient(settings.draft_servers, secret=secret, vocab_size=vocab_size))


def _model_prior(settings: EngineSettings) -> Float32Array:
    if settings.model_drafter is None:
        return np.zeros(1, dtype=np.float32)
    from paceline.drafting.proposal import prior_calibration

    return prior_calibration()


def _empty(num_requests: int) -> DraftBatch:
    zero = np.zeros((num_requests, 1))
    return DraftBatch(
        tokens=zero.astype(np.int32),
        num_tokens=np.zeros(num_requests, dtype=np.int32),
        acceptance=zero.astype(np.float32),
        cells=zero.astype(np.int32),
        probes=np.full((num_requests, len(GRID)), -1, dtype=np.int32),
    )

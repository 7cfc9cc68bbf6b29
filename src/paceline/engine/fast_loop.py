"""The fast loop: which draft tokens does this engine step verify, and what does its outcome teach?

Owns the drafters of the engine process and everything that they and the budget have learned; the decisions themselves
are pure functions in planning/. Knows nothing of vLLM: the scheduler hands it arrays. One step is

    propose -> (the target runs) -> learn, append, observe

and where steps overlap (async_scheduler.py) the next one is proposed before the present one is learned from.

Model-free drafts are made in `propose`; a model drafter's arrive by `receive`, made in the worker after the step
before, or whenever a draft worker has some (draft_ahead.py). Where there are two drafters their drafts meet in the
draft trees, which offer the chain with the most expected accepted tokens to the budget; one alone needs no trees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import _step
from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.drafter import Drafter, PathDrafter, ThreadedDrafter
from paceline.drafting.learned import Learned
from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_wire import DraftCounts
from paceline.engine.draft_ahead import UNKNOWN_SIZES, TargetSizes, start_draft_ahead
from paceline.engine.early_drafts import EarlyDrafts, find_places, line_up
from paceline.engine.leads import Leads
from paceline.engine.left_drafts import KEPT, LeftDrafts, Mixture
from paceline.engine.live_coupling import LiveCoupling
from paceline.engine.loop_log import open_log
from paceline.engine.model_steering import ModelSteering
from paceline.engine.model_watch import ModelWatch
from paceline.engine.multipath.alternatives import AlternativePaths, Alternatives, StepDrafts, outcomes_of
from paceline.engine.sharing import SharedDrafts, drafter_number
from paceline.errors import RequestError
from paceline.planning import budget, sharpness
from paceline.planning.acceptance import Outcomes, count_outcomes, judge
from paceline.planning.drafter_worth import choose_depth
from paceline.planning.latency import predict_one_s
from paceline.planning.length import Endings
from paceline.planning.paths import most_paths
from paceline.planning.pause import Pause, after_question, after_rest
from paceline.types import (
    DraftBatch,
    DraftChains,
    DrafterScore,
    DraftOrder,
    DraftPaths,
    DraftQuery,
    DraftSharingCounters,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    MetDrafts,
    ModelBatch,
    ModelDrafts,
    StepCosts,
    StepObservation,
)

GRID = np.asarray(sharpness.SHARPNESS_GRID, dtype=np.float32)

NO_COSTS = np.zeros(1, np.float32)
"""Of a draft's levels."""

NO_TOKENS = np.zeros(Source.LEAD + 1, np.int64)
"""Of any source."""

NO_RESPONSES = np.empty(0, np.int64)

FAR_TOKENS = 8
"""Draft tokens of each request up to which the cost of a further one is told."""

_MOST_UNDER_WAY = 2
"""Steps whose model drafts may be on their way to the host."""

FIRST_COPY = 1 << 62
"""Numbers in the drafter begin here for responses whose key is running in their group already."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was drafted for one step and how much of it goes to the target."""

    batch: DraftChains
    """Each request's draft."""
    lengths: Int32Array  # [num_requests] draft tokens to verify
    candidates: tuple[DraftBatch | None, DraftBatch | None]
    """All model-free and all model candidates, by `Source`; a draft worker learns by itself."""
    alternatives: Alternatives | None
    """Further paths of some requests; None when one path each is best."""
    responses: Int64Array  # [num_requests]
    expected_accepted: float = 0.0
    """Of the tokens to verify."""
    left: Mixture | None = None
    """What the model drafter leaves on the device behind a step under way, beside the drafts; None: nothing."""
    branches: DraftPaths | None = None
    """Paths that leave each request's draft among the tokens that a step under way decides; None: there are none."""


@dataclass(slots=True)
class _Recent:
    """Decayed sums over the last steps and model drafts."""

    num_decoded: float = 0.0
    """(request, step) pairs, as are the drafts and accepted tokens of these."""
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_steps: float = 0.0
    drafting_s: float = 0.0
    """What drafting inside took in these steps."""
    num_right: float = 1.0
    """Of `num_told` tokens of the model drafter; a coin's before there are any."""
    num_told: float = 2.0

    def note_step(self, step: StepObservation, drafting_s: float) -> None:
        """A measured step."""
        if step.num_requests:
            self.num_steps = KEPT * self.num_steps + 1.0
            self.drafting_s = KEPT * self.drafting_s + drafting_s
            self.num_decoded = KEPT * self.num_decoded + step.num_requests
            self.num_drafted = KEPT * self.num_drafted + step.num_draft_tokens
            self.num_accepted = KEPT * self.num_accepted + step.num_accepted_tokens

    def note_drafts(self, outcomes: Outcomes) -> None:
        """Of the model's drafts."""
        self.num_right = KEPT * self.num_right + float(outcomes.accepted.sum())
        self.num_told = KEPT * self.num_told + float(outcomes.verified.sum())

    def forget_drafts(self) -> None:
        """Another model drafts."""
        self.num_right, self.num_told = 1.0, 2.0

    @property
    def tokens_per_step(self) -> float:
        """Of a response."""
        return 1.0 + self.num_accepted / self.num_decoded

    @property
    def step_tokens(self) -> float:
        """Of a response, draft tokens included."""
        return 1.0 + self.num_drafted / self.num_decoded

    @property
    def inside_s(self) -> float:
        """What drafting inside adds to a step."""
        return self.drafting_s / self.num_steps

    @property
    def acceptance(self) -> float:
        """Of the model drafter inside the engine."""
        return self.num_right / self.num_told


class PolicyState(NamedTuple):
    """What is learned under one budget policy: step time and confidence, and whether the model drafter pays."""

    budget: budget.BudgetState
    steering: ModelSteering


class FastLoop:
    """One per engine. Not thread-safe: the scheduler's thread alone uses it."""

    def __init__(self, settings: EngineSettings, sizes: TargetSizes = UNKNOWN_SIZES) -> None:
        """Raises CheckpointError or ConfigError where a draft worker is wanted and cannot be."""
        self._settings, self._sizes = settings, sizes
        self.drafter, prior = _make_drafter(settings)
        self.free = Learned(prior, settings.sharpness)
        self._free_calibration = self.free.calibration  # as the present step believes it
        self.model = Learned(_model_prior(settings), settings.sharpness)
        self.budget = budget.BudgetState.initial(settings.budget)
        self._now = self.budget
        self._steering = ModelSteering()
        self._arrived: ModelDrafts | None = None
        self._early: EarlyDrafts | None = None
        # a drafter, and the same if it is one: it is not looked up in every step
        self._threaded: tuple[Drafter | None, ThreadedDrafter | None] = None, None
        self.overlaps = False
        """Whether steps do: model drafts are left on the device then (left_drafts.py)."""
        self._left = LeftDrafts()
        self._limits: tuple[float, Float32Array] = 0.0, NO_COSTS  # of the last order
        self._num_stale = 0  # of the next drafts from the device, those that another model may have made
        self._late_s = 0.0  # what model drafts took of the present step's time
        self._place = 0  # in the settings, of the model drafter inside the engine
        self._pending: tuple[StepObservation, float] | None = None
        self._draft_s = 0.0  # what the model drafts of the present step took
        self._batch_size = 0
        self._num_drafted = 0
        self._num_coming: int | None = None  # tokens of the coming step, if it is known to only decode
        self._has_room = False  # whether the present step could verify alternatives
        self._expected = 0.0
        self._log = open_log(settings)
        self._paths = AlternativePaths(settings, self._log)
        self._trees = DraftTrees(most_ahead=settings.most_ahead) if _has_several_drafts(settings) else None
        self.ahead = (
            None if self._trees is None else start_draft_ahead(settings, sizes, self._trees, self._log)
        )
        self.coupling = None
        """Whether the model drafts inside or ahead; None: that is not to be chosen."""
        if self.ahead is not None and settings.draft_worker == "auto":
            self.coupling = LiveCoupling(
                self.ahead, lambda: budget.BudgetState.initial(self._settings.budget)
            )
        self._leads = Leads(self._trees) if settings.adopt_leads and self._trees is not None else None
        self._recent = _Recent()
        self._ahead_before = () if self.ahead is None else self.ahead.counts
        self._accepted = NO_TOKENS  # of the present step, by source
        self.watch = ModelWatch(settings.model_drafter)
        self._sharing = _connect(settings, sizes.vocab_size)
        self._numbers: dict[int, int] = {}  # the drafter's, of each open response
        self._numbered = NO_RESPONSES, NO_RESPONSES  # responses, and the drafter's numbers of them
        self._running: set[tuple[int, int]] = set()  # group and drafter's number of each
        self._unbegun: dict[int, int] = {}  # tokens of each response that has not been in a step
        self._unbegun_tokens = 0  # of all of them
        self._newest_left: int | None = None  # tokens that the last opened one has room for, if known
        self.endings = Endings()
        self.pause = Pause()
        self.drafting = True
        self._resting: Drafter | None = None

    # -- responses

    def open(
        self,
        group: int,
        response: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        key: int = 0,
        *,
        temperature: float = 1.0,
        limit: int = 0,
    ) -> None:
        """A response begins (or resumes with `generated` tokens). key: its dice key.

        limit: position at which nothing can be drafted for it any more; 0: nothing is to be drafted ahead.

        The drafter knows a response by its key: what it has of it, told by whichever worker, is not counted again.
        A group has the first prompt that it was opened with; a response to another one (a later turn, say) shares the
        group's tokens all the same: drafts are proposals, and no mistake of the user's to end the engine for.
        """
        if self.ahead is not None and self._trees is not None and self.drafting:
            self._trees.open(response, np.asarray([*prompt, *generated], np.int32))
        if self.ahead is not None and self.may_draft and limit:
            self.ahead.open(response, key, temperature, limit)
        self._unbegun[response] = len(prompt) + len(generated)
        self._unbegun_tokens += self._unbegun[response]
        self._newest_left = limit - len(prompt) - len(generated) if limit else None
        if self.drafter is None:
            return
        with contextlib.suppress(RequestError):
            self.drafter.open_group(group, np.asarray(prompt, dtype=np.int32))
        number = drafter_number(key)
        is_copy = (group, number) in self._running
        if is_copy:
            number = FIRST_COPY + response
        self._numbers[response] = number
        self._numbered = NO_RESPONSES, NO_RESPONSES
        self._running.add((group, number))
        self.drafter.resync(group, number, np.asarray(generated, dtype=np.int32))
        if self._sharing is not None and not is_copy:
            self._sharing.open(group, response, key, generated)

    def append(self, tokens: Iterable[tuple[int, int, list[int]]]) -> None:
        """(group, response, new tokens) of each response that grew in the step."""
        if not self.drafting or (self.drafter is None and self._trees is None):
            return
        groups, responses, lists = zip(*tokens, strict=True)
        offsets, flat = _step.joined(list(lists), np.ones(len(lists), np.bool_))
        self.grow(np.asarray(groups, np.int64), np.asarray(responses, np.int64), offsets, flat)

    def grow(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        *,
        drafter_knows: bool = False,
    ) -> None:
        """`append` for arrays: tokens[offsets[i] : offsets[i + 1]] go to (groups[i], responses[i]).

        groups, responses: [n], not to be changed afterwards. offsets: [n + 1]. tokens: [offsets[n]]. drafter_knows:
        `draft_early` was given the same.
        """
        if not self.drafting:
            return
        self._steering.grow(len(tokens))
        if self._trees is not None:
            self._trees.advance(responses, offsets, tokens)
            if self.ahead is not None:
                self.ahead.grow(responses, offsets, tokens)
        if self._sharing is not None:
            for group, response, new in zip(
                groups.tolist(), responses.tolist(), np.split(tokens, offsets[1:-1]), strict=True
            ):
                self._sharing.grow(group, response, new.tolist())
        if self.drafter is not None and not drafter_knows:
            self.drafter.append_batch(groups, self._drafter_numbers(responses), offsets, tokens)

    def draft_early(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        query: DraftQuery,
    ) -> None:
        """Let the model-free drafter take the arguments of `grow` and then draft for `query`, on a thread of its own:
        the next `propose` takes what has come of it. Only where `drafts_early` says so.
        """
        drafter = self._threaded[1]
        assert drafter is not None
        if self._sharing is not None:
            self._sharing.take_over(drafter)
        self._free_calibration = self._believed(query)
        wait = drafter.draft_later(
            groups,
            self._drafter_numbers(responses),
            offsets,
            tokens,
            replace(query, responses=self._drafter_numbers(query.responses)),
            **self._draft_settings(),
            num_paths=1 + self._num_branches(len(query.groups)),
        )
        self._early = EarlyDrafts(drafter, query, wait)

    @property
    def drafts_early(self) -> bool:
        """Whether `draft_early` can, and the last drafts were worth verifying."""
        if not (self.drafting and self._num_drafted):
            return False
        if self._threaded[0] is not self.drafter:
            self._threaded = self.drafter, self.drafter if isinstance(self.drafter, ThreadedDrafter) else None
        return self._threaded[1] is not None

    def _draft_settings(self) -> dict[str, Any]:
        """Of the model-free drafter."""
        return {
            "sharpness": self.free.beta,
            "sharpness_grid": GRID,
            "calibration": self._free_calibration,
            "floor": self._settings.draft_floor,
        }

    def close(self, group: int, response: int) -> None:
        """A response has ended; its tokens go on serving its group."""
        if response in self._unbegun:
            self._unbegun_tokens -= self._unbegun.pop(response)
        else:
            self._steering.close()
        number = self._numbers.pop(response, response)
        self._numbered = NO_RESPONSES, NO_RESPONSES
        self._running.discard((group, number))
        if self.drafter is not None:
            self.drafter.close_response(group, number)
        if self._sharing is not None:
            self._sharing.close(group, response)
        if self._trees is not None:
            self._trees.close(response)
        if self.ahead is not None:
            self.ahead.close(response)
            if self.coupling is not None and self.ahead.is_idle:
                self.coupling.take_all_threads()
        if self._leads is not None:
            self._leads.close(response)

    def adopt(self, response: int, position: int, tokens: Sequence[int]) -> None:
        """Another engine has generated these tokens of an open response, from this position on."""
        if self._leads is not None and self.drafting:
            self._leads.tell(response, position, np.asarray(tokens, np.int32))

    def _drafter_numbers(self, responses: Int64Array) -> Int64Array:
        """The drafter's numbers of these responses, which most often are those of the step before. [num_responses]"""
        if responses is not self._numbered[0]:
            names = responses.tolist()
            numbers = np.fromiter(map(self._numbers.get, names, names), np.int64, len(names))
            self._numbered = responses, numbers
        return self._numbered[1]

    def shut_down(self) -> None:
        """Disconnect from the draft servers, end the draft worker and the decision log, take all threads back."""
        self._draft_coupled()
        self.coupling = None
        if self.ahead is not None:
            self.ahead.shut_down()
            self.ahead = None
        if self._sharing is not None:
            self._sharing.close_client()
            self._sharing = None
        self._log.close()

    def forget_tokens(self) -> None:
        """Drop all groups, as weights may change; what was learned about acceptance and time stays."""
        self.watch.begin_trial()
        if self.drafter is not None:
            self.drafter.clear()
        if self._sharing is not None:
            self._sharing.forget()
        if self._trees is not None:
            self._trees.clear()
        if self.ahead is not None:
            self.ahead.forget()
        if self._leads is not None:
            self._leads.clear()
        self._arrived, self._early, self.pause = None, None, Pause()

    def use_epoch(self, epoch: int) -> None:
        """Share drafts with the workers of this epoch; by default each `forget_tokens` begins the next."""
        if self._sharing is not None:
            self._sharing.epoch = epoch

    def set_drafting(self, wanted: bool) -> None:
        """Switch all drafting off (plain decoding) or on again; only between responses. What was learned stays."""
        if wanted != self.drafting:
            self.forget_tokens()
            self._draft_coupled()
            self.drafter, self._resting = self._resting, self.drafter
            self.drafting = wanted

    def renew_model(self, place: int | None = None) -> None:
        """The model drafter has other weights: nothing that was learned about the old ones counts.

        place: another one of the model drafters drafts from now on, that of this place in the settings.
        """
        self._arrived = None
        is_other = place is not None and place != self._place
        self._place = self._place if place is None else place
        self._recent.forget_drafts()
        self._left.forget()
        self._num_stale = _MOST_UNDER_WAY
        self.model = Learned(_model_prior(self._settings), self._settings.sharpness)
        self.watch.renew(None if place is None else self._settings.model_drafters[place])
        self._steering.renew(is_other=is_other)
        self._log.write_new_drafter(is_other)

    def drafter_score(self) -> DrafterScore:
        """How often the engine's own model drafter was right, with the alarms of its draft workers too."""
        return self.watch.score + DrafterScore(alarms=0 if self.ahead is None else self.ahead.num_alarms)

    def sharing_counters(self) -> DraftSharingCounters:
        """What this engine has told the draft servers and heard from them; zeros without any."""
        return DraftSharingCounters() if self._sharing is None else self._sharing.counters()

    @property
    def policy_state(self) -> PolicyState:
        """What the present budget policy has learned, for a later `use_budget`."""
        self._flush()
        self._draft_coupled()
        return PolicyState(self.budget, self._steering)

    def use_budget(self, settings: BudgetSettings, state: PolicyState | None = None) -> None:
        """Go on with another policy, and with `state` if it was used before.

        The decision log, which tells of one policy, ends here.
        """
        self._flush()
        self._log.close()
        self._settings = self._settings.model_copy(update={"budget": settings})
        if self.coupling is not None:
            self._draft_coupled()
            self.coupling.forget()
        fresh = PolicyState(budget.BudgetState.initial(settings), ModelSteering())
        outlook = self._steering.outlook  # of the responses, whatever the policy
        self.budget, self._steering = fresh if state is None else state
        self._steering.outlook = outlook
        self._now, self._arrived, self.pause = self.budget, None, Pause()

    def _draft_coupled(self) -> None:
        """Nothing is to be drafted ahead until that has paid again."""
        if self.coupling is not None:
            self._flush()
            self.budget = self.coupling.leave(self.budget, self._log)

    @property
    def _chooser(self) -> LiveCoupling | None:
        """What chooses where the model drafts; None where that is not to be chosen, or not now."""
        return self.coupling if self._settings.budget.policy == "marginal" else None

    # -- a step

    @property
    def is_fair(self) -> bool:
        """Whether `propose` takes weights."""
        return self._settings.budget.fair and self._settings.budget.policy == "marginal"

    @property
    def may_draft(self) -> bool:
        """Whether `propose` can draft anything; without it a step is plain decoding and needs no proposal."""
        has_others = self.ahead is not None and (
            len(self.ahead.links) > 1 or (self.coupling is not None and self.ahead.has_come)
        )
        has_drafter = self.drafter is not None or self.watch.is_used or has_others or bool(self._leads)
        return self.drafting and has_drafter and self._settings.budget.policy != "off"

    def pauses(self, num_requests: int) -> bool:
        """Whether the coming step of so many requests is to go without a proposal. To be asked once per step.

        Never while other drafters' tokens may be there, which have cost time already, nor under other policies, whose
        questions are not in vain: a fixed length is speculation as it is commonly done, a bandit tries its arms.
        """
        if (
            self._settings.budget.policy == "marginal"
            and self.pause.holds(num_requests)
            and self._arrived is None
            and not (self.overlaps and self.watch.is_used)
            and not self._leads
            and not self._is_helped
        ):
            self.pause = after_rest(self.pause)
            return True
        return False

    def propose(
        self,
        query: DraftQuery,
        num_other_tokens: int,
        max_alternatives: int = 0,
        weight: Float64Array | None = None,
        left: Int64Array | None = None,
        ahead: Int32Array | None = None,
        num_left: Int32Array | None = None,
    ) -> Proposal:
        """Draft for every request of `query` and let the budget cut.

        Args:
            query: what to draft for.
            num_other_tokens: tokens of the step that are neither drafts nor the next tokens of the query's requests:
                prefill above all.
            max_alternatives: draft paths beyond one per request that the step has room for.
            weight: what a token of each request counts (`budget.fair_weights`). [num_requests]
            left: tokens to each request's limit; None: not known. [num_requests]
            ahead: first tokens of each request's draft that a step under way decides: they are drafted to get behind
                them, and the budget counts from there. None: no step is under way. [num_requests] int32
            num_left: tokens of the model drafter's that the device will have behind those. [num_requests] int32
        """
        self._flush()
        if (chooser := self._chooser) is not None:
            self.budget = chooser.advance(self.budget, self._log)
        self._late_s = 0.0  # of a step that was not worth observing
        num_context_tokens = int(query.positions.sum())
        self._begin(query.responses)
        self._batch_size = len(query.groups)
        has_model_drafts = self._arrived is not None or num_left is not None
        self._now = self.budget.at_context(num_context_tokens, has_model_drafts)
        if self.watch.is_used:
            self._steering.outlook.steps_left = self._steps_of(left)
        self._free_calibration = self._believed(query)
        drafter_query = replace(query, responses=self._drafter_numbers(query.responses))
        free, paths = self._draft_free(query, drafter_query, num_other_tokens, weight, ahead)
        model, model_paths = self._match_model(query)
        batch = self._meet(query, (free, model), may_wait=num_other_tokens == 0)
        branches = None if ahead is None else self._branches(drafter_query, batch, ahead, paths)
        path = _behind(batch.path_probability, ahead)
        if branches is not None:
            path = np.minimum(path + _any_behind(branches, ahead), np.float32(1.0))
        mixture = None
        if num_left is not None and ahead is not None:
            num_left = np.minimum(num_left, np.maximum(query.max_tokens - ahead, 0)).astype(np.int32)
            mixture = self._left.mix(path, _goes_on(batch, branches, ahead), num_left)
            path = mixture.path
        snapshot = self._snapshot(path, num_other_tokens, weight)
        lengths = budget.decide(snapshot, self._now, self._settings.budget)
        self._expected = budget.expected_accepted(snapshot, lengths)
        self._num_drafted = int(lengths.sum())
        if not num_other_tokens and not self.overlaps:  # where steps overlap more of them are not known yet
            self._num_coming = self._batch_size + self._num_drafted
        self.pause = after_question(self.pause, self._batch_size, self._num_drafted)
        judged = has_model_drafts and num_other_tokens == 0 and not self._is_helped
        free_path = None
        if judged and free is not None:
            cells = free.cells  # behind a draft there may be any number
            acceptance = self.free.alone.take(cells, mode="clip")
            free_path = _behind(replace(free, acceptance=acceptance).path_probability, ahead)
        self._log.write_budget(
            num_context_tokens,
            has_model_drafts,
            snapshot,
            lengths,
            self._steering.outlook.steps_left if judged else None,
            free_path,
        )
        if judged:
            states = self._now, self.budget.at_context(num_context_tokens)
            self._steering.judge(snapshot, lengths, free_path, states, self._settings.budget)
        alternatives = None
        self._has_room = max_alternatives > 0
        if self._has_room:
            alternatives = self._paths.choose(
                StepDrafts(drafter_query, batch, lengths, num_other_tokens, self._expected),
                self._free_paths(drafter_query),
                model_paths,
                self._now,
                self._settings.budget,
                max_alternatives,
            )
        if alternatives is not None:
            self._expected += alternatives.expected_accepted * self._paths.worth
        return Proposal(
            batch,
            lengths,
            (free, model),
            alternatives,
            query.responses,
            self._expected,
            mixture,
            branches,
        )

    def _believed(self, query: DraftQuery) -> Float32Array:
        """The model-free drafter's acceptance by cell, with or without others beside it. [num_cells]"""
        is_resting = self.watch.is_used and not self._is_helped and not self._has_others(query)
        return self.free.alone if is_resting else self.free.calibration

    def _steps_of(self, num_tokens: NDArray[np.integer] | int | None) -> float:
        """Steps to the limit or likely end of responses with so much room, in the mean; None: with any room."""
        likely = self.endings.mean_tokens
        tokens = likely if num_tokens is None else float(np.minimum(num_tokens, likely).mean())
        return tokens / self._recent.tokens_per_step if self._recent.num_decoded else tokens

    def _snapshot(
        self, path_probability: Float32Array, num_other_tokens: int, weight: Float64Array | None
    ) -> budget.BudgetSnapshot:
        num_requests = len(path_probability)
        return budget.BudgetSnapshot(
            num_requests=num_requests,
            num_other_tokens=num_other_tokens,
            path_probability=path_probability,
            max_total_draft_tokens=max(self._sizes.max_step_tokens - num_requests - num_other_tokens, 0),
            weight=weight,
        )

    def _meet(
        self, query: DraftQuery, fresh: tuple[DraftBatch | None, DraftBatch | None], may_wait: bool
    ) -> DraftChains:
        """Each request's draft. fresh: what has been drafted in the engine, model-free and by the model."""
        is_helped = self.ahead is not None and self.ahead.listen()
        if self._trees is None or not (is_helped or fresh[1] is not None or self._has_others(query)):
            alone = next((made for made in fresh if made is not None), None)
            return _no_drafts(len(query.groups)) if alone is None else alone
        for source, made in zip((Source.FREE, Source.MODEL - self._place), fresh, strict=True):
            if made is not None:
                self._trees.add(source, query.responses, query.positions, made, anew=True)
        if self._leads:
            self._leads.propose(query)
        if self.ahead is not None:
            self.ahead.plan(query.responses, self._now.decode_time)
            return self.ahead.best(query, self._now.decode_time, self._num_drafted, may_wait)
        return self._trees.best(query.responses, query.positions, query.max_tokens)

    def _draft_free(
        self,
        query: DraftQuery,
        drafter_query: DraftQuery,
        num_other_tokens: int,
        weight: Float64Array | None,
        ahead: Int32Array | None,
    ) -> tuple[DraftBatch | None, DraftPaths | None]:
        """Drafts, and the paths that have been made with them. drafter_query: the same by the drafter's own numbers of
        the responses.
        """
        if self.drafter is None:
            return None, None
        early, self._early = self._early, None
        if early is not None and early.drafter is self.drafter:
            made = early.lined_up(query)
            if made is not None and (made[1] is not None or not self._num_branches(len(query.groups))):
                return made
        if self._sharing is not None:
            self._sharing.take_over(self.drafter)
        if not self._may_pay(query, num_other_tokens, weight, ahead):
            return None, None
        return self.drafter.draft(drafter_query, **self._draft_settings()), None

    def _may_pay(
        self,
        query: DraftQuery,
        num_other_tokens: int,
        weight: Float64Array | None,
        ahead: Int32Array | None,
    ) -> bool:
        """Whether drafting model-free could be worth its time: not if the best cell's tokens, all along, are too dear.

        Asked after steps that verified nothing. Drafts that meet others are always made.
        """
        if self._num_drafted or self._has_others(query):
            return True
        longest = int(query.max_tokens.max(initial=0))
        path = np.cumprod(np.full(longest, self._free_calibration.max(), np.float32))
        ceiling = np.where(np.arange(longest) < query.max_tokens[:, None], path, np.float32(0.0))
        snapshot = self._snapshot(_behind(ceiling, ahead), num_other_tokens, weight)
        return budget.may_pay(snapshot, self._now, self._settings.budget)

    def _has_others(self, query: DraftQuery) -> bool:
        """Whether any other drafter's tokens are there for these requests, to meet the model-free ones."""
        if self._trees is None:
            return False
        is_fed = self._arrived is not None or bool(self._leads)
        return is_fed or self._trees.holds(Source.FREE + 1, query.responses)

    def _free_paths(self, query: DraftQuery) -> Callable[[], DraftPaths] | None:
        """What has the model-free drafter propose several paths; None if it cannot."""
        if not isinstance(self.drafter, PathDrafter):
            return None
        return partial(
            self.drafter.draft_paths,
            query,
            num_paths=self._settings.num_paths,
            sharpness=self.free.beta,
            calibration=self._free_calibration,
            floor=self._settings.draft_floor,
        )

    def _num_branches(self, num_requests: int) -> int:
        """Paths beyond one through a step under way: none for more requests than `max_alternatives` allows."""
        wanted = self._settings.num_paths - 1
        return wanted if num_requests * wanted <= self._settings.max_alternatives else 0

    def _branches(
        self, query: DraftQuery, batch: DraftChains, ahead: Int32Array, paths: DraftPaths | None
    ) -> DraftPaths | None:
        """Further model-free paths, of which one goes on where a request's draft does not: those that leave it among
        its first `ahead` tokens. paths: that have been made already.
        """
        num_branches = self._num_branches(len(ahead))
        if not num_branches or not batch.num_tokens.any():
            return None
        if paths is None:
            draft_paths = self._free_paths(query)
            if draft_paths is None:
                return None
            paths = draft_paths()
        decided = np.where(np.arange(paths.tokens.shape[2]) < ahead[:, None, None], paths.tokens, -1)
        num_tokens = paths.num_tokens[:, 1:].copy()
        for place in range(num_branches):  # of those that are alike so far the likeliest stands for all
            is_like = (decided[:, : place + 1] == decided[:, place + 1, None]).all(axis=2).any(axis=1)
            num_tokens[is_like, place] = 0
        return DraftPaths(
            np.ascontiguousarray(paths.tokens[:, 1:]),
            num_tokens,
            np.ascontiguousarray(paths.acceptance[:, 1:]),
            paths.cells[:, 1:],
        )

    def _match_model(self, query: DraftQuery) -> tuple[DraftBatch | None, DraftPaths | None]:
        """Line the model drafts up with the query; drafts for another position than the present one are void."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return None, None
        self._draft_s = arrived.total_s
        places = find_places(arrived.responses, arrived.positions, query.responses, query.positions)
        return line_up(arrived.batch, arrived.paths, places, query.max_tokens)

    def receive(self, drafts: ModelDrafts) -> None:
        """Take the model drafter's work; its time is taken out of the step's, so that T(n) is the target's alone."""
        self._arrived = drafts
        self._begin(drafts.responses)
        reading_s = max(drafts.total_s - drafts.growth.seconds - drafts.branching.seconds, 0.0)
        cost = drafts.growth, len(drafts.responses), reading_s
        self._log.write_growth(*cost, self._steering.outlook)
        self._steering.receive(*cost)
        if self._pending is not None:
            step, expected = self._pending
            self._pending = replace(step, step_s=max(step.step_s - drafts.total_s, 1e-6)), expected

    def receive_left(
        self,
        drafts: ModelDrafts,
        responses: Int64Array,
        positions: Int64Array,
        decided: Int32Array,
        num_accepted: int,
    ) -> None:
        """Learn from model drafts that the device had before the step that is over, verified or not.

        Args:
            drafts: what they were.
            responses, positions: those of the step, and from where on it has decided. [num_requests]
            decided: its tokens, -1 behind them. [num_requests, most]
            num_accepted: tokens of the drafts that the step has accepted.
        """
        if self._num_stale:
            self._num_stale -= 1
            return
        width = np.full(len(responses), drafts.batch.tokens.shape[1], np.int32)
        places = find_places(drafts.responses, drafts.positions, responses, positions)
        batch, _ = line_up(drafts.batch, None, places, width)
        num_decided = (decided >= 0).sum(axis=1, dtype=np.int32)
        seen = np.minimum(batch.num_tokens, num_decided)
        right = leading_matches(batch.tokens, seen, decided)
        outcomes = count_outcomes(batch.cells, seen, right, self.model.num_cells)
        self._recent.note_drafts(outcomes)
        self.watch.observe(batch, decided[:, 0])
        self.model.learn(outcomes)
        self._left.learn(seen, right)
        path, (floor, costs) = drafts.batch.path_probability, self._limits
        self._left.depth = choose_depth(path, floor, costs, self._settings.max_draft_tokens)
        self._begin(drafts.responses)
        self._log.write_growth(drafts.growth, len(drafts.responses), 0.0, self._steering.outlook)
        self._steering.receive(drafts.growth, len(drafts.responses), 0.0)
        self._late_s = drafts.total_s
        if num_accepted:
            self._accepted = NO_TOKENS.copy()
            self._accepted[Source.MODEL - self._place] = num_accepted

    def order(self) -> DraftOrder | None:
        """What the model drafter shall do after the coming step; None without one, and while it rests.

        Under a fixed budget it never rests: that is speculation as it is commonly done.
        """
        is_elsewhere = self.ahead is not None and self.ahead.has(self._place)
        is_elsewhere |= not self._settings.drafts_inside
        if not self.watch.is_used or is_elsewhere or not self.may_draft:
            return None
        batch, step_time = max(self._batch_size, 1), self._now.decode_time
        outlook = self._steering.outlook
        outlook.coming = 0.0
        num_coming, self._num_coming = self._num_coming, None
        if self._unbegun and num_coming is None:  # those that there is room for begin now
            begin = min(len(self._unbegun), max(self._sizes.max_requests - outlook.num_open, 0))
            batch = max(outlook.num_open + begin, 1)
            outlook.coming = self._unbegun_tokens * begin / len(self._unbegun)
            outlook.steps_left = self._steps_of(self._newest_left)
        depth = budget.draft_depth(self._now, self._settings.budget, batch, num_coming)
        longest = min(depth, self._settings.max_draft_tokens)
        limits: tuple[float, Float32Array, int | None] = 0.0, NO_COSTS, None
        if self._settings.budget.policy == "fixed":
            if not longest:
                return None
        else:
            drafts = longest > 0 and self._steering.advance(batch, step_time, self.watch.is_alive)
            if drafts:
                limits = self._steering.limits(
                    batch, self._num_drafted, step_time, self._settings.draft_floor, for_all=self.overlaps
                )
            self._log.write_drafter(
                limits if drafts else None,
                batch,
                num_coming,
                outlook,
                self.watch.is_alive,
                for_all=self.overlaps,
            )
            if not drafts:
                return None
        if self.overlaps:
            self._limits = limits[:2]
            depth = min(self._left.depth, longest)
            return DraftOrder(depth, self.model.beta, self.model.calibration, *limits[:2], is_exact=True)
        most = self._settings.num_paths if self._has_room else 1
        num_paths = most_paths(self._now, self._settings.budget, batch, most)
        rivals = self.model.rivals * np.float32(self._paths.worth) if num_paths > 1 else None
        return DraftOrder(longest, self.model.beta, self.model.calibration, *limits, num_paths, rivals)

    def learn(
        self,
        proposal: Proposal,
        verified: Int32Array,
        decided: Int32Array,
    ) -> None:
        """Score a step's drafts. A token teaches whoever drafted it, whosever draft was verified.

        Args:
            proposal: what `propose` returned for the step; its alternatives, as far as they were verified.
            verified: draft tokens of each request that the target really saw, those `ahead` included. [num_requests]
                int32
            decided: the target's tokens of each request from where its draft begins, -1 behind them. [num_requests,
                most] int32
        """
        self._expected = proposal.expected_accepted
        first, num_decided = decided[:, 0], (decided >= 0).sum(axis=1, dtype=np.int32)
        accepted = leading_matches(proposal.batch.tokens, verified, decided)
        others, matches = proposal.alternatives, np.empty(0, np.int32)
        if others is not None:
            matches = leading_matches(others.tokens, others.lengths, decided[others.owners])
        self._paths.learn(others, accepted, matches)
        for learned, candidate in zip((self.free, self.model), proposal.candidates, strict=True):
            if candidate is None:
                continue
            learned.learn_sharpness(candidate.probes, first)
            seen = np.minimum(np.minimum(verified, candidate.num_tokens), num_decided)
            is_alone = candidate is proposal.batch
            right = accepted if is_alone else leading_matches(candidate.tokens, seen, decided)
            outcomes = count_outcomes(candidate.cells, seen, right, learned.num_cells)
            if learned is self.model:
                self._recent.note_drafts(outcomes)
                self.watch.observe(candidate, first)
                if isinstance(candidate, ModelBatch) and self._settings.num_paths > 1:
                    told, _ = judge(candidate.cells.shape[1], seen, right)
                    learned.learn_rivals(candidate.cells[told], _equal(candidate.rivals, decided)[told])
            if learned is self.free and others is not None:
                outcomes = outcomes.and_also(outcomes_of(others, others.lengths, matches, learned.num_cells))
            learned.learn(outcomes)
            if learned is self.free and is_alone and self.watch.is_used:
                learned.learn_alone(outcomes)
        if isinstance(proposal.batch, MetDrafts):
            taken = np.arange(proposal.batch.tokens.shape[1]) < accepted[:, None]
            self._accepted = np.bincount(proposal.batch.sources[taken], minlength=len(NO_TOKENS))
            if self.ahead is not None:
                self.ahead.learn(proposal.responses, decided)
        elif proposal.candidates[-1] is not None:  # the model's, which were alone
            self._accepted = NO_TOKENS.copy()
            self._accepted[Source.MODEL - self._place] = accepted.sum()

    def _begin(self, responses: Int64Array) -> None:
        """These are in a step. Costs nothing once all are."""
        if self._unbegun:
            for response in responses.tolist():
                if (num_tokens := self._unbegun.pop(response, None)) is not None:
                    self._unbegun_tokens -= num_tokens
                    self._steering.open(num_tokens)

    def observe(self, step: StepObservation) -> StepObservation:
        """A measured step, returned with what the loop knows of it: whose drafts were accepted, what waiting took.

        Kept until the next begins, because a model drafter's share may still be taken out of its time. While nothing
        may be drafted nothing is learned either: plain decoding costs what vLLM's does.
        """
        self._flush()
        self._recent.note_step(step, self._draft_s)
        if not self.may_draft and self._accepted is NO_TOKENS:
            return step
        wait_s = 0.0
        if self.ahead is not None:
            wait_s, self.ahead.step_wait_s = self.ahead.step_wait_s, 0.0
            step = replace(self._count_ahead(step, self.ahead.counts), wait_s=wait_s)
        if self._accepted is not NO_TOKENS:
            by_drafter = self._accepted[Source.MODEL : Source.FREE : -1]
            step = replace(
                step,
                num_model_tokens=int(by_drafter.sum()),
                further_tokens=tuple(by_drafter[1 : 1 + len(self._settings.further_drafters)].tolist()),
                num_adopted_tokens=int(self._accepted[Source.LEAD]),
            )
            self._accepted = NO_TOKENS
        draft_s, self._draft_s = self._draft_s + self._late_s + wait_s, 0.0
        late_s, self._late_s = self._late_s, 0.0
        alone = step
        if draft_s:
            alone = replace(step, step_s=max(step.step_s - late_s - wait_s, 1e-6), draft_s=draft_s)
        self._pending = alone, self._expected if step.num_draft_tokens else 0.0
        return step

    def _count_ahead(self, step: StepObservation, counts: tuple[DraftCounts, ...]) -> StepObservation:
        """The step with what the draft workers have done since the one before."""
        if counts == self._ahead_before and not self._is_helped:
            return step
        news = [now - before for now, before in zip(counts, self._ahead_before, strict=True)]
        self._ahead_before, total = counts, sum(news, DraftCounts())
        return replace(
            step,
            num_wasted_tokens=total.num_wasted,
            further_wasted_tokens=tuple(own.num_wasted for own in news[1:]),
            num_branches=total.num_branches,
            num_branch_hits=total.num_hits,
            ahead_tokens=tuple(own.num_drafted for own in news),
            ahead_s=tuple(own.draft_s for own in news),
        )

    def level_s(self, batch: int) -> float:
        """What the engine's model drafter takes for a token of each of `batch` requests; 0 before it has drafted."""
        return self._steering.level_s(batch)

    @property
    def _is_helped(self) -> bool:
        """Whether drafts may come from outside."""
        return self.ahead is not None and self.ahead.is_there

    def step_costs(self) -> StepCosts | None:
        """What the steps of the present batch cost and bring; None before any was measured."""
        if not self.budget.decode_time.num_observations or not self._recent.num_decoded:
            return None
        batch, far = max(self._batch_size, 1), 1 + FAR_TOKENS
        near_s, far_s = (predict_one_s(self._now.decode_time, size) for size in (batch, batch * far))
        token_s = max(far_s - near_s, 0.0) / (batch * FAR_TOKENS)
        drafting = self.level_s(batch), self._recent.acceptance
        is_elsewhere = self.ahead is not None and self.ahead.has(self._place)
        if self.ahead is not None and is_elsewhere:
            drafting = self.ahead.drafting(self._place) or drafting
        draft_s, acceptance = drafting
        return StepCosts(
            base_s=max(near_s - token_s * batch, 1e-6),
            token_s=token_s,
            inside_s=0.0 if is_elsewhere else self._recent.inside_s,
            tokens_per_step=self._recent.tokens_per_step,
            step_tokens=self._recent.step_tokens,
            draft_s=draft_s,
            acceptance=acceptance,
        )

    def _flush(self) -> None:
        if self._pending is not None:
            step, expected = self._pending
            self._log.write_step(step, expected)
            self.budget = budget.update(self.budget, step, self._settings.budget, expected)
            if (chooser := self._chooser) is not None:
                chooser.observe(step)
            self._pending = None


def _make_drafter(settings: EngineSettings) -> tuple[Drafter | None, Float32Array]:
    """The model-free drafter and the prior of its calibration cells."""
    if settings.drafter == "suffix":
        from paceline.drafting import suffix

        forest = suffix.SuffixForest(
            settings.suffix_depth, settings.suffix_memory_bytes, num_threads=settings.suffix_threads
        )
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


def _has_several_drafts(settings: EngineSettings) -> bool:
    """Whether drafts have to meet: of two drafters, or of a draft worker or racer, whose drafts come late and early."""
    others = settings.drafter != "none" or bool(settings.draft_worker) or settings.draft_help
    return settings.adopt_leads or (settings.model_drafter is not None and others)


def table_of(rows: Sequence[Sequence[int]]) -> Int32Array:
    """Token ids of each request as a table, -1 behind them. [num_requests, at least 1]"""
    return _step.table_of(list(rows))


def leading_matches(tokens: Int32Array, lengths: Int32Array, decided: Int32Array) -> Int32Array:
    """Tokens of each draft that are what the target decided, up to the first that is not.

    The target's tokens reach one beyond the longest accepted path, so they judge every other path too.

    Args:
        tokens: [num_drafts, max_draft_tokens]
        lengths: draft tokens that count. [num_drafts]
        decided: the target's tokens, -1 behind them. [num_drafts, most]
    """
    return _step.leading_matches(tokens, lengths, decided)


def _behind(path_probability: Float32Array, ahead: Int32Array | None) -> Float32Array:
    """Path probabilities from behind the first `ahead` tokens of each draft on, 0 beyond them. [num_drafts, any]"""
    return path_probability if ahead is None else _step.behind(path_probability, ahead)


def _goes_on(batch: DraftChains, branches: DraftPaths | None, ahead: Int32Array) -> Float32Array:
    """Probability that one of a request's drafts is right in its first `ahead` tokens. [num_requests]"""
    before = np.maximum(ahead - 1, 0).astype(np.int32)
    right = _step.behind(batch.path_probability, before)[:, 0]
    if branches is not None:
        right = np.minimum(right + _any_behind(branches, before)[:, 0], np.float32(1.0))
    return np.where(ahead > 0, right, np.float32(1.0))


def _any_behind(branches: DraftPaths, ahead: Int32Array | None) -> Float32Array:
    """Probability that one of a request's branches is accepted up to each token behind the first `ahead`: no two can
    be. [num_requests, any]
    """
    count, num_branches, width = branches.tokens.shape
    path = _step.path_probability(branches.num_tokens.reshape(-1), branches.acceptance.reshape(-1, width))
    each = _behind(path, None if ahead is None else np.repeat(ahead, num_branches))
    total: Float32Array = each.reshape(count, num_branches, -1).sum(axis=1)
    return total


def _equal(tokens: Int32Array, decided: Int32Array) -> NDArray[np.bool_]:
    """Which tokens are what the target decided. [num_drafts, max_draft_tokens], as `tokens`"""
    equal, width = np.zeros(tokens.shape, np.bool_), min(tokens.shape[1], decided.shape[1])
    equal[:, :width] = tokens[:, :width] == decided[:, :width]
    return equal


def _no_drafts(num_requests: int) -> DraftChains:
    zero = np.zeros((num_requests, 1), np.float32)
    return DraftChains(zero.astype(np.int32), np.zeros(num_requests, np.int32), zero)

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

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import _step
from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.learned import Learned
from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_wire import DraftCounts
from paceline.engine.draft_ahead import UNKNOWN_SIZES, TargetSizes, start_draft_ahead
from paceline.engine.draft_rows import (
    any_behind,
    behind,
    equal,
    goes_on,
    leading_matches,
    no_drafts,
)
from paceline.engine.early_drafts import find_places, line_up
from paceline.engine.leads import Leads
from paceline.engine.left_drafts import LeftDrafts, Mixture
from paceline.engine.live_coupling import LiveCoupling
from paceline.engine.loop_log import open_log
from paceline.engine.model_free import ModelFreeDrafts
from paceline.engine.model_steering import ModelSteering
from paceline.engine.model_watch import ModelWatch
from paceline.engine.multipath.alternatives import AlternativePaths, Alternatives, StepDrafts, outcomes_of
from paceline.engine.recent_steps import RecentSteps
from paceline.planning import budget
from paceline.planning.acceptance import count_outcomes, judge
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

NO_COSTS = np.zeros(1, np.float32)
"""Of a draft's levels."""

NO_TOKENS = np.zeros(Source.LEAD + 1, np.int64)
"""Of any source."""

FAR_TOKENS = 8
"""Draft tokens of each request up to which the cost of a further one is told."""

_MOST_UNDER_WAY = 2
"""Steps whose model drafts may be on their way to the host."""


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
    """Of the drafts to verify, without alternatives."""
    left: Mixture | None = None
    """What the model drafter leaves on the device behind a step under way, beside the drafts; None: nothing."""
    branches: DraftPaths | None = None
    """Paths that leave each request's draft among the tokens that a step under way decides; None: there are none."""


class PolicyState(NamedTuple):
    """What is learned under one budget policy: step time and confidence, and whether the model drafter pays."""

    budget: budget.BudgetState
    steering: ModelSteering


class FastLoop:
    """One per engine. Not thread-safe: the scheduler's thread alone uses it."""

    def __init__(self, settings: EngineSettings, sizes: TargetSizes = UNKNOWN_SIZES) -> None:
        """Raises CheckpointError or ConfigError where a draft worker is wanted and cannot be."""
        self._settings, self._sizes = settings, sizes
        self.free = ModelFreeDrafts(settings, sizes.vocab_size)
        self.model = Learned(_model_prior(settings), settings.sharpness)
        self.budget = budget.BudgetState.initial(settings.budget)
        self._now = self.budget
        self._steering = ModelSteering()
        self._arrived: ModelDrafts | None = None
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
        with ExitStack() as started:
            started.callback(self.free.shut_down)
            self.ahead = (
                None if self._trees is None else start_draft_ahead(settings, sizes, self._trees, self._log)
            )
            started.pop_all()
        self.coupling = None
        """Whether the model drafts inside or ahead; None: that is not to be chosen."""
        if self.ahead is not None and settings.draft_worker == "auto":
            self.coupling = LiveCoupling(
                self.ahead, lambda: budget.BudgetState.initial(self._settings.budget)
            )
        self._leads = Leads(self._trees) if settings.adopt_leads and self._trees is not None else None
        self._recent = RecentSteps()
        self._ahead_before = () if self.ahead is None else self.ahead.counts
        self._accepted = NO_TOKENS  # of the present step, by source
        self.watch = ModelWatch(settings.model_drafter)
        self._unbegun: dict[int, int] = {}  # tokens of each response that has not been in a step
        self._unbegun_tokens = 0  # of all of them
        self._newest_left: int | None = None  # tokens that the last opened one has room for, if known
        self.endings = Endings()
        self.pause = Pause()
        self.drafting = True

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
        self.free.open(group, response, prompt, generated, key)

    def append(self, tokens: Iterable[tuple[int, int, list[int]]]) -> None:
        """(group, response, new tokens) of each response that grew in the step."""
        if not self.drafting or (self.free.drafter is None and self._trees is None):
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
        self.free.grow(groups, responses, offsets, tokens, drafter_knows=drafter_knows)

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
        self.free.calibration = self._believed(query)
        self.free.draft_early(groups, responses, offsets, tokens, query)

    @property
    def drafts_early(self) -> bool:
        """Whether `draft_early` can, and the last drafts were worth verifying."""
        return self.drafting and self._num_drafted > 0 and self.free.can_draft_early

    def close(self, group: int, response: int) -> None:
        """A response has ended; its tokens go on serving its group."""
        if response in self._unbegun:
            self._unbegun_tokens -= self._unbegun.pop(response)
        else:
            self._steering.close()
        self.free.close(group, response)
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

    def shut_down(self) -> None:
        """Disconnect from the draft servers, end the draft worker and the decision log, take all threads back."""
        self._draft_coupled()
        self.coupling = None
        if self.ahead is not None:
            self.ahead.shut_down()
            self.ahead = None
        self.free.shut_down()
        self._log.close()

    def forget_tokens(self) -> None:
        """Drop all groups, as weights may change; what was learned about acceptance and time stays."""
        self.watch.begin_trial()
        self.free.forget()
        if self._trees is not None:
            self._trees.clear()
        if self.ahead is not None:
            self.ahead.forget()
        if self._leads is not None:
            self._leads.clear()
        self._arrived, self.pause = None, Pause()

    def use_epoch(self, epoch: int) -> None:
        """Share drafts with the workers of this epoch; by default each `forget_tokens` begins the next."""
        self.free.use_epoch(epoch)

    def set_drafting(self, wanted: bool) -> None:
        """Switch all drafting off (plain decoding) or on again; only between responses. What was learned stays."""
        if wanted != self.drafting:
            self.forget_tokens()
            self._draft_coupled()
            self.free.switch()
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
        return self.free.sharing_counters()

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
        has_drafter = self.free.drafter is not None or self.watch.is_used or has_others or bool(self._leads)
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
        self.free.calibration = self._believed(query)
        drafter_query = self.free.by_number(query)
        free, paths = self._draft_free(query, drafter_query, num_other_tokens, weight, ahead)
        model, model_paths = self._match_model(query)
        batch = self._meet(query, (free, model), may_wait=num_other_tokens == 0)
        branches = None if ahead is None else self.free.branches(drafter_query, batch, ahead, paths)
        path = behind(batch.path_probability, ahead)
        if branches is not None:
            path = np.minimum(path + any_behind(branches, ahead), np.float32(1.0))
        mixture = None
        if num_left is not None and ahead is not None:
            num_left = np.minimum(num_left, np.maximum(query.max_tokens - ahead, 0)).astype(np.int32)
            mixture = self._left.mix(path, goes_on(batch, branches, ahead), num_left)
            path = mixture.path
        snapshot = self._snapshot(path, num_other_tokens, weight)
        lengths = budget.decide(snapshot, self._now, self._settings.budget)
        self._expected = budget.expected_accepted(snapshot, lengths)
        self._num_drafted = int(lengths.sum())
        if not num_other_tokens and not self.overlaps:  # where steps overlap more of them are not known yet
            self._num_coming = self._batch_size + self._num_drafted
        self.pause = after_question(self.pause, self._batch_size, self._num_drafted)
        judged = has_model_drafts and not self._has_help
        free_path = None
        if judged and free is not None:
            cells = free.cells  # behind a draft there may be any number
            acceptance = self.free.learned.alone.take(cells, mode="clip")
            free_path = behind(replace(free, acceptance=acceptance).path_probability, ahead)
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
                self.free.paths(drafter_query),
                model_paths,
                self._now,
                self._settings.budget,
                max_alternatives,
            )
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
        is_resting = self.watch.is_used and not self._has_help and not self._has_others(query)
        return self.free.learned.alone if is_resting else self.free.learned.calibration

    def _steps_of(self, num_tokens: NDArray[np.integer] | int | None) -> float:
        """Steps to the limit or likely end of responses with so much room, in the mean; None: with any room."""
        likely = self.endings.mean_tokens
        tokens = likely if num_tokens is None else float(np.minimum(num_tokens, likely).mean())
        return tokens / self._recent.tokens_per_step if self._recent.num_decoded else tokens

    def _snapshot(
        self, path_probability: Float32Array, num_other_tokens: int, weight: Float64Array | None
    ) -> budget.BudgetSnapshot:
        num_requests = len(path_probability)
        taken = num_requests * (1 + self._sizes.slots_per_request) + num_other_tokens
        return budget.BudgetSnapshot(
            num_requests=num_requests,
            num_other_tokens=num_other_tokens,
            path_probability=path_probability,
            max_total_draft_tokens=max(self._sizes.max_step_tokens - taken, 0),
            weight=weight,
        )

    def _meet(
        self, query: DraftQuery, fresh: tuple[DraftBatch | None, DraftBatch | None], may_wait: bool
    ) -> DraftChains:
        """Each request's draft. fresh: what has been drafted in the engine, model-free and by the model."""
        is_helped = self.ahead is not None and self.ahead.listen()
        if self._trees is None or not (is_helped or fresh[1] is not None or self._has_others(query)):
            alone = next((made for made in fresh if made is not None), None)
            return no_drafts(len(query.groups)) if alone is None else alone
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
        if self.free.drafter is None:
            return None, None
        if (made := self.free.take_early(query)) is not None:
            return made
        self.free.take_over()
        if not self._may_pay(query, num_other_tokens, weight, ahead):
            return None, None
        return self.free.draft(drafter_query), None

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
        path = np.cumprod(np.full(longest, self.free.calibration.max(), np.float32))
        ceiling = np.where(np.arange(longest) < query.max_tokens[:, None], path, np.float32(0.0))
        snapshot = self._snapshot(behind(ceiling, ahead), num_other_tokens, weight)
        return budget.may_pay(snapshot, self._now, self._settings.budget)

    def _has_others(self, query: DraftQuery) -> bool:
        """Whether any other drafter's tokens are there for these requests, to meet the model-free ones."""
        if self._trees is None:
            return False
        is_fed = self._arrived is not None or bool(self._leads)
        return is_fed or self._trees.holds(Source.FREE + 1, query.responses)

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
        self._expected += self._paths.learn(others, accepted, matches)
        free = self.free.learned
        for learned, candidate in zip((free, self.model), proposal.candidates, strict=True):
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
                    learned.learn_rivals(candidate.cells[told], equal(candidate.rivals, decided)[told])
            if learned is free and others is not None:
                outcomes = outcomes.and_also(outcomes_of(others, others.lengths, matches, learned.num_cells))
            learned.learn(outcomes)
            if learned is free and is_alone and self.watch.is_used:
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

    @property
    def _has_help(self) -> bool:
        """Whether others draft in the place of the engine's own drafter, or a further one beside it."""
        return self.ahead is not None and self.ahead.is_drafting

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


def _model_prior(settings: EngineSettings) -> Float32Array:
    if settings.model_drafter is None:
        return np.zeros(1, dtype=np.float32)
    from paceline.drafting.proposal import prior_calibration

    return prior_calibration()


def _has_several_drafts(settings: EngineSettings) -> bool:
    """Whether drafts have to meet: of two drafters, or of a draft worker or racer, whose drafts come late and early."""
    others = settings.drafter != "none" or bool(settings.draft_worker) or settings.draft_help
    return settings.adopt_leads or (settings.model_drafter is not None and others)

"""How simulated workers speculate: a batch and its acceptance rates in, the time and the yield of a round out.

Each class carries out decisions of `planning/` (named in its docstring) on the batch of one worker; what a draft of w
tokens yields is `planning.window`'s closed form. One instance per worker, as some learn. Called by the simulated
workers whenever the batch or its acceptance has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.budget import BudgetSnapshot, BudgetState, decide
from paceline.planning.latency_profile import LatencyModel
from paceline.planning.reconfigure import PlanTable, reconfigure
from paceline.planning.window import (
    Mode,
    StepTimes,
    best_window,
    coupled_tokens,
    decoupled_tokens,
    profiled_times,
)
from paceline.sim.alternatives import tree_tokens
from paceline.sim.costs import Drafter, EngineCosts
from paceline.types import Float64Array, Int32Array

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs on a worker."""

    acceptance: Float64Array  # [num_drafters, num_requests]
    context_tokens: float
    """Of all requests together."""
    look: int = 0
    """Counts how often acceptance was looked at anew."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round of the batch costs and yields."""

    base_s: float
    """Seconds of a round without what its context costs."""
    context_s: float
    """Seconds per token of context, all requests together."""
    tokens: Float64Array  # [num_requests] tokens each gains in a round, positive
    sum_tokens: float
    """Of all requests."""
    drafted_tokens: float = 0.0
    """Draft tokens of a round, whether they are verified or not."""
    bonus_tokens: float = 0.0
    """Tokens of a round that no drafter proposed: sum_tokens less accepted draft tokens."""


class BySize(Generic[_Found]):
    """What was found for batches of about a size, until acceptance is looked at again. One per worker."""

    def __init__(self) -> None:
        self._found: dict[int, _Found] = {}
        self._look = -1

    def get(self, batch: Batch, search: Callable[[], _Found]) -> _Found:
        """What `search` gave for a batch size within a twentieth of this one's since the last look."""
        if batch.look != self._look:
            self._found.clear()
            self._look = batch.look
        size = round(math.log(batch.acceptance.shape[1]) / 0.05)
        if size not in self._found:
            self._found[size] = search()
        return self._found[size]


class Speculation(Protocol):
    """How one worker speculates."""

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        """The rounds of this batch from now on."""


class Plain:
    """No drafts."""

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        num_requests = batch.acceptance.shape[1]
        base_s = float(costs.step.by_tokens.seconds(num_requests))
        return RoundPlan(base_s, costs.step.context_s, np.ones(num_requests), float(num_requests))


@dataclass
class FixedWindow:
    """Every request drafts `window` tokens in every step, drafter and target taking turns (vanilla speculation)."""

    drafter: Drafter
    index: int
    """The drafter's row of the acceptance rates."""
    window: int

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        return coupled_plan(rates, np.full(len(rates), self.window), self.drafter.token, costs)


@dataclass
class Decoupled:
    """Drafters on devices of their own, drafting ahead (SpecActor 4.1; `planning.window`).

    With `max_window` requests below the mean acceptance get a window and mode of their own, the rest keep theirs
    (algorithm 2, `planning.reconfigure`), whenever the batch has changed or the worker looks again: more often than the
    paper's 1000 iterations. What is best at a batch size is worked out once between two looks, for acceptance rates in
    steps of 1/256 and batch sizes within a twentieth. With `chooses_all` everyone gets the best window at its own
    acceptance: a racing worker has no placement to keep. `synchronous`: the drafter waits for the verifier, so nothing
    overlaps (the naive disaggregation of the paper's ablation). `free` is ours: drafters without a model propose too,
    in the engine and in no time, and a request takes their window if it yields more than the one drafted ahead, refills
    counted.
    """

    drafter: Drafter
    index: int
    window: int
    max_window: int = 0
    """Longest window of a reconfigured request, 0: nobody is reconfigured."""
    chooses_all: bool = False
    synchronous: bool = False
    free: tuple[int, ...] = ()
    """Rows of the drafters without a model."""
    _tables: BySize[PlanTable] = field(default_factory=BySize)

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        windows = np.full(len(rates), self.window)
        if self.synchronous:
            return coupled_plan(rates, windows, self.drafter.token, costs)
        is_coupled = np.zeros(len(rates), dtype=np.bool_)
        if self.max_window:
            if self.chooses_all:
                windows = best_window(rates, self._times(batch, costs), Mode.DECOUPLED).window
            else:
                table = self._tables.get(batch, lambda: PlanTable(self._times(batch, costs)))
                found = reconfigure(rates, table)
                windows[found.requests] = found.windows
                is_coupled[found.requests] = found.is_coupled
        return self._mixed_plan(rates, windows, is_coupled, batch, costs)

    def _times(self, batch: Batch, costs: EngineCosts) -> StepTimes:
        count = batch.acceptance.shape[1]
        verify = costs.step.for_requests_of(batch.context_tokens / count)
        return profiled_times(self.drafter.token, verify, count, self.max_window)

    def _mixed_plan(
        self,
        rates: Float64Array,
        windows: Float64Array,
        is_coupled: np.ndarray[tuple[int], np.dtype[np.bool_]],
        batch: Batch,
        costs: EngineCosts,
    ) -> RoundPlan:
        draft_s = levels_s(windows, self.drafter.token)
        verify_s = float(costs.step.by_tokens.seconds(float((windows + 1).sum())))
        context_s = costs.step.context_s * batch.context_tokens
        round_s = max(draft_s, verify_s + context_s)
        refill = min(draft_s, verify_s + context_s) / round_s if len(rates) == 1 else 1.0
        tokens = np.empty(len(rates))
        ahead = ~is_coupled
        tokens[ahead] = decoupled_tokens(rates[ahead], windows[ahead], refill)
        if is_coupled.any():
            own_s = windows[is_coupled] * float(self.drafter.token.seconds(len(rates))) + verify_s + context_s
            tokens[is_coupled] = coupled_tokens(rates[is_coupled], windows[is_coupled]) * round_s / own_s
        if self.free:
            free = batch.acceptance[list(self.free)].max(axis=0)
            tokens = np.maximum(tokens, coupled_tokens(free, windows))
        is_bound = verify_s + context_s >= draft_s
        total = float(tokens.sum())
        return RoundPlan(
            base_s=verify_s if is_bound else draft_s,
            context_s=costs.step.context_s if is_bound else 0.0,
            tokens=tokens,
            sum_tokens=total,
            drafted_tokens=float(windows.sum()),
            bonus_tokens=float(np.minimum(tokens, 1.0).sum()),
        )


@dataclass
class DraftRange:
    """Seer 4.4: a length for all, from the room that concurrency leaves; unlikely tokens are not verified.

    `planning.budget.decide` under the policy "thresholds", on the path probabilities of the drafts: 25 to 40 us a plan
    in place of the 17 to 23 of a closed form.
    """

    drafter: Drafter
    index: int
    settings: BudgetSettings
    _state: BudgetState = field(init=False)

    def __post_init__(self) -> None:
        self._state = BudgetState.initial(self.settings)

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        if self.settings.threshold_batch_tokens < len(rates):
            return Plain().plan(batch, costs)
        lengths = decide(_snapshot(rates, self.settings.max_draft_tokens), self._state, self.settings)
        return coupled_plan(rates, lengths, self.drafter.token, costs)


@dataclass
class Bandit:
    """TLT 5.2: no drafts above a batch size, below it what the bandit finds best.

    Drafters of lines: `planning.budget.decide` under the policy "bandit". Drafters with second choices
    (`Drafter.second_choice`): trees of the strategy's depth and tokens to verify (`sim.alternatives.tree_tokens`).
    """

    drafter: Drafter
    index: int
    max_batch: int
    start: bandit.BanditState
    _settings: BudgetSettings = field(init=False)
    _state: BudgetState = field(init=False)

    def __post_init__(self) -> None:
        arms = tuple(astuple(strategy) for group in self.start.groups for strategy in group)
        self._settings = BudgetSettings(
            policy="bandit",
            max_draft_tokens=max(depth for depth, *_ in arms),
            bandit_strategies=arms,
            bandit_batch_sizes=self.start.thresholds,
        )
        self._state = replace(BudgetState.initial(self._settings), bandit=self.start)

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        count = len(rates)
        if count > self.max_batch:
            return Plain().plan(batch, costs)
        strategy = bandit.select_strategy(self._state.bandit, count)
        if self.drafter.second_choice and strategy.draft_depth:
            found = self._tree(rates, strategy, costs)
        else:
            lengths = decide(_snapshot(rates, strategy.draft_depth), self._state, self._settings)
            found = coupled_plan(rates, lengths, self.drafter.token, costs)
        seconds = found.base_s + found.context_s * batch.context_tokens
        accepted = round(found.sum_tokens - count)
        self._state = replace(self._state, bandit=bandit.record(self._state.bandit, count, accepted, seconds))
        return found

    def _tree(self, rates: Float64Array, strategy: bandit.Strategy, costs: EngineCosts) -> RoundPlan:
        """All requests verify the same number of nodes; a level drafts one token for each, as the best path does."""
        count, depth, nodes = len(rates), strategy.draft_depth, strategy.tokens_to_verify
        tokens = tree_tokens(rates, self.drafter.second_choice, nodes, depth)
        drafted = float(nodes * count)
        base_s = float(costs.step.by_tokens.seconds(count + drafted))
        base_s += levels_s(np.full(count, depth), self.drafter.token)
        return RoundPlan(base_s, costs.step.context_s, tokens, float(tokens.sum()), drafted, float(count))


def _snapshot(rates: Float64Array, max_tokens: int) -> BudgetSnapshot:
    """Drafts of so many tokens for every request, as the budget sees them."""
    path = (rates[:, None] ** np.arange(1, max_tokens + 1)).astype(np.float32)
    return BudgetSnapshot(len(rates), 0, path, path.size)


def fair_depths(cut: float, rates: Float64Array) -> Float64Array:
    """The longest draft of each whose last token gains at least `cut` (`budget.fair_gains`); a cut that is one is met.

    With p the acceptance of every token, token k gains log((1 - p^(k+1)) / (1 - p^k)).
    """
    growth = math.expm1(cut)
    return np.asarray(np.floor(np.log(growth / (growth + 1.0 - rates)) / np.log(rates) + 1e-6))


def coupled_plan(
    rates: Float64Array,
    windows: Float64Array | Int32Array,
    token: LatencyModel | None,
    costs: EngineCosts,
) -> RoundPlan:
    """Draft windows [num_requests], then verify them in one step. token: D(b), None: drafting takes no time."""
    tokens = coupled_tokens(rates, windows)
    drafted = float(windows.sum())
    base_s = float(costs.step.by_tokens.seconds(len(rates) + drafted))
    if token is not None:
        base_s += levels_s(windows, token)
    return RoundPlan(base_s, costs.step.context_s, tokens, float(tokens.sum()), drafted, float(len(rates)))


def levels_s(windows: Float64Array | Int32Array, token: LatencyModel) -> float:
    """Seconds to draft the windows level by level, each level over the requests that reach it."""
    reach = np.cumsum(np.bincount(np.asarray(windows, dtype=np.int64))[::-1])[::-1][1:]
    return float(token.seconds(reach).sum())

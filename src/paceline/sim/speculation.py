"""How simulated workers speculate: a batch and its acceptance rates in, the time and the yield of a round out.

Each class carries out decisions of `planning/` (named in its docstring) on the batch of one worker; what a draft of w
tokens yields is `planning.window`'s closed form. One instance per worker, as some learn. Called by the simulated
workers whenever the batch or its acceptance has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.budget import best_lengths
from paceline.planning.latency_profile import LatencyModel
from paceline.planning.reconfigure import reconfigure
from paceline.planning.window import (
    Mode,
    StepTimes,
    best_window,
    coupled_tokens,
    decoupled_tokens,
    profiled_times,
)
from paceline.sim.costs import Drafter, EngineCosts
from paceline.types import Float64Array, Int32Array


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
    paper's 1000 iterations. With `chooses_all` everyone gets the best window at its own acceptance: a racing worker has
    no placement to keep. `synchronous`: the drafter waits for the verifier, so nothing overlaps (the naive
    disaggregation of the paper's ablation).
    """

    drafter: Drafter
    index: int
    window: int
    max_window: int = 0
    """Longest window of a reconfigured request, 0: nobody is reconfigured."""
    chooses_all: bool = False
    synchronous: bool = False

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        windows = np.full(len(rates), self.window)
        if self.synchronous:
            return coupled_plan(rates, windows, self.drafter.token, costs)
        is_coupled = np.zeros(len(rates), dtype=np.bool_)
        if self.max_window:
            times = self._times(batch, costs)
            if self.chooses_all:
                windows = best_window(rates, times, Mode.DECOUPLED).window
            else:
                found = reconfigure(rates, times)
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
    """Seer 4.4: a length for all, from the room that concurrency leaves; unlikely tokens are not verified."""

    drafter: Drafter
    index: int
    settings: BudgetSettings

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        share = self.settings.threshold_batch_tokens // len(rates)
        length = min(self.settings.threshold_request_tokens, share)
        if not length:
            return Plain().plan(batch, costs)
        likely = _depths(self.settings.threshold_min_probability, rates)
        return coupled_plan(rates, np.minimum(likely, length), self.drafter.token, costs)


@dataclass
class Bandit:
    """TLT 5.2: no drafts above a batch size, below it what the bandit finds best (`planning.bandit`)."""

    drafter: Drafter
    index: int
    max_batch: int
    state: bandit.BanditState

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        rates = batch.acceptance[self.index]
        if len(rates) > self.max_batch:
            return Plain().plan(batch, costs)
        strategy = bandit.select_strategy(self.state, len(rates))
        if not strategy.draft_depth:
            found = Plain().plan(batch, costs)
        else:
            windows = np.full(len(rates), strategy.draft_depth)
            extra = (strategy.tokens_to_verify - strategy.draft_depth) * len(rates)
            found = coupled_plan(rates, windows, self.drafter.token, costs, max(extra, 0))
        seconds = found.base_s + found.context_s * batch.context_tokens
        accepted = round(found.sum_tokens - len(rates))
        self.state = bandit.record(self.state, len(rates), accepted, seconds)
        return found


@dataclass
class Budgeted:
    """Paceline: the draft tokens with the best expected rate (`planning.budget`), from whichever drafter promises more.

    Without and with the model drafters, whose levels cost time; the better of the two is carried out. The cut is kept
    as a probability, so that requests which come and go do not need a new search: it is made again after
    `refresh_share` of the batch has changed.
    """

    free: tuple[int, ...]
    """Rows of the drafters that cost next to nothing."""
    model: Drafter | None
    model_index: int
    settings: BudgetSettings
    refresh_share: float = 0.05
    _cuts: dict[int, tuple[bool, float]] = field(default_factory=dict)
    _look: int = -1

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        count = batch.acceptance.shape[1]
        if batch.look != self._look:
            self._cuts.clear()
            self._look = batch.look
        bucket = round(math.log(count) / self.refresh_share)
        if bucket not in self._cuts:
            self._cuts[bucket] = self._search(batch, costs)
        with_model, cut = self._cuts[bucket]
        if math.isinf(cut):
            return Plain().plan(batch, costs)
        rates = self._rates(batch, with_model)
        windows = np.minimum(_depths(cut, rates), self.settings.max_draft_tokens)
        return coupled_plan(rates, windows, self._token(with_model), costs)

    def _rates(self, batch: Batch, with_model: bool) -> Float64Array:
        rows = [*self.free, *([self.model_index] if with_model else [])]
        return np.asarray(batch.acceptance[rows].max(axis=0))

    def _token(self, with_model: bool) -> LatencyModel | None:
        return self.model.token if with_model and self.model is not None else None

    def _search(self, batch: Batch, costs: EngineCosts) -> tuple[bool, float]:
        """(whether the model drafts, the lowest path probability that is verified)"""
        flags = [flag for flag in (False, True) if (self.model if flag else self.free)]
        options = [(*self._cut(batch, costs, flag), flag) for flag in flags]
        if not options:
            return False, math.inf
        _, cut, with_model = max(options, key=lambda option: option[0])
        return with_model, cut

    def _cut(self, batch: Batch, costs: EngineCosts, with_model: bool) -> tuple[float, float]:
        """(tokens per second, cut) of the best set."""
        rates = self._rates(batch, with_model)
        depth = np.arange(1, self.settings.max_draft_tokens + 1)
        paths = rates[:, None] ** depth
        order = np.argsort(-paths, axis=None, kind="stable")
        seconds = costs.step.seconds(len(rates) + np.arange(paths.size + 1), batch.context_tokens)
        token = self._token(with_model)
        if token is not None:
            levels = np.maximum.accumulate(depth[order % len(depth)])
            line = float(token.seconds(0)), float(token.seconds(len(rates)))
            slope = (line[1] - line[0]) / len(rates)
            seconds[1:] += levels * line[0] + slope * np.arange(1, paths.size + 1)
        lengths = best_lengths(paths, len(rates), seconds, self.settings.min_gain)
        taken = int(lengths.sum())
        rate = (len(rates) + float(paths.ravel()[order[:taken]].sum())) / float(seconds[taken])
        return rate, float(paths.ravel()[order[taken - 1]]) if taken else math.inf


def _depths(cut: float, rates: Float64Array) -> Float64Array:
    """The longest draft of each whose path probability is at least `cut`; a cut that is such a probability is met."""
    return np.asarray(np.floor(math.log(cut) / np.log(rates) + 1e-9))


def coupled_plan(
    rates: Float64Array,
    windows: Float64Array | Int32Array,
    token: LatencyModel | None,
    costs: EngineCosts,
    extra_tokens: float = 0.0,
) -> RoundPlan:
    """Draft windows [num_requests], then verify them in one step. token: D(b), None: drafting takes no time.

    extra_tokens: verified beyond the windows (branches of a draft tree).
    """
    tokens = coupled_tokens(rates, windows)
    drafted = float(windows.sum())
    base_s = float(costs.step.by_tokens.seconds(len(rates) + drafted + extra_tokens))
    if token is not None:
        base_s += levels_s(windows, token)
    return RoundPlan(
        base_s, costs.step.context_s, tokens, float(tokens.sum()), drafted + extra_tokens, float(len(rates))
    )


def levels_s(windows: Float64Array | Int32Array, token: LatencyModel) -> float:
    """Seconds to draft the windows level by level, each level over the requests that reach it."""
    reach = np.cumsum(np.bincount(np.asarray(windows, dtype=np.int64))[::-1])[::-1][1:]
    return float(token.seconds(reach).sum())

"""How Paceline's workers speculate inside the engine: the draft budget over all drafters, alternatives beside drafts.

Called by the simulated workers whenever the batch or its acceptance has changed, like the ways in `speculation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning.budget import fair_gains, fair_lengths
from paceline.planning.latency_profile import LatencyModel
from paceline.sim.alternatives import Alternatives, choose_alternatives
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.speculation import Batch, BySize, Plain, RoundPlan, coupled_plan, fair_depths
from paceline.types import Float64Array

_LONGEST = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 127)  # drafts of a model that are tried
_ROUNDS = 3  # of price and choice: one follows from the other


class _Choice(NamedTuple):
    """What is drafted at a batch size until acceptance is looked at again."""

    with_model: bool
    cut: float
    """The lowest gain (`budget.fair_gains`) for which a token is verified; inf: nothing is drafted."""
    longest: int
    """Draft tokens of a request at most: every level of a model drafter takes its time, however few reach it."""
    price_s: float
    """Fair rate (`_fair_rate`) that alternatives must beat in tokens per second; inf: none are verified."""


@dataclass
class Budgeted:
    """Paceline: the draft budget (`planning.budget.fair_lengths`, whatever `settings.fair`), from whichever drafter
    promises more.

    Without and with the model drafter, whose levels cost time; the better of the two is carried out. A model that knows
    its second choices (`Drafter.second_choice`) drafts alternatives too, where they raise the rate
    (`sim.alternatives`). The cut is kept as a gain, so that requests which come and go do not need a new
    search: it is made again after a twentieth of the batch has changed.
    """

    free: tuple[int, ...]
    """Rows of the drafters that cost next to nothing."""
    model: Drafter | None
    model_index: int
    settings: BudgetSettings
    _choices: BySize[_Choice] = field(default_factory=BySize)

    def plan(self, batch: Batch, costs: EngineCosts) -> RoundPlan:
        choice = self._choices.get(batch, lambda: self._search(batch, costs))
        return self._made(choice, batch, costs)

    def _made(self, choice: _Choice, batch: Batch, costs: EngineCosts) -> RoundPlan:
        if math.isinf(choice.cut):
            return Plain().plan(batch, costs)
        rates = self._rates(batch, choice.with_model)
        windows = np.minimum(fair_depths(choice.cut, rates), choice.longest)
        lines = coupled_plan(rates, windows, self._token(choice.with_model), costs)
        if math.isinf(choice.price_s):
            return lines
        return self._branched(lines, rates, windows, choice.price_s, batch, costs)

    def _branched(
        self,
        lines: RoundPlan,
        rates: Float64Array,
        windows: Float64Array,
        price_s: float,
        batch: Batch,
        costs: EngineCosts,
    ) -> RoundPlan:
        """The round with alternatives. price_s: tokens that a second must bring, at the fair rate."""
        assert self.model is not None
        count = len(rates)
        own = batch.acceptance[self.model_index] >= rates
        size = count + lines.drafted_tokens
        after_s = costs.step.by_tokens.seconds(np.array([size, 2.0 * size]))
        token_s = (float(after_s[1]) - float(after_s[0])) / size + _slope_s(self.model.token)
        reading_s = costs.step.context_s * batch.context_tokens / count
        found = choose_alternatives(
            rates,
            windows,
            np.where(own, self.model.second_choice, 0.0),
            price_s * token_s,
            np.full(count, price_s * reading_s),
        )
        return _with_alternatives(lines, found, size, self.model.token, costs)

    def _rates(self, batch: Batch, with_model: bool) -> Float64Array:
        rows = [*self.free, *([self.model_index] if with_model else [])]
        return np.asarray(batch.acceptance[rows].max(axis=0))

    def _token(self, with_model: bool) -> LatencyModel | None:
        return self.model.token if with_model and self.model is not None else None

    def _search(self, batch: Batch, costs: EngineCosts) -> _Choice:
        options = [
            option
            for with_model in (False, True)
            if (self.model if with_model else self.free)
            for option in self._options(batch, costs, with_model)
        ]
        if not options:
            return _Choice(False, math.inf, 0, math.inf)
        return max(options, key=lambda option: option[0])[1]

    def _options(self, batch: Batch, costs: EngineCosts, with_model: bool) -> Iterator[tuple[float, _Choice]]:
        """(fair rate, what is drafted): lines, and with second choices also alternatives beside them."""
        rate, cut, longest = self._cut(batch, costs, with_model)
        yield rate, _Choice(with_model, cut, longest, math.inf)
        if not with_model or self.model is None or not self.model.second_choice or math.isinf(cut):
            return
        for _ in range(_ROUNDS):
            choice = _Choice(True, cut, longest, rate)
            plan = self._made(choice, batch, costs)
            growth = float(np.log(plan.tokens).sum())
            seconds = plan.base_s + plan.context_s * batch.context_tokens
            reached = float(_fair_rate(len(plan.tokens), growth, seconds))
            if reached <= rate * (1.0 + self.settings.min_gain):
                return
            yield reached, choice
            rate = reached

    def _cut(self, batch: Batch, costs: EngineCosts, with_model: bool) -> tuple[float, float, int]:
        """(fair rate, cut, longest draft) of the best set; the tokens that gain most within each longest draft."""
        rates = self._rates(batch, with_model)
        count, most = len(rates), self.settings.max_draft_tokens
        paths = rates[:, None] ** np.arange(1, most + 1)
        gains = fair_gains(paths).ravel()
        order = np.argsort(-gains, kind="stable")
        depth = order % most + 1
        seconds = costs.step.seconds(count + np.arange(paths.size + 1), batch.context_tokens)
        token = self._token(with_model)
        if token is None:
            return self._best(paths, gains[order], seconds, most)
        found = (0.0, most, seconds)
        for longest in sorted({min(one, most) for one in _LONGEST}):
            within = depth <= longest
            spent = seconds[: int(within.sum()) + 1].copy()
            levels = np.maximum.accumulate(depth[within])
            spent[1:] += levels * float(token.seconds(0)) + _slope_s(token) * np.arange(1, len(spent))
            rate = float(_fair_rate(count, np.cumsum(gains[order[within]]), spent[1:]).max())
            if rate > found[0]:
                found = rate, longest, spent
        return self._best(paths, gains[order[depth <= found[1]]], found[2], found[1])

    def _best(
        self, paths: Float64Array, gains: Float64Array, seconds: Float64Array, longest: int
    ) -> tuple[float, float, int]:
        """(fair rate, cut, longest draft) of the budget's decision among drafts of `longest` tokens.

        gains: of their tokens, descending. seconds: of a step that verifies 0, 1, .. of them.
        """
        taken = int(fair_lengths(paths[:, :longest], seconds, self.settings.min_gain).sum())
        rate = float(_fair_rate(len(paths), float(gains[:taken].sum()), float(seconds[taken])))
        return rate, float(gains[taken - 1]) if taken else math.inf, longest


def _fair_rate(count: int, log_tokens: Float64Array | float, seconds: Float64Array | float) -> Float64Array:
    """Tokens per second of `count` requests that all had their geometric mean. log_tokens: sum of log tokens."""
    return np.asarray(np.exp(log_tokens / count) * count / seconds)


def _slope_s(token: LatencyModel) -> float:
    """Seconds that drafting one more token of a level takes."""
    line = token.seconds(np.array([0.0, 1.0]))
    return float(line[1] - line[0])


def _with_alternatives(
    lines: RoundPlan, found: Alternatives, size: float, token: LatencyModel, costs: EngineCosts
) -> RoundPlan:
    """The round of `lines`, a step of `size` tokens, with alternatives; every path reads its context once more."""
    count = len(lines.tokens)
    more = float(found.num_tokens.sum())
    seconds = costs.step.by_tokens.seconds(np.array([size, size + more]))
    tokens = lines.tokens + found.gained
    return replace(
        lines,
        base_s=lines.base_s
        + float(seconds[1] - seconds[0])
        + _slope_s(token) * float(found.num_drafted.sum()),
        context_s=lines.context_s * (1.0 + float(found.num_paths.sum()) / count),
        tokens=tokens,
        sum_tokens=float(tokens.sum()),
        drafted_tokens=lines.drafted_tokens + more,
    )

"""The simulated draft budget: against exhaustive search, and alternatives where they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.config import BudgetSettings
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency, StepLatency
from paceline.sim.acceptance_model import AcceptanceProcess
from paceline.sim.budgeted import Budgeted
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.speculation import Batch, Plain, RoundPlan

KNEE = PiecewiseLatency(np.array([0.0, 64.0, 1000.0]), np.array([0.01, 0.011, 0.1]))
COSTS = EngineCosts(1, StepLatency(KNEE, 1e-8), 1e-5, 10**6)
PROCESS = AcceptanceProcess(0.6)
SMALL = Drafter("small", AffineLatency(0.001, 1e-5), PROCESS)
BRANCHING = replace(SMALL, tree_level=0.75)


def batch(*rates: list[float], context: float = 1000.0) -> Batch:
    return Batch(np.array(rates), context)


def rate(plan: RoundPlan, context: float = 1000.0) -> float:
    return plan.sum_tokens / (plan.base_s + plan.context_s * context)


def fair_rate(plan: RoundPlan, context: float = 1000.0) -> float:
    """Geometric mean of the requests' rates."""
    return float(np.exp(np.log(plan.tokens).mean())) / (plan.base_s + plan.context_s * context)


def exhaustive(rates: list[float], costs: EngineCosts, most: int) -> float:
    """The best geometric mean over all windows, drafts being free."""
    best = 0.0
    for at in np.ndindex(*(most + 1 for _ in rates)):
        tokens = [sum(p**k for k in range(w + 1)) for p, w in zip(rates, at, strict=True)]
        seconds = float(costs.step.seconds(len(rates) + sum(at), 1000.0))
        best = max(best, float(np.exp(np.log(tokens).mean())) / seconds)
    return best


def test_budget_finds_the_best_windows() -> None:
    costs = EngineCosts(1, StepLatency(AffineLatency(0.01, 0.004), 1e-8), 1e-5, 10**6)
    rates = [0.3, 0.6, 0.9]
    settings = BudgetSettings(max_draft_tokens=5, min_gain=0.0)
    plan = Budgeted((0,), None, 0, settings).plan(batch(rates), costs)
    assert fair_rate(plan) == pytest.approx(exhaustive(rates, costs, 5))


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12])
def test_a_lone_response_gets_its_whole_draft(depth: int) -> None:
    """The cut is the gain of the last token: it must not be lost to rounding."""
    flat = EngineCosts(1, StepLatency(AffineLatency(1.0, 1e-9), 0.0), 0.0, 10**6)
    for p in np.linspace(0.3, 0.98, 69):
        plan = Budgeted((0,), None, 0, BudgetSettings(max_draft_tokens=depth, min_gain=0.0)).plan(
            batch([p]), flat
        )
        assert plan.drafted_tokens == depth


def test_budget_drafts_nothing_where_nothing_pays() -> None:
    steep = EngineCosts(1, StepLatency(AffineLatency(0.0, 0.01), 0.0), 0.0, 10**6)
    plan = Budgeted((0,), None, 0, BudgetSettings()).plan(batch([0.9] * 4), steep)
    assert plan.drafted_tokens == 0.0


def test_budget_asks_the_model_where_it_is_worth_its_time() -> None:
    dear = Drafter("dear", AffineLatency(1.0, 0.0), PROCESS)
    rows = ([0.5] * 2, [0.9] * 2)
    with_model = Budgeted((0,), SMALL, 1, BudgetSettings()).plan(batch(*rows), COSTS)
    without = Budgeted((0,), dear, 1, BudgetSettings()).plan(batch(*rows), COSTS)
    assert with_model.tokens.min() > without.tokens.max() > 1.0


def test_budget_never_loses_to_plain_decoding() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 3, 17, 120, 700):
        rates = rng.uniform(0.02, 0.98, size).tolist()
        plan = Budgeted((0,), SMALL, 0, BudgetSettings()).plan(batch(rates), COSTS)
        assert rate(plan) >= rate(Plain().plan(batch(rates), COSTS)) * (1 - 1e-9)


@pytest.mark.parametrize(("free", "model"), [((), SMALL), ((0,), None), ((), None)])
def test_budget_works_with_whatever_drafters_there_are(free: tuple[int, ...], model: Drafter | None) -> None:
    plan = Budgeted(free, model, 0, BudgetSettings()).plan(batch([0.8] * 2), COSTS)
    assert (plan.drafted_tokens > 0.0) == bool(free or model)


def test_alternatives_raise_the_rate_of_small_batches() -> None:
    for rates in ([0.6], [0.3, 0.7, 0.9]):
        lines = Budgeted((), SMALL, 0, BudgetSettings()).plan(batch(rates), COSTS)
        trees = Budgeted((), BRANCHING, 0, BudgetSettings()).plan(batch(rates), COSTS)
        assert rate(trees) > 1.01 * rate(lines)
        assert trees.drafted_tokens > lines.drafted_tokens
        assert trees.bonus_tokens == len(rates)


def test_alternatives_cost_their_tokens_and_their_reading() -> None:
    """A lone response's: tokens, drafting and context are those of the paths that `choose_alternatives` names."""
    lines = Budgeted((), SMALL, 0, BudgetSettings()).plan(batch([0.6]), COSTS)
    trees = Budgeted((), BRANCHING, 0, BudgetSettings()).plan(batch([0.6]), COSTS)
    assert trees.base_s > lines.base_s
    num_paths = trees.context_s / lines.context_s - 1.0
    assert num_paths == pytest.approx(round(num_paths))
    assert trees.drafted_tokens - lines.drafted_tokens >= 2 * num_paths


def test_alternatives_are_none_where_every_token_costs() -> None:
    steep = EngineCosts(1, StepLatency(AffineLatency(0.001, 0.002), 1e-8), 1e-5, 10**6)
    lines = Budgeted((), SMALL, 0, BudgetSettings()).plan(batch([0.8] * 64), steep)
    trees = Budgeted((), BRANCHING, 0, BudgetSettings()).plan(batch([0.8] * 64), steep)
    assert trees.drafted_tokens == lines.drafted_tokens


def test_alternatives_never_lose() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 5, 17, 80):
        rates = rng.uniform(0.1, 0.95, size).tolist()
        free = rng.uniform(0.1, 0.7, size).tolist()
        lines = Budgeted((1,), SMALL, 0, BudgetSettings()).plan(batch(rates, free), COSTS)
        trees = Budgeted((1,), BRANCHING, 0, BudgetSettings()).plan(batch(rates, free), COSTS)
        assert rate(trees) >= rate(lines) * (1 - 1e-9)

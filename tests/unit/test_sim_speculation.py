"""Simulated speculation: each way to speculate against what it is made of."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency, StepLatency
from paceline.planning.window import coupled_tokens, decoupled_tokens
from paceline.sim.acceptance import AcceptanceProcess
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.speculation import (
    Bandit,
    Batch,
    Budgeted,
    Decoupled,
    DraftRange,
    FixedWindow,
    Plain,
    RoundPlan,
    levels_s,
)

KNEE = PiecewiseLatency(np.array([0.0, 64.0, 1000.0]), np.array([0.01, 0.011, 0.1]))
COSTS = EngineCosts(1, StepLatency(KNEE, 1e-8), 1e-5, 10**6)
PROCESS = AcceptanceProcess(0.6)
SMALL = Drafter("small", AffineLatency(0.001, 1e-5), PROCESS)
TREE = Drafter("tree", AffineLatency(0.0, 1e-6), PROCESS, "free")


def batch(*rates: list[float], context: float = 1000.0) -> Batch:
    return Batch(np.array(rates), context)


def rate(plan: RoundPlan, context: float = 1000.0) -> float:
    return plan.sum_tokens / (plan.base_s + plan.context_s * context)


def test_plain_yields_a_token_each() -> None:
    plan = Plain().plan(batch([0.5] * 8), COSTS)
    assert plan.tokens.tolist() == [1.0] * 8
    assert plan.base_s == pytest.approx(float(KNEE.seconds(8)))
    assert plan.drafted_tokens == 0.0


def test_levels_are_paid_by_those_who_reach_them() -> None:
    token = AffineLatency(1.0, 0.1)
    assert levels_s(np.array([3, 1, 0]), token) == pytest.approx((1.0 + 0.2) + (1.0 + 0.1) * 2)
    assert levels_s(np.array([0, 0]), token) == 0.0


def test_fixed_window_is_the_closed_form() -> None:
    plan = FixedWindow(SMALL, 0, 3).plan(batch([0.5, 0.8]), COSTS)
    assert plan.tokens == pytest.approx(coupled_tokens(np.array([0.5, 0.8]), 3))
    assert plan.base_s == pytest.approx(3 * (0.001 + 2e-5) + float(KNEE.seconds(8)))
    assert plan.drafted_tokens == 6.0


def test_decoupled_drafts_while_it_verifies() -> None:
    rates = np.array([0.5, 0.8, 0.9])
    plan = Decoupled(SMALL, 0, 4).plan(batch(rates.tolist()), COSTS)
    verify_s = float(KNEE.seconds(15))
    assert plan.base_s == pytest.approx(verify_s)
    assert plan.tokens == pytest.approx(decoupled_tokens(rates, 4))


def test_decoupled_waits_for_a_slow_drafter() -> None:
    slow = Drafter("slow", AffineLatency(0.1, 0.0), PROCESS)
    plan = Decoupled(slow, 0, 4).plan(batch([0.5, 0.8]), COSTS)
    assert plan.base_s == pytest.approx(0.4)
    assert plan.context_s == 0.0


def test_synchronous_drafter_overlaps_nothing() -> None:
    one = Decoupled(SMALL, 0, 4, synchronous=True).plan(batch([0.5, 0.8]), COSTS)
    other = FixedWindow(SMALL, 0, 4).plan(batch([0.5, 0.8]), COSTS)
    assert (one.base_s, one.sum_tokens) == (other.base_s, other.sum_tokens)


def test_reconfiguration_helps_those_who_draft_badly() -> None:
    rates = [0.1, 0.2, 0.9, 0.95]
    fixed = Decoupled(SMALL, 0, 8).plan(batch(rates), COSTS)
    found = Decoupled(SMALL, 0, 8, max_window=12).plan(batch(rates), COSTS)
    assert found.drafted_tokens < fixed.drafted_tokens
    assert rate(found) >= rate(fixed)


def test_draft_range_shares_the_room() -> None:
    settings = BudgetSettings(
        policy="thresholds",
        threshold_request_tokens=8,
        threshold_batch_tokens=32,
        threshold_min_probability=0.01,
    )
    made = DraftRange(TREE, 0, settings)
    assert made.plan(batch([0.9] * 2), COSTS).drafted_tokens == 16.0
    assert made.plan(batch([0.9] * 8), COSTS).drafted_tokens == 32.0
    assert made.plan(batch([0.9] * 33), COSTS).drafted_tokens == 0.0
    assert made.plan(batch([0.05] * 2), COSTS).drafted_tokens == 2.0  # 0.05^2 is below the least probability


def test_bandit_settles_on_the_best_strategy() -> None:
    strategies = (bandit.Strategy(2, 2), bandit.Strategy(8, 2), bandit.Strategy(1, 2))
    made = Bandit(SMALL, 0, 16, bandit.initialize(strategies, (1,), 0.0, 8, 0))
    rewards = [rate(made.plan(batch([0.8] * 4), COSTS)) for _ in range(12)]
    assert rewards[-1] == max(rewards)
    assert made.plan(batch([0.8] * 17), COSTS).drafted_tokens == 0.0


def exhaustive(rates: list[float], costs: EngineCosts, most: int) -> float:
    """The best rate over all windows, drafts being free."""
    best = 0.0
    for at in np.ndindex(*(most + 1 for _ in rates)):
        tokens = sum(sum(p**k for k in range(w + 1)) for p, w in zip(rates, at, strict=True))
        seconds = float(costs.step.seconds(len(rates) + sum(at), 1000.0))
        best = max(best, tokens / seconds)
    return best


def test_budget_finds_the_best_windows() -> None:
    costs = EngineCosts(1, StepLatency(AffineLatency(0.01, 0.004), 1e-8), 1e-5, 10**6)
    rates = [0.3, 0.6, 0.9]
    settings = BudgetSettings(max_draft_tokens=5, min_gain=0.0)
    plan = Budgeted((0,), None, 0, settings).plan(batch(rates), costs)
    assert rate(plan) == pytest.approx(exhaustive(rates, costs, 5))


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12])
def test_a_lone_response_gets_its_whole_draft(depth: int) -> None:
    """The cut is the path probability of the last token: it must not be lost to rounding."""
    flat = EngineCosts(1, StepLatency(AffineLatency(1.0, 1e-9), 0.0), 0.0, 10**6)
    for p in np.linspace(0.3, 0.98, 69):
        plan = Budgeted((0,), None, 0, BudgetSettings(max_draft_tokens=depth, min_gain=0.0)).plan(
            batch([p]), flat
        )
        assert plan.drafted_tokens == depth


def test_racers_draft_what_suits_each() -> None:
    plan = Decoupled(SMALL, 0, 8, 12, chooses_all=True).plan(batch([0.3, 0.97]), COSTS)
    fixed = Decoupled(SMALL, 0, 8).plan(batch([0.3, 0.97]), COSTS)
    assert rate(plan) > rate(fixed)


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

"""Simulated speculation: each way to speculate against what it is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.budget import BudgetSnapshot, BudgetState, decide
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency, StepLatency
from paceline.planning.window import coupled_tokens, decoupled_tokens
from paceline.sim.acceptance_model import AcceptanceProcess
from paceline.sim.alternatives import tree_tokens
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.speculation import (
    Bandit,
    Batch,
    Decoupled,
    DraftRange,
    FixedWindow,
    Plain,
    RoundPlan,
    levels_s,
)
from paceline.types import Float32Array

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
    strategies = (bandit.Strategy(2, 1, 2), bandit.Strategy(8, 1, 2), bandit.Strategy(1, 1, 2))
    made = Bandit(SMALL, 0, 16, bandit.initialize(strategies, (1,), 0.0, 8, 0))
    rewards = [rate(made.plan(batch([0.8] * 4), COSTS)) for _ in range(12)]
    assert rewards[-1] == max(rewards)
    assert made.plan(batch([0.8] * 17), COSTS).drafted_tokens == 0.0


def test_racers_draft_what_suits_each() -> None:
    plan = Decoupled(SMALL, 0, 8, 12, chooses_all=True).plan(batch([0.3, 0.97]), COSTS)
    fixed = Decoupled(SMALL, 0, 8).plan(batch([0.3, 0.97]), COSTS)
    assert rate(plan) > rate(fixed)


def test_ahead_with_free_drafts_takes_the_better() -> None:
    rows = ([0.6, 0.9], [0.95, 0.1])
    alone = Decoupled(SMALL, 0, 4).plan(batch(*rows), COSTS)
    both = Decoupled(SMALL, 0, 4, free=(1,)).plan(batch(*rows), COSTS)
    assert both.tokens[0] == pytest.approx(float(coupled_tokens(0.95, 4)))
    assert both.tokens[1] == alone.tokens[1]
    assert both.base_s == alone.base_s


THRESHOLDS = st.builds(
    BudgetSettings,
    policy=st.just("thresholds"),
    max_draft_tokens=st.integers(1, 16),
    threshold_request_tokens=st.integers(0, 16),
    threshold_batch_tokens=st.integers(0, 64),
    threshold_min_probability=st.floats(0.01, 0.9),
)
RATES = st.lists(st.floats(0.02, 0.98), min_size=1, max_size=24)


def paths(rates: list[float], width: int) -> Float32Array:
    return (np.array(rates)[:, None] ** np.arange(1, width + 1)).astype(np.float32)


@given(RATES, THRESHOLDS)
def test_draft_range_is_the_budgets_decision(rates: list[float], budget: BudgetSettings) -> None:
    plan = DraftRange(TREE, 0, budget).plan(batch(rates), COSTS)
    path = paths(rates, budget.max_draft_tokens)
    snapshot = BudgetSnapshot(len(rates), 0, path, path.size)
    lengths = decide(snapshot, BudgetState.initial(budget), budget)
    assert plan.drafted_tokens == lengths.sum()
    assert plan.tokens == pytest.approx(coupled_tokens(np.array(rates), lengths))


@given(RATES, st.integers(1, 12), st.integers(0, 12))
def test_bandit_is_the_budgets_decision(rates: list[float], depth: int, verified: int) -> None:
    strategy = bandit.Strategy(depth, 1, verified)
    start = bandit.initialize((strategy,), (1,), 0.0, 8, 0)
    plan = Bandit(TREE, 0, 24, start).plan(batch(rates), COSTS)
    budget = BudgetSettings(
        policy="bandit",
        max_draft_tokens=depth,
        bandit_strategies=((depth, 1, verified),),
        bandit_batch_sizes=(1,),
    )
    path = paths(rates, depth)
    state = replace(BudgetState.initial(budget), bandit=start)
    lengths = decide(BudgetSnapshot(len(rates), 0, path, path.size), state, budget)
    assert plan.tokens == pytest.approx(coupled_tokens(np.array(rates), lengths))
    assert plan.drafted_tokens == lengths.sum()


def test_a_bandit_with_second_choices_verifies_trees() -> None:
    branching = replace(SMALL, tree_level=0.8)
    start = bandit.initialize((bandit.Strategy(6, 1, 24),), (1,), 0.0, 8, 0)
    rates = [0.5, 0.8]
    plan = Bandit(branching, 0, 16, start).plan(batch(rates), COSTS)
    assert plan.tokens == pytest.approx(tree_tokens(np.array(rates), 0.5, 24, 6))
    assert plan.drafted_tokens == 48.0
    assert plan.base_s == pytest.approx(6 * (0.001 + 2e-5) + float(KNEE.seconds(50)))

"""The alarm finds weights that are of no use, and leaves those alone that are of some."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning import zero_acceptance
from paceline.planning.zero_acceptance import CORRELATION, FALSE_ALARM, HEALTHY, Trial, observe


def verdict_after(tried: np.ndarray, right: np.ndarray) -> tuple[str | None, int]:
    """The verdict, and the steps that it took."""
    trial = Trial()
    for step, (a, b) in enumerate(zip(tried.tolist(), right.tolist(), strict=True), start=1):
        trial = observe(trial, a, b)
        if trial.verdict is not None:
            return trial.verdict, step
    return None, len(tried)


@settings(max_examples=200, deadline=None)
@given(
    acceptance=st.floats(0.0, 0.05),
    batch=st.integers(1, 256),
    seed=st.integers(0, 1 << 30),
)
def test_useless_weights_are_found(acceptance: float, batch: int, seed: int) -> None:
    """Random, stale and lost weights are right by chance alone: once in a vocabulary, or in what is left of entropy."""
    random = np.random.default_rng(seed)
    tried = np.full(3000, batch)
    verdict, steps = verdict_after(tried, random.binomial(tried, acceptance))
    assert verdict == "dead"
    assert steps <= 400 if batch == 1 else steps <= 200


def test_they_are_found_soon() -> None:
    verdict, steps = verdict_after(np.full(100, 64), np.full(100, 2))
    assert (verdict, steps) == ("dead", 10)


@settings(max_examples=100, deadline=None)
@given(acceptance=st.floats(HEALTHY, 1.0), batch=st.integers(1, 64), seed=st.integers(0, 1 << 30))
def test_healthy_drafters_are_left_alone(acceptance: float, batch: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tried = np.full(500, batch)
    assert verdict_after(tried, random.binomial(tried, acceptance))[0] == "alive"


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16, 256])
@pytest.mark.parametrize("correlation", [0.0, 0.05, 0.1, 0.2, CORRELATION])
def test_false_alarms_have_a_bound(batch: int, correlation: float) -> None:
    """One step's likelihood ratio has a mean of at most 1 at the healthy acceptance, so it is a supermartingale."""
    mean = 0.0
    for right in range(batch + 1):
        ratio = math.exp(observe(Trial(), batch, right).evidence)
        mean += ratio * probability(right, batch, correlation)
    assert mean <= 1 + 1e-9


def probability(right: int, batch: int, correlation: float) -> float:
    """Beta-binomial, of mean HEALTHY."""
    if correlation == 0.0:
        return math.comb(batch, right) * HEALTHY**right * (1 - HEALTHY) ** (batch - right)
    spread = 1 / correlation - 1
    a, b = HEALTHY * spread, (1 - HEALTHY) * spread
    return math.exp(
        math.lgamma(batch + 1)
        - math.lgamma(right + 1)
        - math.lgamma(batch - right + 1)
        + math.lgamma(right + a)
        + math.lgamma(batch - right + b)
        - math.lgamma(batch + a + b)
        + math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
    )


def test_false_alarms_are_rare_in_fact() -> None:
    """At a true acceptance of 0.3 over 400 steps each: one in 10^4 at most; the exact bound is tested above."""
    random, num_runs, alarms = np.random.default_rng(7), 100_000, 0
    evidence, is_open = np.zeros(num_runs), np.ones(num_runs, bool)
    bound = -math.log(FALSE_ALARM)
    for _ in range(400):
        right = random.binomial(1, HEALTHY, int(is_open.sum()))
        evidence[is_open] += np.where(right, zero_acceptance._RIGHT, zero_acceptance._WRONG)
        alarms += int((evidence[is_open] >= bound).sum())
        is_open &= np.abs(evidence) < bound
    assert not is_open.any()
    assert alarms <= num_runs * FALSE_ALARM


def test_a_verdict_stands() -> None:
    dead = Trial(10.0)
    assert observe(dead, 100, 100) is dead
    assert observe(Trial(), 0, 0) == Trial()

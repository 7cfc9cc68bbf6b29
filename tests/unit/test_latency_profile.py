"""Latency models: exact on their own kind of curve, best among non-negative ones, honest about the misfit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.planning.latency_profile import (
    AffineLatency,
    LatencyFit,
    LatencyModel,
    PiecewiseLatency,
    StepLatency,
    fit_affine,
    fit_step,
    verify_s,
)

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def knee_s(tokens: float) -> float:
    return 0.020 + 0.0001 * max(0.0, tokens - 128)


def fit_curve(seconds: list[float], num_segments: int | None) -> LatencyFit[StepLatency]:
    """Through times of TOKENS without context."""
    return fit_step(TOKENS, np.zeros(len(TOKENS)), seconds, num_segments)


def misfit(model: LatencyModel, seconds: list[float]) -> float:
    return float(((model.seconds(TOKENS) / seconds - 1.0) ** 2).sum())


def test_a_line_is_found_exactly() -> None:
    fit = fit_affine([1, 2, 4], [3.0, 5.0, 9.0])
    assert (fit.model.base_s, fit.model.per_token_s) == (pytest.approx(1.0), pytest.approx(2.0))
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.largest_relative_error == pytest.approx(0.0, abs=1e-12)
    assert fit.model.seconds([0, 10]).tolist() == pytest.approx([1.0, 21.0])


def test_falling_times_give_a_level_line() -> None:
    fit = fit_affine([1, 2], [4.0, 2.0])
    assert (fit.model.base_s, fit.model.per_token_s) == (pytest.approx(3.0), 0.0)
    assert fit.r_squared == pytest.approx(0.0)
    assert fit.largest_relative_error == pytest.approx(0.5)


def test_no_pass_takes_negative_time() -> None:
    fit = fit_affine([10, 20, 30], [0.1, 1.1, 2.1])
    assert fit.model.base_s == 0.0
    assert fit.model.per_token_s == pytest.approx((1 + 22 + 63) / 1400)


def test_equal_times_are_explained() -> None:
    assert fit_affine([1, 2, 3], [0.5, 0.5, 0.5]).r_squared == 1.0


def test_a_knee_needs_segments_and_the_quality_says_so() -> None:
    seconds = [knee_s(n) for n in TOKENS]
    line, curve = fit_affine(TOKENS, seconds), fit_curve(seconds, 9)
    assert line.largest_relative_error > 0.1
    assert curve.largest_relative_error < 1e-6
    assert line.r_squared < 0.99 < curve.r_squared
    assert float(curve.model.by_tokens.seconds(1024)) == pytest.approx(knee_s(1024))


def test_between_and_beyond_knots_the_curve_is_straight() -> None:
    model = PiecewiseLatency(np.array([0.0, 10.0, 20.0]), np.array([1.0, 1.0, 2.0]))
    assert model.seconds([0, 5, 15, 20, 40]).tolist() == pytest.approx([1.0, 1.0, 1.5, 2.0, 4.0])


@given(st.lists(st.floats(0.001, 10.0), min_size=10, max_size=10), st.integers(1, 9))
def test_times_are_positive_and_never_fall(seconds: list[float], num_segments: int) -> None:
    model = fit_curve(seconds, num_segments).model.by_tokens
    asked = model.seconds(np.arange(1, 1000))
    assert (asked >= 0).all()
    assert (np.diff(asked) >= -1e-12).all()


@given(
    st.lists(st.floats(0.001, 10.0), min_size=10, max_size=10),
    st.integers(0, 9),
    st.floats(-0.5, 0.5),
)
def test_no_other_rising_curve_is_nearer(seconds: list[float], knot: int, change: float) -> None:
    model = fit_curve(seconds, 9).model.by_tokens
    assert isinstance(model, PiecewiseLatency)
    other = model.knot_s.copy()
    other[knot] += change
    other = np.maximum.accumulate(np.maximum(other, 0.0))
    moved = PiecewiseLatency(model.knot_tokens, other)
    assert misfit(model, seconds) <= misfit(moved, seconds) * (1 + 1e-9) + 1e-9


@given(st.lists(st.floats(0.001, 10.0), min_size=10, max_size=10))
def test_more_segments_on_the_same_knots_fit_no_worse(seconds: list[float]) -> None:
    line, curve = fit_curve(seconds, None).model.by_tokens, fit_curve(seconds, 9).model.by_tokens
    assert misfit(curve, seconds) <= misfit(line, seconds) * (1 + 1e-9) + 1e-9


def test_a_noisy_profile_is_recovered() -> None:
    noise = np.random.default_rng(5).normal(1.0, 0.02, size=(8, len(TOKENS)))
    seconds = (AffineLatency(0.014, 0.00097).seconds(TOKENS) * noise).ravel()
    fit = fit_affine(np.tile(TOKENS, 8), seconds)
    assert fit.model.per_token_s == pytest.approx(0.00097, rel=0.02)
    assert fit.r_squared > 0.99


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ([], [], "0 distinct token counts"),
        ([7, 7], [1.0, 3.0], "1 distinct token counts"),
        ([1, 2], [1.0], "equally many"),
        ([1, 2], [1.0, 0.0], "positive, finite"),
        ([0, 2], [1.0, 1.0], "positive, finite"),
        ([1, 2], [1.0, float("nan")], "positive, finite"),
    ],
)
def test_unusable_profiles_are_refused(tokens: list[int], seconds: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_affine(tokens, seconds)


def test_a_curve_without_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 segments"):
        fit_curve([1.0] * len(TOKENS), 0)


def test_context_and_tokens_are_told_apart() -> None:
    shapes = [(b, q, c) for b in (1, 4, 16, 64) for q in (1, 2, 4, 8) for c in (128, 512, 2048)]
    tokens = np.array([b * q for b, q, _ in shapes], dtype=float)
    context = np.array([b * c for b, _, c in shapes], dtype=float)
    seconds = np.array([knee_s(n) for n in tokens]) + 3e-7 * context
    fit = fit_step(tokens, context, seconds)
    assert fit.model.context_s == pytest.approx(3e-7, rel=0.1)
    assert fit.largest_relative_error < 0.1
    moved = fit.model.seconds(16, 10_000) - fit.model.seconds(16, 0)
    assert float(moved) == pytest.approx(1e4 * fit.model.context_s)


def test_a_verification_reads_the_context_of_every_request() -> None:
    model = StepLatency(AffineLatency(0.01, 0.001), 1e-6)
    assert float(verify_s(model.for_requests_of(500), 4, 2)) == pytest.approx(0.01 + 0.012 + 4 * 500e-6)
    assert float(verify_s(AffineLatency(0.01, 0.001), 4, 2)) == pytest.approx(0.022)


def test_a_line_may_be_asked_for() -> None:
    tokens, context = np.array([1.0, 2.0, 4.0, 8.0]), np.array([10.0, 5.0, 20.0, 1.0])
    fit = fit_step(tokens, context, 0.01 + 0.001 * tokens + 1e-4 * context, num_segments=None)
    assert fit.model == StepLatency(
        AffineLatency(pytest.approx(0.01), pytest.approx(0.001)), pytest.approx(1e-4)
    )


def test_without_context_a_step_is_a_curve_of_tokens() -> None:
    tokens = np.array([1.0, 2.0, 4.0, 8.0])
    fit = fit_step(tokens, np.zeros(4), 0.01 + 0.001 * tokens)
    assert fit.model.context_s == 0.0
    assert fit.largest_relative_error < 1e-6


def test_contexts_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many contexts as tokens"):
        fit_step([1.0, 2.0], [1.0], [0.1, 0.2])

"""The step-time model: fit, robustness, monotonicity, extrapolation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.errors import EngineError
from paceline.planning import latency
from paceline.planning.latency import (
    KNOTS,
    STALE_STEPS,
    TRUSTED_STEPS,
    UNKNOWN_SLOPE,
    StepTimeModel,
    after_model,
    at_context,
    largest_known_tokens,
    nearest_knot,
    observations_between,
    predict_s,
    update_measured_time,
    update_step_time,
)
from paceline.types import StepObservation


def learned(steps: list[tuple[int, float]], model: StepTimeModel | None = None) -> StepTimeModel:
    model = StepTimeModel.initial() if model is None else model
    for tokens, seconds in steps:
        model = update_measured_time(model, tokens, seconds)
    return model


def affine_s(tokens: int) -> float:
    return 0.014 + 0.00097 * tokens


def test_initial_guess_is_positive_and_rising() -> None:
    seconds = predict_s(StepTimeModel.initial(), [1, 2, 100, 10_000])
    assert (seconds > 0).all()
    assert (np.diff(seconds) > 0).all()


def test_first_observation_replaces_the_guess() -> None:
    model = learned([(64, 0.080)])
    assert float(predict_s(model, 64)) == pytest.approx(0.080)
    rise = float(predict_s(model, 65)) - 0.080
    assert rise == pytest.approx(UNKNOWN_SLOPE * 0.080 / 64)


def test_observed_times_are_met_and_gaps_interpolated() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 400, size=3000)
    model = learned([(int(n), affine_s(int(n)) * rng.lognormal(0.0, 0.05)) for n in tokens])
    asked = np.arange(1, 400)
    error = predict_s(model, asked) / np.array([affine_s(int(n)) for n in asked]) - 1.0
    assert np.abs(error).max() < 0.08
    assert np.abs(error).mean() < 0.025


def test_unvisited_ends_follow_the_neighbouring_slope() -> None:
    model = learned([(n, affine_s(n)) for n in (32, 48, 64, 96, 128) for _ in range(8)])
    assert float(predict_s(model, 512)) == pytest.approx(affine_s(512), rel=0.03)
    assert float(predict_s(model, 8)) == pytest.approx(affine_s(8), rel=0.05)


def test_time_never_falls_with_more_tokens() -> None:
    rng = np.random.default_rng(4)
    model = learned([(int(rng.integers(1, 2000)), float(rng.lognormal(-4, 1.0))) for _ in range(500)])
    seconds = predict_s(model, np.arange(0, 5000))
    assert (np.diff(seconds) >= -1e-15).all()
    assert seconds[1] > 0


def test_a_pause_of_the_machine_does_not_count() -> None:
    steady = [(16, 0.030)] * 8 + [(32, 0.045)] * 8
    model = learned([*steady, (16, 3.0), (32, 5.0), (16, 2.0)])
    assert float(predict_s(model, 16)) == pytest.approx(0.030, rel=1e-6)
    assert float(predict_s(model, 32)) == pytest.approx(0.045, rel=1e-6)


def test_a_slow_first_step_is_forgotten_at_the_second() -> None:
    assert float(predict_s(learned([(8, 2.0), (8, 0.020)]), 8)) == pytest.approx(0.020)


def test_the_model_follows_a_growing_context() -> None:
    model = learned([(4, 0.015 + i * 1e-5) for i in range(1000)])
    assert float(predict_s(model, 4)) == pytest.approx(0.025, rel=0.02)


def test_a_stale_knot_is_outvoted_at_once() -> None:
    model = learned([(64, 0.200)] * 16 + [(4, 0.020)] * (STALE_STEPS + 1) + [(64, 0.100)])
    assert float(predict_s(model, 64)) == pytest.approx(0.100)


@pytest.mark.parametrize(("stale_s", "found_s"), [(0.500, affine_s(64)), (0.060, 0.068)])
def test_a_stale_knot_that_is_dearer_than_its_neighbours_say_is_forgotten(
    stale_s: float, found_s: float
) -> None:
    """It was measured while the machine was busy, and nobody would measure it again. A cheap one counts, if little."""
    before = [(n, seconds) for n, seconds in ((32, affine_s(32)), (64, stale_s)) for _ in range(16)]
    since = [(n, affine_s(n)) for _ in range(TRUSTED_STEPS // 2 + 1) for n in (32, 128)]
    assert float(predict_s(learned(before + since), 64)) == pytest.approx(found_s, rel=0.02)


def test_a_knee_between_distant_knots_is_kept_open() -> None:
    def memory_bound(tokens: int) -> float:
        return 0.020 + 0.00008 * max(0, tokens - 256)

    visits = [(n, memory_bound(n)) for n in (64, 128, 384, 512) for _ in range(16)]
    assert float(predict_s(learned(visits), 256)) == pytest.approx(0.020, rel=0.025)


def test_observations_within_a_knot_stand_at_their_mean() -> None:
    model = learned([(n, affine_s(n)) for n in (14, 18, 32)] * 8)
    assert float(predict_s(model, 16)) == pytest.approx(affine_s(16), rel=0.02)


def test_prefill_tokens_count_as_tokens_of_the_step() -> None:
    step = StepObservation(2, 3, 1, 100, 0.5)
    assert largest_known_tokens(update_step_time(StepTimeModel.initial(), step)) == 105


def test_observations_between_counts_and_ages() -> None:
    model = learned([(8, 0.02), (8, 0.02), (64, 0.08)])
    assert observations_between(model, 4, 12) == (2, 1)
    assert observations_between(model, 32, 96) == (1, 0)
    assert observations_between(model, 200, 300) == (0, 3)


def test_update_leaves_the_old_model_alone() -> None:
    old, same = learned([(8, 0.02)]), learned([(8, 0.02)])
    assert update_measured_time(old, 8, 0.04) != old
    assert old == same


def test_nearest_knot_is_nearest_by_ratio() -> None:
    for tokens in range(1, 3000):
        ratios = [max(tokens / knot, knot / tokens) for knot in KNOTS]
        assert ratios[nearest_knot(tokens)] == pytest.approx(min(ratios))


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 0.01), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))]
)
def test_unusable_observations_are_refused(tokens: int, seconds: float) -> None:
    with pytest.raises(EngineError, match="cannot be learned from"):
        update_measured_time(StepTimeModel.initial(), tokens, seconds)


def test_context_is_told_apart_from_tokens() -> None:
    """A rollout: the batch and its context shrink while the steps keep their size."""
    rng = np.random.default_rng(5)
    model = StepTimeModel.initial()
    for step in range(600):
        batch = max(128 - step // 5, 1)
        context = batch * (100 + step)
        tokens = int(rng.integers(batch, 200))
        seconds = (affine_s(tokens) + 2e-6 * context) * rng.lognormal(0.0, 0.03)
        model = update_measured_time(model, tokens, seconds, context)
    assert model.context.seconds == pytest.approx(2e-6, rel=0.15)
    for context in (2_000, 20_000, 40_000):
        expected = np.array([affine_s(n) for n in (16, 64, 160)]) + 2e-6 * context
        np.testing.assert_allclose(predict_s(at_context(model, context), [16, 64, 160]), expected, rtol=0.08)


def test_a_little_more_context_says_nothing_yet() -> None:
    model = StepTimeModel.initial()
    for step in range(10):
        model = update_measured_time(model, 8, 0.020 + 0.001 * step, 4000 + step)
    assert model.context.seconds < 1e-7


def test_without_context_nothing_is_shifted() -> None:
    model = learned([(8, 0.02), (16, 0.03), (8, 0.021)])
    assert at_context(model, 100_000) is model


def test_a_pause_tells_little_about_the_context() -> None:
    model = StepTimeModel.initial()
    for step in range(200):
        pause = 5.0 if step % 40 == 39 else 0.0
        model = update_measured_time(model, 8, 0.02 + 1e-6 * 50 * step + pause, 50 * step)
    assert model.context.seconds == pytest.approx(1e-6, rel=0.5)


def test_a_batch_that_shrinks_tenfold_keeps_its_slope() -> None:
    model = StepTimeModel.initial()
    for context in (64_000, 6_400):
        for step in range(40):
            tokens = 96 + step % 32
            model = update_measured_time(
                model, tokens, affine_s(tokens) + 3e-6 * (context + 100 * step), context + 100 * step
            )
    assert model.context.seconds == pytest.approx(3e-6, rel=0.1)


def test_steps_after_a_models_drafts_are_told_apart() -> None:
    rng = np.random.default_rng(11)
    model = StepTimeModel.initial()
    for step in range(600):
        tokens, has_drafts = int(rng.integers(8, 40)), step // 8 % 4 != 3  # a rest of 8 steps after 24
        seconds = affine_s(tokens) + (0.0012 if has_drafts else 0.0)
        model = update_measured_time(model, tokens, seconds * rng.lognormal(0.0, 0.04), 0, has_drafts)
    asked = np.array([8, 16, 24, 39])
    true_s = np.array([affine_s(int(n)) for n in asked])
    assert predict_s(model, asked) == pytest.approx(true_s, rel=0.025)
    assert predict_s(after_model(model), asked) == pytest.approx(true_s + 0.0012, rel=0.025)
    assert model.drafter_s == pytest.approx(0.0012, rel=0.3)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_without_steps_of_the_other_kind_nothing_is_told_apart(has_drafts: bool) -> None:
    model = StepTimeModel.initial()
    for tokens in (8, 9, 12, 8, 16, 9) * 5:
        model = update_measured_time(model, tokens, affine_s(tokens), 0, has_drafts)
    assert model.drafter_s == 0.0
    assert after_model(model) is model


def test_a_large_step_that_was_slow_once_is_tried_again() -> None:
    small = [(n, affine_s(n)) for n in (8, 12, 16)] * (STALE_STEPS // 3 + 1)
    slow = [(256, 5 * affine_s(256))]
    assert float(predict_s(learned(slow + small[:30]), 256)) > 4 * affine_s(256)
    assert float(predict_s(learned(slow + small), 256)) == pytest.approx(affine_s(256), rel=0.1)
    assert float(predict_s(learned(slow * 4 + small), 256)) > 4 * affine_s(256), "measured often enough"


def test_a_curve_that_stays_is_the_one_that_a_fit_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 %, at every step of a rollout whose batch shrinks while its context grows and shrinks."""
    rng = np.random.default_rng(3)
    lazy = eager = StepTimeModel.initial()
    fits = 0
    fit = latency._fit_curve

    def count(*args: Any) -> Any:
        nonlocal fits
        fits += 1
        return fit(*args)

    monkeypatch.setattr(latency, "_fit_curve", count)
    for step in range(1500):
        batch = max(64 - step // 24, 1)
        tokens = batch + int(rng.integers(0, 5 * batch))
        context = batch * (200 + step)
        seconds = (8e-3 + 1e-4 * tokens + 1e-8 * context) * rng.lognormal(0.0, 0.02)
        before = fits
        lazy = latency.update_measured_time(lazy, tokens, seconds, context)
        made = fits - before
        with monkeypatch.context() as always:
            always.setattr(latency, "_is_still", lambda *_: False)
            eager = latency.update_measured_time(eager, tokens, seconds, context)
        fits = before + made
        sizes = np.arange(batch, 6 * batch + 1)
        found, expected = (predict_s(latency.at_context(model, context), sizes) for model in (lazy, eager))
        np.testing.assert_allclose(found, expected, rtol=0.01)
    assert fits < 900


def c_by_size(num_tokens: float) -> float:
    """As measured on a CPU, where several query tokens of a request take its keys and values longer than one does."""
    return 6.5e-6 if num_tokens < 16 else 15e-6 if num_tokens < 48 else 15.5e-6


@pytest.mark.parametrize(
    ("slope", "every", "most"),
    [(c_by_size, 64, 0.05), (c_by_size, 256, 0.35), (lambda _: 8e-6, 64, 0.1)],
    ids=["by size", "by size, seldom seen", "the same for all"],
)
def test_small_steps_are_known_though_larger_ones_read_their_context_longer(
    slope: Callable[[float], float], every: int, most: float
) -> None:
    """Rollouts of 8 requests, whose context grows; a step without drafts is made now and then. One c for all sizes
    would take it for 1.8 times as dear.
    """
    rng = np.random.default_rng(0)
    model, number, wrong = StepTimeModel.initial(), 0, []
    for rollout in range(4):
        for context in range(800, 20_000, 24):
            tokens = 8 if number % every == 0 else int(rng.choice([48, 56, 64]))
            seconds = (0.014 + 0.00097 * tokens + slope(tokens) * context) * rng.lognormal(0.0, 0.03)
            model, number = update_measured_time(model, tokens, seconds, context), number + 1
            if rollout:
                now = at_context(model, context)
                wrong.append(
                    [
                        float(predict_s(now, n)) / (0.014 + 0.00097 * n + slope(n) * context) - 1.0
                        for n in (8, 64)
                    ]
                )
    small, large = np.abs(wrong).mean(0)
    assert small < most
    assert large < 0.03


def test_where_a_rollout_begins_again_what_was_seen_behind_long_contexts_is_tried_anew() -> None:
    """Large steps alone are made in the end of a rollout, dearer for each token of context than was known of them:
    their time without it is an extrapolation that would keep the next rollout from making them.
    """
    slope, model = (lambda tokens: 4e-6 if tokens < 12 else 12e-6), StepTimeModel.initial()
    rng = np.random.default_rng(0)

    def true_s(tokens: int, context: int) -> float:
        return 0.014 + 0.0015 * tokens + slope(tokens) * context

    for context in range(800, 20_000, 24):
        tokens = 32 if context > 8_000 else int(rng.choice([8, 12, 16]))
        seconds = true_s(tokens, context) * rng.lognormal(0.0, 0.03)
        model = update_measured_time(model, tokens, seconds, context)
    for step in range(4):
        model = update_measured_time(model, 8, true_s(8, 800), 800 + 8 * step)
    assert float(predict_s(at_context(model, 800), 32)) < 1.05 * true_s(32, 800)

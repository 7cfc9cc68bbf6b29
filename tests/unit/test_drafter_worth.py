"""When a model drafter drafts, and how far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.planning.drafter_worth import (
    FIRST_REST,
    HIGHEST_FLOOR,
    LONGEST_REST,
    TRIAL_STEPS,
    Rest,
    Worth,
    choose_depth,
    choose_floor,
    fade,
    level_costs,
    next_rest,
    update_worth,
)
from paceline.planning.latency import StepTimeModel, update_measured_time

GOOD = ((8.0, 0.025), (1.5, 0.016))  # 8 tokens in 25 ms, drafting included, against 1.5 in 16 ms
BAD = ((1.2, 0.025), (1.1, 0.016))


def timed(base_s: float, per_token_s: float) -> StepTimeModel:
    model = StepTimeModel.initial()
    for _ in range(4):
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            model = update_measured_time(model, tokens, base_s + per_token_s * tokens)
    return model


STEADY = timed(0.01, 0.001)


def learn(worth: Worth, batch: int, steps: int, step: tuple[tuple[float, float], ...]) -> Worth:
    for _ in range(steps):
        worth = update_worth(worth, batch, *step)
    return worth


def test_the_floor_is_the_price_of_a_place_in_the_step() -> None:
    compute_bound = timed(0.0, 0.001)
    assert choose_floor(32, 0, 0.002, compute_bound, 0.05) == pytest.approx(0.5, rel=0.05)
    assert choose_floor(32, 0, 0.001, compute_bound, 0.05) == HIGHEST_FLOOR
    assert choose_floor(8, 0, 0.002, timed(0.014, 0.0), 0.05) == 0.05


def test_a_level_costs_its_time_in_tokens() -> None:
    costs = level_costs(64, 0.002, timed(0.001, 0.0001), timed(0.02, 0.001))
    assert costs.shape == (65,)
    assert costs[64] == pytest.approx((0.001 + 0.0064) / 0.002, rel=0.05)
    assert (np.diff(costs) >= 0).all()


def test_a_drafter_is_judged_by_its_rate_for_each_batch_size() -> None:
    worth = Worth()
    assert worth.is_positive(64)
    assert worth.token_s(64) is None
    worth = learn(worth, 64, TRIAL_STEPS - 1, BAD)
    assert worth.is_positive(64), "the trial is not over"
    worth = learn(worth, 64, 1, BAD)
    assert not worth.is_positive(64)
    assert not worth.is_positive(300), "untried sizes follow the nearest smaller one"
    assert worth.is_positive(8)
    worth = learn(worth, 8, TRIAL_STEPS, GOOD)
    assert worth.is_positive(16)
    assert not worth.is_positive(64)
    assert worth.token_s(8) == pytest.approx(min(seconds / tokens for tokens, seconds in GOOD))
    assert worth.token_s(64) == pytest.approx(min(seconds / tokens for tokens, seconds in BAD))
    assert worth.token_s(64) < BAD[0][1] / BAD[0][0], "not by the rate of a drafter that loses"


def test_the_gain_counts_in_full_however_fast_the_accelerated_step_already_is() -> None:
    """Prices taken from the accelerated step itself would call a seven-fold gain a draw."""
    worth = learn(Worth(), 1, 50, ((14.0, 0.027), (1.0, 0.0155)))
    assert worth.is_positive(1)


def test_rests_grow_while_the_drafter_loses_and_a_trial_ends_each() -> None:
    rest, rests, drafted = Rest(), [], 0
    for _ in range(600):
        before = rest
        rest = next_rest(rest, 8, False, STEADY)
        if rest.left and not before.left:
            rests.append(rest.left)
        drafted += rest.left == 0
    assert rests[:6] == [8, 16, 32, 64, LONGEST_REST, LONGEST_REST]
    assert drafted <= len(rests) * TRIAL_STEPS


def test_after_a_rest_the_trial_decides() -> None:
    worth = learn(Worth(), 4, 100, BAD)
    worth = learn(fade(worth, 4), 4, TRIAL_STEPS, GOOD)
    assert worth.is_positive(4)
    assert next_rest(Rest(trial_left=1, length=64), 4, worth.is_positive(4), STEADY) == Rest()


def trial(batch: int, is_positive: bool) -> tuple[list[int | None], Rest]:
    """Requests drafted for in the steps of a trial, None: all; and where it ends."""
    rest = next_rest(Rest(left=1, length=16), batch, False, STEADY)
    drafted = []
    while rest.trial_left:
        drafted.append(rest.sample or None)
        rest = next_rest(rest, batch, is_positive, STEADY)
    return drafted, rest


def test_a_trial_drafts_for_a_sample_first_and_for_more_only_while_that_pays() -> None:
    sample = [3] * TRIAL_STEPS
    drafted, rest = trial(9, False)
    assert (drafted, rest.left, rest.length, rest.last) == (sample, 16, 32, 16)
    assert trial(9, True) == ([*sample, *[6] * TRIAL_STEPS, *[None] * TRIAL_STEPS], Rest())


def test_a_trial_of_one_request_is_not_cut_short() -> None:
    drafted, rest = trial(1, False)
    assert (drafted, rest.left) == ([None] * TRIAL_STEPS, 16)


def test_a_level_for_a_sample_costs_its_share_of_one_for_all() -> None:
    level_time, step_time = timed(0.001, 0.0001), timed(0.001, 0.001)
    costs, sampled = (level_costs(64, 0.002, level_time, step_time, most) for most in (None, 16))
    assert sampled[16] == pytest.approx(costs[64] / 4)


def test_a_level_for_all_that_was_timed_on_a_busy_machine_does_not_end_a_trial() -> None:
    """After a rest only levels for a sample are timed; the target's step says how much more one for all can take."""
    level_time = timed(0.001, 0.0001)
    for _ in range(64):
        level_time = update_measured_time(level_time, 64, 0.2)
    step_time = timed(0.02, 0.001)
    sampled = level_costs(64, 0.002, level_time, step_time, 8)
    assert sampled[8] < level_costs(64, 0.002, level_time, step_time)[64] / 8 / 5


def test_a_rest_that_began_on_a_busy_machine_ends_with_that() -> None:
    rest = next_rest(Rest(length=64), 8, False, timed(0.02, 0.002))
    assert rest.left == 64
    assert next_rest(rest, 8, False, timed(0.019, 0.0019)).left == 63
    assert next_rest(rest, 8, False, STEADY).sample == 2


def test_the_next_drafts_are_as_deep_as_the_last_ones_paid() -> None:
    costs = np.array([0.0, 0.3, 0.5], np.float32)
    sure = np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.2, 0.1, 0.05]], np.float32)
    assert choose_depth(sure, 0.05, costs, 16) == 8, "every level paid"
    assert choose_depth(sure, 0.05, costs, 6) == 6
    assert choose_depth(sure, 0.35, costs, 16) == 5, "after the fourth level 0.25 of a token was left"
    assert choose_depth(sure, 0.95, costs, 16) == 2
    assert choose_depth(sure[:, :1], 0.05, 4 * costs, 16) == 2, "one level always, and one on trial"
    assert choose_depth(sure[:0], 0.05, costs, 16) == 2


def test_a_drafter_that_may_be_dead_is_heard_again_soon_and_its_rests_grow_when_it_is_not() -> None:
    rest = Rest(length=64)
    for _ in range(3):
        rest = next_rest(replace(rest, left=0, trial_left=0), 8, False, STEADY, is_alive=False)
        assert (rest.left, rest.last, rest.length) == (FIRST_REST, FIRST_REST, 64)
    rest = next_rest(replace(rest, left=0, trial_left=0), 8, False, STEADY)
    assert (rest.left, rest.last, rest.length) == (64, 64, 128)

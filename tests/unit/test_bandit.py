"""TLT's algorithm 1, line by line."""

import math

import pytest

from paceline.errors import ConfigError
from paceline.planning.bandit import BanditState, Strategy, initialize, record, select_strategy

LONG, MIDDLE, SHORT, OFF = Strategy(12, 8), Strategy(8, 8), Strategy(4, 4), Strategy(0, 0)


def bandit(epsilon: float = 0.0, window: int = 4, seed: int = 0) -> BanditState:
    return initialize((SHORT, LONG, OFF, MIDDLE), (1, 4, 16), epsilon, window, seed)


def test_groups_descend_and_batch_sizes_find_their_bucket() -> None:
    state = bandit()
    assert state.groups == ((LONG, MIDDLE), (SHORT,), (OFF,))
    assert [select_strategy(state, size) for size in (4, 15, 16, 500)] == [SHORT, SHORT, OFF, OFF]
    assert select_strategy(state, 3) in (LONG, MIDDLE)


def test_every_strategy_is_tried_once_in_order() -> None:
    state = bandit()
    assert select_strategy(state, 2) == LONG
    state = record(state, 2, 4, 0.1)
    assert select_strategy(state, 2) == MIDDLE


def test_reward_is_acceptance_length_times_batch_per_second() -> None:
    state = record(bandit(), 2, 6, 0.1)
    assert state.rewards[0][0] == (pytest.approx((6 / 2 + 1) * 2 / 0.1),)
    assert state.medians[0][1] == math.inf


def test_exploits_the_best_median_and_an_outlier_does_not_count() -> None:
    state = bandit()
    for accepted, seconds in ((6, 0.1), (2, 0.1)):
        state = record(state, 2, accepted, seconds)
    assert select_strategy(state, 2) == LONG
    for seconds in (0.1, 0.1, 9.0):
        state = record(state, 2, 6, seconds)
        assert select_strategy(state, 2) == LONG


def test_the_window_slides() -> None:
    state = bandit(window=2)
    for accepted in (6, 2, 0):
        state = record(state, 2, accepted, 0.1)
    assert select_strategy(state, 2) == LONG
    state = record(state, 2, 0, 0.1)
    assert state.rewards[0][0] == (pytest.approx(20.0), pytest.approx(20.0))
    assert select_strategy(state, 2) == MIDDLE


def test_explores_with_probability_epsilon() -> None:
    state = bandit(epsilon=0.3)
    state = record(record(state, 2, 6, 0.1), 2, 0, 0.1)
    others = steps = 0
    while steps < 4000:
        others += select_strategy(state, 2) == MIDDLE
        state = record(state, 2, 6 if select_strategy(state, 2) == LONG else 0, 0.1)
        steps += 1
    assert others / steps == pytest.approx(0.3 / 2, abs=0.02)


def test_the_same_seed_explores_alike_and_another_differently() -> None:
    def choices(seed: int) -> list[Strategy]:
        state, chosen = bandit(epsilon=1.0, seed=seed), []
        for _ in range(64):
            chosen.append(select_strategy(state, 1))
            state = record(state, 1, 1, 0.1)
        return chosen

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


@pytest.mark.parametrize("thresholds", [(1, 4), (1, 16, 4), (1, 4, 4), (1, 2, 3, 4)])
def test_thresholds_must_fit_the_groups(thresholds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="name one ascending batch size"):
        initialize((LONG, SHORT, OFF), thresholds, 0.1, 4, 0)

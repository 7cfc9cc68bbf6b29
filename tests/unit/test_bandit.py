"""TLT's algorithm 1, line by line, and the elastic threshold."""

import math

import pytest

from paceline.errors import ConfigError
from paceline.planning.bandit import (
    NO_DRAFTS,
    BanditState,
    Strategy,
    initialize,
    move_threshold,
    record,
    select_ahead,
    select_strategy,
    skip,
    typical_trial,
)

LONG, MIDDLE, SHORT, OFF = Strategy(12, 1, 8), Strategy(8, 1, 8), Strategy(4, 1, 4), Strategy(0, 1, 0)


def bandit(epsilon: float = 0.0, window: int = 4, seed: int = 0, elastic: int = 1000) -> BanditState:
    return initialize((SHORT, LONG, OFF, MIDDLE), (1, 4, 16), epsilon, window, seed, elastic)


def play(state: BanditState, accepted: dict[Strategy, int], steps: int) -> BanditState:
    """Steps of two requests in 0.1 s, with so many accepted tokens for each strategy."""
    for _ in range(steps):
        state = record(state, 2, accepted[select_strategy(state, 2)], 0.1)
    return state


def test_groups_descend_and_batch_sizes_find_their_bucket() -> None:
    state = bandit()
    assert state.groups == ((LONG, MIDDLE), (SHORT,), (OFF,))
    assert [select_strategy(state, size) for size in (4, 15, 16, 500)] == [SHORT, SHORT, OFF, OFF]
    assert select_strategy(state, 3) in (LONG, MIDDLE)


def test_a_step_plays_what_was_chosen_one_step_before() -> None:
    """So that a model drafter has drafted as deep as the strategy says, and no deeper."""
    state = bandit(epsilon=0.5, seed=3)
    for number in range(40):
        ahead = select_ahead(state, 2)
        state = skip(state) if number % 5 == 4 else record(state, 2, number % 3, 0.1)
        assert select_strategy(state, 2) == ahead


def test_every_strategy_is_tried_in_order() -> None:
    state, played = bandit(), []
    for _ in range(4):
        played.append(select_strategy(state, 2))
        state = record(state, 2, 4, 0.1)
    assert played == [LONG, LONG, MIDDLE, MIDDLE]


def test_reward_is_acceptance_length_times_batch_per_second() -> None:
    state = record(bandit(), 2, 6, 0.1, num_verified=10, draft_s=0.02)
    [trial] = state.trials[0][0]
    assert trial.reward == pytest.approx((6 / 2 + 1) * 2 / 0.1)
    assert (trial.accept_length, trial.verified, trial.draft_s) == (4.0, 5.0, 0.01)
    assert state.medians[0][1] == math.inf


def test_exploits_the_best_median_and_an_outlier_does_not_count() -> None:
    state = play(bandit(), {LONG: 6, MIDDLE: 2}, 8)
    assert select_strategy(state, 2) == LONG
    for seconds in (0.1, 9.0, 0.1, 0.1):
        state = record(state, 2, 6, seconds)
        assert select_strategy(state, 2) == select_ahead(state, 2) == LONG


def test_the_window_slides() -> None:
    state = play(bandit(window=2), {LONG: 6, MIDDLE: 2}, 8)
    assert select_strategy(state, 2) == LONG
    state = play(state, {LONG: 0, MIDDLE: 2}, 4)
    assert [trial.reward for trial in state.trials[0][0]] == pytest.approx([20.0, 20.0])
    assert select_strategy(state, 2) == MIDDLE


def test_explores_with_probability_epsilon() -> None:
    state = play(bandit(epsilon=0.3), {LONG: 6, MIDDLE: 0}, 8)
    others = 0
    for _ in range(4000):
        others += select_strategy(state, 2) == MIDDLE
        state = play(state, {LONG: 6, MIDDLE: 0}, 1)
    assert others / 4000 == pytest.approx(0.3 / 2, abs=0.02)


def test_the_same_seed_explores_alike_and_another_differently() -> None:
    def choices(seed: int) -> list[Strategy]:
        state, chosen = bandit(epsilon=1.0, seed=seed), []
        for _ in range(64):
            chosen.append(select_strategy(state, 1))
            state = record(state, 1, 1, 0.1)
        return chosen

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_nothing_is_drafted_or_learned_from_the_elastic_threshold_on() -> None:
    state = bandit(elastic=3)
    assert [select_strategy(state, size) for size in (2, 3)] == [LONG, NO_DRAFTS]
    assert record(state, 3, 0, 0.1).trials == state.trials
    state = move_threshold(state, 7, pays=True)
    assert [select_strategy(state, size) for size in (7, 8)] == [SHORT, NO_DRAFTS]
    state = move_threshold(state, 2, pays=False)
    assert [select_strategy(state, size) for size in (1, 2, 7)] == [LONG, NO_DRAFTS, NO_DRAFTS]


def test_a_sunken_threshold_is_explored_beyond_up_to_the_first_one() -> None:
    state = move_threshold(bandit(epsilon=1.0, elastic=6), 1, pays=False)
    assert [select_strategy(state, size) for size in (5, 6)] == [SHORT, NO_DRAFTS]


def test_a_typical_trial_is_the_best_strategys() -> None:
    state = bandit()
    assert typical_trial(state, 2) is None
    state = play(state, {LONG: 2, MIDDLE: 6}, 6)
    found = typical_trial(state, 3)
    assert found is not None
    assert found.accept_length == 4.0


@pytest.mark.parametrize("thresholds", [(1, 4), (1, 16, 4), (1, 4, 4), (1, 2, 3, 4)])
def test_thresholds_must_fit_the_groups(thresholds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="name one ascending batch size"):
        initialize((LONG, SHORT, OFF), thresholds, 0.1, 4, 0)

"""The reward scheduler: every response is settled exactly once, whatever functions and processes do."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import RewardSettings
from paceline.errors import EngineError
from paceline.fleet.rewards import (
    MOST_FAILED_STARTS,
    START_S,
    Replace,
    Reward,
    RewardAction,
    RewardScheduler,
    Score,
    Settle,
)


def scheduler(**fields: object) -> RewardScheduler:
    made = RewardScheduler(
        RewardSettings.model_validate({"workers": 1, "timeout_s": 10.0, "max_crashes": 1, **fields})
    )
    assert made.open(0.0) == [Replace(worker, 1) for worker in range(fields.get("workers", 1))]  # type: ignore[call-overload]
    return made


def test_responses_are_scored_in_turn_once_a_worker_is_up() -> None:
    pool = scheduler()
    assert pool.add(7, 0.0) == []
    assert pool.up(0, 1, 0.0) == [Score(0, 1, 7)]
    assert pool.add(8, 0.0) == []
    assert pool.returned(0, 1, 1, 0.0) == [Settle(7, Reward(1.0)), Score(0, 1, 8)]
    assert pool.num_open == 1


class Pair:
    """Fails as a tensor of two elements does."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


@pytest.mark.parametrize("value", [None, "much", float("nan"), float("inf"), [1.0], 10**400, Pair()])
def test_what_is_no_number_is_a_failure(value: object) -> None:
    pool = scheduler(failure_reward=-1.0)
    pool.up(0, 1, 0.0)
    pool.add(7, 0.0)
    [settled] = pool.returned(0, 1, value, 0.0)
    assert isinstance(settled, Settle)
    assert settled.reward.value == -1.0
    assert "it returned" in str(settled.reward.failure)


def test_what_raises_is_not_asked_again() -> None:
    pool = scheduler(failure_reward=None)
    pool.up(0, 1, 0.0)
    pool.add(7, 0.0)
    assert pool.raised(0, 1, "ValueError: no", 0.0) == [
        Settle(7, Reward(None, "the reward function failed: it raised ValueError: no"))
    ]


def test_what_hangs_is_killed_and_replaced() -> None:
    pool = scheduler()
    pool.up(0, 1, 0.0)
    pool.add(7, 5.0)
    pool.add(8, 5.0)
    assert pool.tick(14.9) == []
    assert pool.tick(15.0) == [
        Replace(0, 2),
        Settle(7, Reward(0.0, "the reward function failed: it took longer than 10 s")),
    ]
    assert pool.returned(0, 1, 1.0, 16.0) == [], "the answer comes too late"
    assert pool.up(0, 2, 20.0) == [Score(0, 2, 8)]


def test_a_response_whose_worker_dies_is_scored_again() -> None:
    pool = scheduler()
    pool.up(0, 1, 0.0)
    pool.add(7, 0.0)
    assert pool.died(0, 1, "killed", 0.0) == [Replace(0, 2)]
    assert pool.up(0, 2, 0.0) == [Score(0, 2, 7)]
    assert pool.died(0, 2, "killed", 0.0) == [
        Replace(0, 3),
        Settle(7, Reward(0.0, "the reward function failed: its process died, 2 times")),
    ]


def test_a_function_that_cannot_be_loaded_ends_the_rollout() -> None:
    pool = scheduler()
    for life in range(1, MOST_FAILED_STARTS):
        assert pool.died(0, life, "ModuleNotFoundError", 0.0) == [Replace(0, life + 1)]
    with pytest.raises(EngineError, match=r"5 reward workers in a row did not start.*ModuleNotFoundError"):
        pool.died(0, MOST_FAILED_STARTS, "ModuleNotFoundError", 0.0)


def test_a_worker_that_does_not_come_up_is_replaced() -> None:
    pool = scheduler()
    assert pool.tick(START_S - 1) == []
    assert pool.tick(START_S) == [Replace(0, 2)]


def test_clearing_cuts_off_what_is_being_scored() -> None:
    pool = scheduler(workers=2)
    pool.up(0, 1, 0.0)
    pool.up(1, 1, 0.0)
    pool.add(7, 0.0)
    assert pool.clear(0.0) == [Replace(0, 2)]
    assert pool.returned(0, 1, 1.0, 0.0) == []
    assert pool.num_open == 0


def test_idle_workers_that_have_died_too_cost_a_response_nothing() -> None:
    pool = scheduler(workers=3)
    for worker in range(3):
        pool.up(worker, 1, 0.0)
    assert pool.add(7, 0.0) == [Score(0, 1, 7)]
    assert pool.died(0, 1, "killed", 0.0) == [Replace(0, 2), Replace(1, 2), Replace(2, 2)]
    assert pool.died(1, 1, "killed", 0.0) == [], "of a life that is over"
    assert pool.up(2, 2, 0.0) == [Score(2, 2, 7)]
    assert pool.returned(2, 2, 1.0, 0.0) == [Settle(7, Reward(1.0))]


def test_failed_starts_of_a_rollout_are_not_held_against_the_next() -> None:
    pool = scheduler()
    for life in range(1, MOST_FAILED_STARTS):
        pool.died(0, life, "ModuleNotFoundError", 0.0)
    with pytest.raises(EngineError, match="did not start"):
        pool.died(0, MOST_FAILED_STARTS, "ModuleNotFoundError", 0.0)
    assert pool.clear(1.0) == [Replace(0, MOST_FAILED_STARTS + 1)]
    pool.add(7, 1.0)
    assert pool.died(0, MOST_FAILED_STARTS + 1, "killed", 1.0) == [Replace(0, MOST_FAILED_STARTS + 2)]
    assert pool.up(0, MOST_FAILED_STARTS + 2, 1.0) == [Score(0, MOST_FAILED_STARTS + 2, 7)]


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 20))
@settings(max_examples=100)
def test_every_response_is_settled_once(seed: int, workers: int, count: int) -> None:
    rng = random.Random(seed)
    pool = scheduler(workers=workers)
    lives, busy = dict.fromkeys(range(workers), 1), dict[int, int]()
    told: list[tuple[int, int]] = []
    settled: Counter[int] = Counter()
    now_s = 0.0

    def act(actions: list[RewardAction]) -> None:
        for action in actions:
            match action:
                case Score(worker, life, ticket):
                    assert lives[worker] == life
                    assert worker not in busy
                    assert settled[ticket] == 0
                    busy[worker] = ticket
                case Replace(worker, life):
                    assert life == lives[worker] + 1
                    lives[worker] = life
                    busy.pop(worker, None)
                case Settle(ticket, _):
                    settled[ticket] += 1

    waiting = list(range(count))
    while waiting or pool.num_open:
        now_s += rng.random()
        worker = rng.randrange(workers)
        life = lives[worker]
        if waiting and rng.random() < 0.3:
            act(pool.add(waiting.pop(), now_s))
        elif worker not in busy:
            act(pool.up(worker, life, now_s))
        else:
            told.append((worker, life))
            chance = rng.random()
            if chance < 0.5:
                del busy[worker]
                act(pool.returned(worker, life, 1.0, now_s))
            elif chance < 0.6:
                del busy[worker]
                act(pool.raised(worker, life, "no", now_s))
            elif chance < 0.8:
                act(pool.died(worker, life, "killed", now_s))
            else:
                act(pool.tick(now_s))
        if told:
            worker, life = rng.choice(told)
            if life < lives[worker]:
                assert pool.returned(worker, life, 0.5, now_s) == []
                assert pool.died(worker, life, "late", now_s) == []
    assert settled == dict.fromkeys(range(count), 1)

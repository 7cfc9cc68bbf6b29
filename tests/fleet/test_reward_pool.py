"""Reward functions that are slow, crash, hang or cannot be loaded: a defined outcome, once for each response."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from paceline.config import RewardSettings
from paceline.errors import EngineError
from paceline.fleet.reward_pool import RewardPool, Scored
from paceline.fleet.rewards import RewardFunction
from paceline.types import Response, RolloutRequest


def response(tokens: int) -> Response:
    return Response(RolloutRequest((1, 2), 50), tuple(range(tokens)), (), "stop", 0, 0, 0, 0, 0, 1)


def make_misbehave() -> RewardFunction:
    """A local function: reward workers cannot import this module."""

    def misbehave(index: int, answer: Response) -> Any:
        match len(answer.tokens):
            case 1:
                raise ValueError("no answer in the text")
            case 2:
                os._exit(9)
            case 3:
                while True:
                    time.sleep(0.01)
            case 4:
                return float("nan")
            case 5:
                time.sleep(0.5)
        return index + 0.5

    return misbehave


def collect(pool: RewardPool, ray: Any, count: int) -> dict[int, Scored]:
    found: dict[int, Scored] = {}
    deadline_s = time.monotonic() + 90
    while len(found) < count:
        assert time.monotonic() < deadline_s
        ready, _ = ray.wait(list(pool.calls), num_returns=1, timeout=0.1)
        for scored in (one for ref in ready for one in pool.take(ref)):
            assert scored.index not in found
            found[scored.index] = scored
        for scored in pool.tick():
            assert scored.index not in found
            found[scored.index] = scored
    return found


def test_every_way_to_fail_has_its_outcome(ray: Any) -> None:
    settings = RewardSettings(workers=2, timeout_s=2.0, max_crashes=1, failure_reward=-1.0)
    pool = RewardPool(make_misbehave(), settings)
    for index in range(12):
        assert pool.add(index, response(index % 6)) == []
    found = collect(pool, ray, 12)
    assert pool.num_open == 0
    reasons = {
        1: "it raised ValueError: no answer",
        2: "died, 2 times",
        3: "longer than 2 s",
        4: "it returned nan",
    }
    for index, scored in found.items():
        reason = reasons.get(index % 6)
        assert scored.response == response(index % 6)
        if reason is None:
            assert scored.reward.value == index + 0.5
            assert scored.reward.failure is None
        else:
            assert scored.reward.value == -1.0
            assert reason in str(scored.reward.failure)
    pool.close()


class Unloadable:
    """A function that breaks where it arrives."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> Any:
    raise ModuleNotFoundError("no module named judge")


def test_a_function_that_cannot_be_loaded_is_an_error(ray: Any) -> None:
    pool = RewardPool(Unloadable(), RewardSettings())  # type: ignore[arg-type]
    pool.add(0, response(6))
    with pytest.raises(EngineError, match="reward workers in a row did not start"):
        collect(pool, ray, 1)
    pool.close()

"""The overlapping scheduler without an engine: what it learns a step's time from, and how it foresees vLLM's cuts.

What it does with an engine is compared with plain vLLM in test_runner_v2.py.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paceline.engine.async_scheduler import OverlappingScheduler, _Step
from paceline.types import StepObservation

STEP = StepObservation(2, 0, 0, 0, 0.0)


def scheduler(**attributes: Any) -> Any:
    made = object.__new__(OverlappingScheduler)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def sent(*numbers: int) -> Any:
    """A step with so many draft tokens of each request."""
    return SimpleNamespace(num_sent=np.array(numbers, np.int32))


@pytest.mark.parametrize(
    ("own", "following", "away_s", "is_typical"),
    [
        (sent(0, 0), [sent(0, 0)], 0.0, True),
        (sent(3, 0), [sent(0, 1)], 0.0, True),
        (sent(0, 0), [], 0.0, True),
        (sent(0, 0), [sent(2, 2)], 0.0, False),
        (sent(2, 2), [sent(0, 0)], 0.0, False),
        (sent(0, 0), [sent(0, 0)], 0.5, False),
    ],
)
def test_a_step_whose_time_is_not_its_own_is_reported_and_not_learned_from(
    own: Any, following: list[Any], away_s: float, is_typical: bool
) -> None:
    seen: list[bool] = []

    def observe(step: StepObservation, *, is_typical: bool) -> StepObservation:
        seen.append(is_typical)
        return step

    made = scheduler(
        _step=own,
        _steps=deque(following),
        _away_s=away_s,
        _started_s=time.perf_counter() - 1.0,
        kv_pool=None,
        loop=SimpleNamespace(observe=observe),
        observations=deque(),
    )
    made._time(STEP)
    assert seen == [is_typical]
    assert made.observations[0].step_s >= 1.0


def proposal(**attributes: Any) -> Any:
    rows = np.array([[5, 6, 7], [5, 9, 7], [5, 6, 7]], np.int32)
    batch = SimpleNamespace(tokens=rows, num_tokens=np.array([3, 3, 2], np.int32))
    return SimpleNamespace(
        **{"batch": batch, "branches": None, "num_left": None, "takes_free": None, **attributes}
    )


@pytest.mark.parametrize(
    ("left", "takes_free", "is_left", "in_vain"),
    [
        (None, None, [False] * 3, [False, True, True]),
        ([2, 2, 2], [True, True, True], [False, True, True], [False] * 3),
        ([2, 2, 2], [False, False, True], [True, True, True], [False] * 3),
        ([0, 0, 1], [True, True, True], [False, False, True], [False, True, False]),
    ],
    ids=["no model", "where the trees do not go on", "where the model is better", "for one"],
)
def test_whose_drafts_are_verified_is_known_when_the_step_before_is_over(
    left: list[int] | None, takes_free: list[bool] | None, is_left: list[bool], in_vain: list[bool]
) -> None:
    """Of the second the draft does not begin with what was decided, of the third nothing is left behind that."""
    made = proposal(
        num_left=None if left is None else np.array(left),
        takes_free=None if takes_free is None else np.array(takes_free),
    )
    names = ["a", "b", "c"]
    step = _Step(cast(Any, None), made, [], names, [], np.array([2, 2, 2], np.int32), 0, 0.0)
    assert step.is_in_vain.tolist() == [False] * 3
    step.tell([[5, 6], [5, 6], [5, 6]])
    assert step.is_left.tolist() == is_left
    assert step.is_in_vain.tolist() == in_vain
    assert step.behind([[7], [8, 9], []]) == [[5, 6, 7], [5, 6, 8, 9], [5, 6]]


def request(eos: int | None, *stops: int) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(eos_token_id=eos, stop_token_ids=list(stops)))


@pytest.mark.parametrize(
    ("rows", "ends", "expected"),
    [
        ([[5, 6], [7]], [90, 90], [[5, 6], [7]]),
        ([[5, 2, 6], [2]], [90, 90], [[5, 2], [2]]),
        ([[5, 6, 9, 8], [9, 2, 4]], [90, 90], [[5, 6, 9], [9, 2]]),
        ([[5, 6, 7], [7, 8, 1]], [12, 90], [[5, 6], [7, 8, 1]]),
        ([[5, 6, 2], [7]], [12, 90], [[5, 6], [7]]),
    ],
    ids=["none", "end of sequence", "stop token of one request", "limit", "limit before the end"],
)
def test_tokens_are_cut_as_vllm_will_cut_them(
    rows: list[list[int]], ends: list[int], expected: list[list[int]]
) -> None:
    requests = [request(2, 9), request(2)]
    made = scheduler(_stop_ids=None, _ends=np.array(ends))
    assert made._cut(requests, np.array([10, 10]), rows) == expected
    assert made._stops(requests).tolist() == [2, 9]


def test_without_stop_tokens_none_is_one() -> None:
    made = scheduler(_stop_ids=None)
    assert made._stops([request(None), request(None)]).tolist() == []

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

from paceline.engine.async_scheduler import MOST_UNTYPICAL, OverlappingScheduler, _Step, _stop_ids_of
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
    made = scheduler(
        _step=own,
        _steps=deque(following),
        _away_s=away_s,
        _started_s=time.perf_counter() - 1.0,
        _num_untypical=0,
        kv_pool=None,
        loop=SimpleNamespace(observe=lambda step: step),
        observations=deque(),
    )
    made._time(STEP)
    assert made.observations[0].is_typical == is_typical
    assert made.observations[0].step_s >= 1.0


def test_where_every_other_step_drafts_times_are_learned_after_all() -> None:
    made = scheduler(
        _step=sent(0),
        _steps=deque([sent(1)]),
        _away_s=0.0,
        _num_untypical=0,
        kv_pool=None,
        loop=SimpleNamespace(observe=lambda step: step),
        observations=deque(),
    )
    for _ in range(MOST_UNTYPICAL + 2):
        made._started_s = time.perf_counter() - 1.0
        made._time(STEP)
    assert [step.is_typical for step in made.observations] == [False] * MOST_UNTYPICAL + [True] * 2


def proposal(**attributes: Any) -> Any:
    rows = np.array([[5, 6, 7], [5, 9, 7], [5, 6, 7]], np.int32)
    batch = SimpleNamespace(tokens=rows, num_tokens=np.array([3, 3, 2], np.int32))
    return SimpleNamespace(**{"batch": batch, "branches": None, "left": None, **attributes})


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
        left=None
        if left is None
        else SimpleNamespace(num_left=np.array(left), takes_free=np.array(takes_free)),
    )
    names = ["a", "b", "c"]
    step = _Step(cast(Any, None), made, [], names, [], np.array([2, 2, 2], np.int32), 0, 0.0)
    assert step.is_in_vain.tolist() == [False] * 3
    step.tell([[5, 6], [5, 6], [5, 6]])
    assert step.is_left.tolist() == is_left
    assert step.is_in_vain.tolist() == in_vain
    assert step.behind([[7], [8, 9], []]) == [[5, 6, 7], [5, 6, 8, 9], [5, 6]]


def test_a_branch_that_begins_with_what_was_decided_is_verified_instead() -> None:
    """Two paths of each request: the trees' likeliest, and one that leaves it."""
    branches = SimpleNamespace(
        tokens=np.array([[[5, 8, 1]], [[5, 6, 2]], [[5, 6, 0]]], np.int32),
        num_tokens=np.array([[3], [3], [2]], np.int32),
    )
    made = proposal(branches=branches)
    step = _Step(cast(Any, None), made, [], ["a", "b", "c"], [], np.array([1, 1, 1], np.int32), 0, 0.0)
    step.tell([[5, 6], [5, 6], [5, 6]])
    assert step.goes_on.tolist() == [True, False, False]
    assert step.is_in_vain.tolist() == [False, False, True], (
        "behind the third's branch nothing is left either"
    )
    known = scheduler(
        _queried=["a", "b", "c"], _positions=np.array([10, 20, 30]), _ahead=np.array([1, 1, 1], np.int32)
    )
    order = known._order(made, np.array([2, 0, 1], np.int32))
    assert order.names == ["a", "c"]
    assert order.starts.tolist() == [10, 30]
    assert order.tokens.tolist() == [[[5, 6, 7], [5, 8, 1]], [[5, 6, 7], [5, 6, 0]]]
    assert order.num_tokens.tolist() == [[3, 3], [2, 2]]
    assert order.keeps.tolist() == [False, False]


def request(eos: int | None, *stops: int, repetition_detection: Any = None) -> Any:
    params = SimpleNamespace(
        eos_token_id=eos, stop_token_ids=list(stops), repetition_detection=repetition_detection
    )
    return SimpleNamespace(sampling_params=params)


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
    made = scheduler(_ends=np.array(ends))
    assert made._cut(requests, np.array([10, 10]), rows) == expected


def test_what_responses_may_end_at() -> None:
    found = _stop_ids_of([request(2, 9), request(2), request(None)])
    assert found is not None
    assert found.tolist() == [2, 9]
    found = _stop_ids_of([request(None)])
    assert found is not None
    assert found.tolist() == []
    assert _stop_ids_of([request(2), request(2, repetition_detection=object())]) is None


def test_who_left_is_forgotten_with_the_last_step_that_computed_them() -> None:
    """Also where they are in the next steps again: preempted and resumed."""
    steps = [SimpleNamespace(scheduled=SimpleNamespace(num_scheduled_tokens={"a": 1})) for _ in range(3)]
    made = scheduler(
        _steps=deque(steps[:2]), _left={}, requests={}, _blocks_of=lambda name: ([7],), _stained=[]
    )
    made._remember(SimpleNamespace(request_id="a"))
    output = SimpleNamespace()
    for number in range(2):
        made._steps.popleft()
        made._steps.append(steps[2])
        assert made._left
        made._drop_stale(SimpleNamespace(num_scheduled_tokens={"a": 1}), output)
        assert made._uncounted == {"a"}
        assert bool(made._left) == (number == 0)

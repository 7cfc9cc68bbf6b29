"""Waiting for drafts is never slower than going, in simulated time; and where it pays it is done."""

from __future__ import annotations

import pytest
from draft_race import run
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning.wait import PATIENCE, WaitSnapshot, decide_wait


def go(_: WaitSnapshot) -> float:
    return 0.0


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 16]),
    st.floats(0.1, 0.95),
    st.sampled_from([0.02, 0.05, 0.1, 0.2, 0.4]),
    st.integers(2, 12),
)
def test_waiting_is_never_slower(num_requests: int, acceptance: float, draft_s: float, window: int) -> None:
    rates = [
        run(
            policy,
            num_requests=num_requests,
            acceptance=acceptance,
            draft_s=draft_s,
            window=window,
            num_steps=8000 // num_requests,
        )
        for policy in (decide_wait, go)
    ]
    assert rates[0] >= 0.97 * rates[1]


@pytest.mark.parametrize(
    ("acceptance", "draft_s", "gain"), [(0.8, 0.02, 1.3), (0.6, 0.1, 1.04), (0.3, 0.5, 1.0)]
)
def test_it_gains_what_there_is_to_gain(acceptance: float, draft_s: float, gain: float) -> None:
    rates = [run(f, num_requests=1, acceptance=acceptance, draft_s=draft_s) for f in (decide_wait, go)]
    assert rates[0] >= gain * rates[1]


def a_snapshot(**changes: object) -> WaitSnapshot:
    fields = {
        "num_requests": 1,
        "open_probability": 1.0,
        "acceptance": 0.7,
        "num_tokens": 2,
        "arrival_s": 0.002,
        "step_s": 0.015,
        "longer_step_s": 0.0155,
    }
    return WaitSnapshot(**(fields | changes))  # type: ignore[arg-type]


def test_a_wait_is_bounded_by_what_it_should_take() -> None:
    assert decide_wait(a_snapshot()) == PATIENCE * 0.002


@pytest.mark.parametrize(
    "changes",
    [
        {"open_probability": 0.0},  # nothing is under way
        {"open_probability": 0.1},  # what is there hardly survives this step
        {"acceptance": 0.02},
        {"num_requests": 8},  # seven others would wait
        {"arrival_s": 0.02},
        {"longer_step_s": 0.03},  # verifying more costs more than it saves
    ],
)
def test_where_it_cannot_pay_it_is_not_done(changes: dict[str, object]) -> None:
    assert decide_wait(a_snapshot(**changes)) == 0.0

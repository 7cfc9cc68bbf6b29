"""Reconfiguration in a running engine: who is planned for, when, at what gain, and that its log is planned again."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from draft_race import run
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineSettings
from paceline.drafting.tree import Source
from paceline.engine.draft_windows import DraftWindows
from paceline.engine.loop_log import open_log
from paceline.engine.loop_replay import replay_engine
from paceline.planning.draft_ahead import most_ahead
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.reconfigure import LEAST_STEPS, LONGEST_REST, is_due, is_trial, reconfigure, replan
from paceline.planning.wait import decide_wait
from paceline.planning.window import Mode, StepTimes, tokens_per_s
from paceline.record.decisions import DecisionReader


class Link:
    """Keeps what the draft worker would have been told."""

    def __init__(self) -> None:
        self.allowed: dict[int, int] = {}
        self.first: int | None = None

    @property
    def first_ahead(self) -> int:
        return 16 if self.first is None else self.first

    def begin_anew(self) -> None:
        self.first = None

    def allow(self, responses: list[int], most: list[int]) -> None:
        self.allowed |= dict(zip(responses, most, strict=True))

    def begin_with(self, most: int) -> None:
        self.first = most


def step_time(base_s: float, token_s: float) -> StepTimeModel:
    model = StepTimeModel.initial()
    for size in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(2):
            model = update_measured_time(model, size, base_s + token_s * size)
    return model


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    st.floats(1e-4, 2.0),
    st.floats(0.0, 0.2),
    st.integers(1, 12),
)
def test_everyone_gets_the_best_of_all_windows_and_modes(
    rates: list[float], draft_s: float, slope: float, longest: int
) -> None:
    verify_s = 1.0 + slope * np.arange(longest + 1)
    plan = reconfigure(rates, StepTimes(1, draft_s, verify_s), everyone=True)
    assert plan.requests.tolist() == list(range(len(rates)))
    for rate, found in zip(rates, plan.tokens_per_s.tolist(), strict=True):
        best = max(
            float(tokens_per_s(rate, w, StepTimes(1, draft_s, verify_s[w]), mode))
            for mode in Mode
            for w in range(int(mode is Mode.DECOUPLED), longest + 1)
        )
        assert found == pytest.approx(best)


@given(st.integers(0, 3000), st.integers(1, 300), st.integers(0, 300), st.integers(1, 2000))
def test_it_is_due_every_so_many_steps_and_when_the_batch_has_changed(
    num_steps: int, batch: int, planned: int, every: int
) -> None:
    due = is_due(num_steps, batch, planned, every)
    if num_steps >= every:
        assert due
    elif num_steps < LEAST_STEPS:
        assert not due
    else:
        assert due == (4 * abs(batch - planned) >= planned)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_a_planned_window_is_hardly_slower_than_drafting_on_and_on(
    num_requests: int, draft_s: float, acceptance: float
) -> None:
    plan = reconfigure([acceptance], StepTimes(1, draft_s, np.ones(17)), everyone=True)
    ahead = int(most_ahead(plan.windows, plan.is_coupled)[0])
    rates = [
        run(
            decide_wait,
            num_requests=num_requests,
            acceptance=acceptance,
            draft_s=draft_s,
            window=window,
            num_steps=1500,
        )
        for window in (ahead / 2, 64)
    ]
    assert rates[0] > 0.95 * rates[1]
    assert rates[0] == pytest.approx(float(plan.tokens_per_s[0]) * num_requests, rel=0.08)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_what_an_engine_plans_is_planned_again_from_its_log(seed: int, every: int) -> None:
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        log = open_log(EngineSettings(decision_log=folder))
        link = Link()
        windows = DraftWindows(link, Source.MODEL, every, 8, log)  # type: ignore[arg-type]
        model = step_time(0.01, 0.0003)
        num_plans = 0
        for step in range(120):
            count = int(rng.integers(1, 9))
            names = np.arange(count, dtype=np.int64)
            link.allowed.clear()
            has_planned = windows.advance(names, model, float(rng.choice([0.0, 1e-5, 0.002, 0.02])))
            assert has_planned == bool(link.allowed)
            num_plans += has_planned
            assert set(link.allowed) in (set(), set(range(count)))
            assert all(0 <= most <= 16 for most in link.allowed.values())
            told = rng.integers(0, 5, count).astype(np.int32)
            windows.learn(names, told, np.minimum(rng.integers(0, 5, count), told).astype(np.int32))
            if step == 60:
                windows.close(0)
        log.close()
        with DecisionReader(Path(folder) / "engine-1.decisions") as reader:
            tallies = {tally.kind: tally for tally in replay_engine(reader)}
    planned = tallies.get("draft windows")
    assert (planned.num_planned if planned else 0) == num_plans
    assert planned is None or planned.num_different == 0


def test_a_response_that_drafts_badly_is_told_from_one_that_drafts_well() -> None:
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 32, 8, open_log(EngineSettings()))  # type: ignore[arg-type]
    names, model = np.array([3, 4], np.int64), step_time(0.01, 0.0)
    for _ in range(40):
        windows.learn(names, np.array([8, 1], np.int32), np.array([8, 0], np.int32))
    for _ in range(32):
        windows.advance(names, model, 0.005)
    assert link.allowed[3] > link.allowed[4] == 0
    assert link.first == link.allowed[3], "of the mean, 0.89, as much as of 0.98"
    assert windows.num_changes == 1
    windows.clear()
    for _ in range(32):
        windows.advance(names, model, 0.0)
    assert windows._drafts == {}, "before drafts are measured nothing is planned"


@pytest.mark.parametrize("draft_s", [0.0005, 0.012])
def test_a_response_that_begins_later_has_the_window_of_the_mean(draft_s: float) -> None:
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 1000, 24, open_log(EngineSettings()))  # type: ignore[arg-type]
    names, model = np.array([3, 4], np.int64), step_time(0.01, 0.0003)
    for _ in range(40):
        windows.learn(names, np.array([8, 8], np.int32), np.array([7, 5], np.int32))
    for _ in range(LEAST_STEPS):
        assert link.first is None, "nothing was planned"
        windows.advance(names, model, draft_s)
    verify_s = 0.01 + 0.0003 * 2 * (np.arange(25) + 1)
    plan = reconfigure([0.75], StepTimes(1, draft_s, verify_s), everyone=True)
    assert link.first == pytest.approx(int(most_ahead(plan.windows, plan.is_coupled)[0]), abs=1)
    assert min(link.allowed.values()) <= link.first <= max(link.allowed.values())
    changes = windows.num_changes
    windows.learn(np.array([5], np.int64), np.array([8], np.int32), np.array([6], np.int32))
    assert windows._drafts[5].is_coupled == plan.is_coupled[0]
    assert windows.num_changes == changes, "it begins so, which is no change"


def test_steps_that_were_never_tried_do_not_shorten_windows() -> None:
    """Two sizes alone are known, one of them from a slow moment: a line through them would have no draft pay."""
    model = StepTimeModel.initial()
    for tokens, seconds in ((1, 0.018), (2, 0.027)) * 8:
        model = update_measured_time(model, tokens, seconds)
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 1000, 32, open_log(EngineSettings()))  # type: ignore[arg-type]
    names = np.array([3], np.int64)
    for _ in range(LEAST_STEPS):
        windows.learn(names, np.array([8], np.int32), np.array([8], np.int32))
        windows.advance(names, model, 0.002)
    assert link.allowed[3] >= 2 * 0.027 / 0.002 - 4


def plan_with(windows: DraftWindows, num_right: int) -> None:
    """The first plan of a worker whose drafts of 8 tokens are right so far."""
    names, model = np.array([3], np.int64), step_time(0.01, 0.0003)
    for _ in range(LEAST_STEPS):
        windows.learn(names, np.array([8], np.int32), np.array([num_right], np.int32))
        windows.advance(names, model, 0.002)


def test_a_worker_that_comes_is_measured_before_it_is_planned_for() -> None:
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 1000, 24, open_log(EngineSettings()))  # type: ignore[arg-type]
    plan_with(windows, 0)
    assert link.first == 0
    assert link.allowed == {3: 0}
    assert windows.is_idle
    assert windows.leave()
    assert not windows.leave(), "that is known"
    assert not windows.is_idle
    assert link.first is None, "the next one may be faster"
    for _ in range(3 * LEAST_STEPS):
        assert not windows.advance(np.array([3], np.int64), step_time(0.01, 0.0003), 0.002)
    plan_with(windows, 0)
    assert link.first == 0


def test_responses_that_begin_in_a_trial_take_part_in_it() -> None:
    link, begun = Link(), []
    windows = DraftWindows(link, Source.MODEL, LEAST_STEPS, 24, open_log(EngineSettings()))  # type: ignore[arg-type]
    for _ in range(5):
        plan_with(windows, 0)
        begun.append((link.first, link.allowed[3]))
        assert windows.is_idle, "a trial is no finding"
    assert begun == [(0, 0), (2, 2), (2, 2), (0, 0), (2, 2)], "trials after 1, 2 and 4 plans"


@pytest.mark.parametrize("num_right", [0, 8])
def test_another_policy_gives_a_drafter_that_did_not_pay_a_trial(num_right: int) -> None:
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 1000, 24, open_log(EngineSettings()))  # type: ignore[arg-type]
    plan_with(windows, num_right)
    before = link.first
    assert (before == 0) == (num_right == 0) == windows.is_idle
    windows.clear()
    assert link.first == (before or None)


def test_a_drafter_that_does_not_pay_is_tried_again_after_rests_that_grow() -> None:
    times = StepTimes(1, 9.0, np.ones(9))
    tried = [idle for idle in range(40) if replan([0.1, 0.2], times, idle).is_trial]
    assert tried == [idle for idle in range(40) if is_trial(idle)] == [1, 2, 4, 8, 16, 24, 32]
    assert LONGEST_REST == 8
    assert replan([0.1, 0.2], times, 1).windows.tolist() == [1, 1]
    pays = StepTimes(1, 0.01, np.ones(9))
    assert not replan([0.9, 0.2], pays, 1).is_trial, "something is drafted, and so measured"


@pytest.mark.parametrize("trouble", ["slow", "wrong"])
def test_what_was_given_up_for_all_comes_back_when_it_pays_again(trouble: str) -> None:
    """It is measured only where something is drafted; plans without drafts know what they knew before."""
    link = Link()
    windows = DraftWindows(link, Source.MODEL, 16, 8, open_log(EngineSettings()))  # type: ignore[arg-type]
    names, model = np.array([3, 4], np.int64), step_time(0.01, 0.0)
    draft_s, rests = 0.012 if trouble == "slow" else 0.006, []
    for step in range(16 * 20):
        has_recovered = step > 16 * 3
        if not link.allowed or any(link.allowed.values()):
            is_right = has_recovered or trouble == "slow"
            windows.learn(names, np.array([2, 2], np.int32), np.full(2, 2 * is_right, np.int32))
            draft_s = 0.0005 if has_recovered else draft_s
        if windows.advance(names, model, draft_s):
            rests.append(not any(link.allowed.values()))
    assert rests[0]
    assert not any(rests[-10:])

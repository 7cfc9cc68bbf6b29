"""The spot trainer's coordinator: TLT 4.2 by example, and its invariants under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, EngineError
from paceline.planning.harvest import (
    Action,
    Decision,
    HarvestSettings,
    HarvestState,
    idle_threshold,
    rollout_ended,
    rollout_started,
    worker_idle,
    worker_lost,
    worker_needed,
    worker_up,
)

HALF = HarvestSettings(idle_fraction=0.5, min_idle=2)


def rolling(num_workers: int, groups: tuple[int, ...] = ()) -> HarvestState:
    """A rollout on w0, w1, .. of these data-parallel groups, everyone BUSY."""
    state = HarvestState()
    for number in range(num_workers):
        state, _ = worker_up(state, f"w{number}", groups[number] if groups else 0)
    return rollout_started(state)[0]


def idle(state: HarvestState, *names: str) -> Decision:
    """The state after these became idle, and the last one's actions."""
    actions: tuple[Action, ...] = ()
    for name in names:
        state, actions = worker_idle(state, name, HALF)
    return state, actions


def test_training_waits_for_enough_idle_workers_and_the_first_of_them_leads() -> None:
    state, actions = idle(rolling(6), "w4", "w1")
    assert actions == ()
    assert state.named("IDLE") == ("w4", "w1")
    state, actions = idle(state, "w0")
    assert actions == (Action("lead", "w4", 1), Action("join", "w1", 1), Action("join", "w0", 1))
    assert (state.leader, state.named("IDLE"), state.named("BUSY")) == ("w4", (), ("w2", "w3", "w5"))


def test_later_workers_join_the_session() -> None:
    state, actions = idle(rolling(4), "w0", "w1", "w2")
    assert actions == (Action("join", "w2", 1),)
    assert state.named("TRAINING") == ("w0", "w1", "w2")


def test_the_rollouts_end_stops_everyone_the_leader_last() -> None:
    state, _ = idle(rolling(4), "w0", "w1", "w2")
    state, actions = rollout_ended(state)
    assert actions == (Action("stop", "w1", 1), Action("stop", "w2", 1), Action("stop", "w0", 1))
    assert (state.named("TRAINING"), state.leader) == ((), None)


def test_between_rollouts_nobody_trains() -> None:
    state, _ = rollout_ended(rolling(2))
    state, actions = idle(state, "w0", "w1")
    assert actions == ()
    assert rollout_started(state)[0].named("BUSY") == ("w0", "w1")


def test_a_member_that_is_needed_leaves_and_the_session_goes_on() -> None:
    state, _ = idle(rolling(4), "w0", "w1", "w2")
    state, actions = worker_needed(state, "w1", HALF)
    assert actions == (Action("stop", "w1", 1),)
    assert (state.leader, state.named("TRAINING")) == ("w0", ("w0", "w2"))
    state, actions = worker_needed(state, "w2", HALF)
    assert (state.leader, state.named("TRAINING")) == ("w0", ("w0",))


def test_a_leader_that_is_needed_ends_the_session_and_the_next_one_leads_a_new_one() -> None:
    state, _ = idle(rolling(4), "w0", "w1", "w2")
    state, actions = worker_needed(state, "w0", HALF)
    stops, opened = actions[:3], actions[3:]
    assert stops == (Action("stop", "w1", 1), Action("stop", "w2", 1), Action("stop", "w0", 1))
    assert opened == (Action("lead", "w1", 2), Action("join", "w2", 2))


def test_without_enough_left_a_lost_leader_leaves_the_others_idle() -> None:
    state, _ = idle(rolling(5), "w0", "w1", "w2")
    state, _ = worker_needed(state, "w2", HALF)
    state, actions = worker_lost(state, "w0", HALF)
    assert actions == (Action("stop", "w1", 1),)
    assert (state.leader, state.named("IDLE"), state.named("BUSY")) == (None, ("w1",), ("w3", "w4", "w2"))


def test_a_lost_member_is_told_nothing() -> None:
    state, _ = idle(rolling(4), "w0", "w1", "w2")
    state, actions = worker_lost(state, "w1", HALF)
    assert actions == ()
    assert state.named("TRAINING") == ("w0", "w2")


def test_a_smaller_fleet_needs_fewer_idle_workers() -> None:
    state, actions = idle(rolling(6), "w0", "w1")
    assert actions == ()
    for lost in ("w5", "w4"):
        state, actions = worker_lost(state, lost, HALF)
    assert actions == (Action("lead", "w0", 1), Action("join", "w1", 1))


@pytest.mark.parametrize(("num_workers", "least"), [(1, 2), (4, 2), (5, 3), (64, 32)])
def test_the_threshold_follows_the_fleet(num_workers: int, least: int) -> None:
    assert idle_threshold(num_workers, HALF) == least


def test_only_one_data_parallel_group_trains() -> None:
    state, actions = idle(rolling(4, groups=(0, 1, 1, 0)), "w0", "w1")
    assert actions == ()
    state, actions = idle(state, "w2")
    assert actions == (Action("lead", "w1", 1), Action("join", "w2", 1))
    state, actions = idle(state, "w3")
    assert actions == ()
    assert state.named("IDLE") == ("w0", "w3")
    _, actions = worker_needed(state, "w1", HALF)
    assert actions[-2:] == (Action("lead", "w0", 2), Action("join", "w3", 2))


def test_a_late_report_of_an_idle_worker_changes_nothing() -> None:
    state, _ = idle(rolling(4), "w0", "w1")
    assert worker_idle(state, "w1", HALF) == (state, ())


@pytest.mark.parametrize("event", [worker_idle, worker_needed, worker_lost])
def test_unknown_workers_are_named(event: object) -> None:
    with pytest.raises(EngineError, match="'w9' is not among the 2 that are up"):
        event(rolling(2), "w9", HALF)  # type: ignore[operator]


def test_wrong_settings_and_doubled_workers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"idle_fraction is 0\.0: set it above 0"):
        HarvestSettings(idle_fraction=0.0)
    with pytest.raises(ConfigError, match="min_idle is 0: set it to at least 1"):
        HarvestSettings(min_idle=0)
    with pytest.raises(EngineError, match="'w0' is up already"):
        worker_up(rolling(1), "w0")


NAMES = [f"w{number}" for number in range(5)]
events = st.tuples(
    st.sampled_from(["up", "idle", "idle", "idle", "needed", "lost", "start", "end"]), st.sampled_from(NAMES)
)


def take(state: HarvestState, kind: str, name: str, settings: HarvestSettings) -> Decision:
    """The event, if it can happen now."""
    if kind in ("start", "end"):
        return rollout_started(state) if kind == "start" else rollout_ended(state)
    if kind == "up":
        return (state, ()) if name in state.workers else worker_up(state, name, int(name[1]) % 2)
    if name not in state.workers:
        return state, ()
    return {"idle": worker_idle, "needed": worker_needed, "lost": worker_lost}[kind](state, name, settings)


@given(st.lists(events, max_size=60), st.sampled_from([0.2, 0.5]), st.integers(1, 2))
@hypothesis_settings(max_examples=200)
def test_the_actions_alone_tell_who_trains(
    history: list[tuple[str, str]], fraction: float, least: int
) -> None:
    """Replays the actions as the workers see them: one leader per session, members of one group, nobody left over."""
    settings = HarvestSettings(fraction, least)
    state, _ = rollout_started(HarvestState())
    training: dict[str, int] = {}
    leaders: dict[int, str] = {}
    for kind, name in [*(("up", name) for name in NAMES), *history, ("end", "")]:
        state, actions = take(state, kind, name, settings)
        if kind == "lost":
            training.pop(name, None)
        for action in actions:
            if action.kind == "stop":
                assert training.pop(action.worker) == action.session
                continue
            assert action.worker not in training
            assert not set(training.values()) - {action.session}
            training[action.worker] = action.session
            if action.kind == "lead":
                assert action.session not in leaders
                leaders[action.session] = action.worker
            assert leaders[action.session] in training
        assert set(training) == set(state.named("TRAINING"))
        assert (state.leader in training) if training else (state.leader is None)
        assert len({state.workers[worker].data_parallel_group for worker in training}) <= 1
        if kind in ("end", "start"):
            assert not training
        if kind in ("needed", "lost"):
            assert name not in training
        for group in (0, 1):
            waiting = [w for w in state.named("IDLE") if state.workers[w].data_parallel_group == group]
            if state.is_rollout and not training:
                assert len(waiting) < idle_threshold(len(state.workers), settings)
    assert not training


def test_a_session_has_no_more_members_than_are_wanted() -> None:
    settings = HarvestSettings(max_members=1)
    state = rolling(4)
    for name in ("w2", "w0", "w1"):
        state, actions = worker_idle(state, name, settings)
        assert actions == ((Action("lead", "w2", 1),) if name == "w2" else ())
    assert (state.named("TRAINING"), state.named("IDLE")) == (("w2",), ("w0", "w1"))
    state, actions = worker_needed(state, "w2", settings)
    assert actions == (Action("stop", "w2", 1), Action("lead", "w0", 2))
    with pytest.raises(ConfigError, match="max_members is 0"):
        HarvestSettings(max_members=0)

"""Harvest: which idle workers train the drafter while the last responses of a rollout are generated?

The decisions of TLT's worker coordinator, as `event(state, ...) -> (state, actions)`; called for every change of a
worker by the simulator (sim/drafter_training.py), by the controller of a live fleet (control/training.py), and by a
training run on one engine (training/drafter_sessions.py). The caller carries the actions out and delivers those for
one worker in their order; no answer is waited for.

    BUSY      serves the rollout, or the policy's training between rollouts
    IDLE      nothing to generate, memory released
    TRAINING  in the session that trains the drafter

Invariants: there is a session if and only if a worker is TRAINING, and its leader is one of them; all of a session are
of one data-parallel group; between rollouts nobody trains.

Source: TLT 4.2, worker coordinator. Differs: (1) reaching the threshold is enough, and it follows the fleet's size: a
lost worker does not put it out of reach. (2) The paper counts all idle workers; ours are counted by data-parallel
group, as only one of them can train together. (3) The paper is silent about a leader that is needed again or lost:
the session ends, and a new one begins at once if enough are left. Other members leave without ending it, however few
remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.errors import ConfigError, EngineError

Phase = Literal["BUSY", "IDLE", "TRAINING"]


@dataclass(frozen=True, slots=True)
class HarvestSettings:
    """When a training session opens. Raises ConfigError for a value out of range."""

    idle_fraction: float = 0.25
    """Share of the workers that are up which has to be idle, above 0, at most 1."""
    min_idle: int = 1
    """Idle workers at least."""
    max_members: int | None = None
    """Most workers of a session, at least 1; None: all idle ones of a data-parallel group."""

    def __post_init__(self) -> None:
        if not 0.0 < self.idle_fraction <= 1.0:
            raise ConfigError(
                f"harvest idle_fraction is {self.idle_fraction}: set it above 0 and to at most 1"
            )
        if self.min_idle < 1:
            raise ConfigError(f"harvest min_idle is {self.min_idle}: set it to at least 1")
        if self.max_members is not None and self.max_members < 1:
            raise ConfigError(f"harvest max_members is {self.max_members}: set it to at least 1, or to None")


@dataclass(frozen=True, slots=True)
class Action:
    """What a worker is told."""

    kind: Literal["lead", "join", "stop"]
    """lead: set up the session and train. join: train with its leader. stop: leave the session now."""
    worker: str
    session: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that is up."""

    data_parallel_group: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class HarvestState:
    """The fleet as the coordinator sees it; HarvestState() is that of an empty one between rollouts."""

    workers: dict[str, Worker] = field(default_factory=dict)
    """By name; idle ones in the order in which they became idle."""
    is_rollout: bool = False
    session: int = 0
    """Number of the latest session, 0: there was none."""
    leader: str | None = None
    """Leader of the session, None: there is none now."""

    def named(self, phase: Phase) -> tuple[str, ...]:
        """The workers of a phase."""
        return tuple(name for name, worker in self.workers.items() if worker.phase == phase)


Decision = tuple[HarvestState, tuple[Action, ...]]


def rollout_started(state: HarvestState) -> Decision:
    """Every worker serves: the state after it, all BUSY. Ends what was left of an earlier rollout."""
    state, actions = rollout_ended(state)
    workers = {name: replace(worker, phase="BUSY") for name, worker in state.workers.items()}
    return replace(state, workers=workers, is_rollout=True), actions


def rollout_ended(state: HarvestState) -> Decision:
    """Training stops at once, whatever it was doing; none begins before the next rollout."""
    state, actions = _end_session(state)
    return replace(state, is_rollout=False), actions


def worker_up(state: HarvestState, name: str, data_parallel_group: int = 0) -> Decision:
    """A new worker, BUSY until it says otherwise. Raises EngineError if it is up already."""
    if name in state.workers:
        raise EngineError(f"worker {name!r} is up already: report it lost before it comes up again")
    return _with(state, name, Worker(data_parallel_group, "BUSY")), ()


def worker_idle(state: HarvestState, name: str, settings: HarvestSettings) -> Decision:
    """A worker has nothing left to generate: it joins the session, or it may open one.

    Means nothing for a worker that is IDLE or TRAINING already (the late answer to an earlier stop). Raises EngineError
    if it is not up.
    """
    worker = _get(state, name)
    if worker.phase != "BUSY":
        return state, ()
    state = _with(state, name, replace(worker, phase="IDLE"))
    if state.leader is None:
        return _open_session(state, settings)
    is_full = len(state.named("TRAINING")) == settings.max_members
    if is_full or worker.data_parallel_group != state.workers[state.leader].data_parallel_group:
        return state, ()
    return _train(state, (name,)), (Action("join", name, state.session),)


def worker_needed(state: HarvestState, name: str, settings: HarvestSettings) -> Decision:
    """A worker gets responses again: it leaves the session at once. Raises EngineError if it is not up."""
    worker = _get(state, name)
    if name == state.leader:
        state, stops = _end_session(state)
    else:
        stops = (Action("stop", name, state.session),) if worker.phase == "TRAINING" else ()
    state, others = _fill_session(_with(state, name, replace(worker, phase="BUSY")), settings)
    return state, stops + others


def worker_lost(state: HarvestState, name: str, settings: HarvestSettings) -> Decision:
    """A worker is gone, and is told nothing. Raises EngineError if it is not up."""
    _get(state, name)
    stops: tuple[Action, ...] = ()
    if name == state.leader:
        state, stops = _end_session(state)
    rest = {other: worker for other, worker in state.workers.items() if other != name}
    state, others = _fill_session(replace(state, workers=rest), settings)
    return state, tuple(action for action in stops if action.worker != name) + others


def idle_threshold(num_workers: int, settings: HarvestSettings) -> int:
    """Idle workers that open a session in a fleet of `num_workers`."""
    return max(math.ceil(settings.idle_fraction * num_workers), settings.min_idle)


def _open_session(state: HarvestState, settings: HarvestSettings) -> Decision:
    """Open a session if there is none and enough are idle: the first of them to become idle leads, the others join.

    Of several data-parallel groups with enough, that of the worker that became idle first.
    """
    if state.leader is not None or not state.is_rollout:
        return state, ()
    least = idle_threshold(len(state.workers), settings)
    eligible: dict[int, list[str]] = {}
    for name in state.named("IDLE"):
        eligible.setdefault(state.workers[name].data_parallel_group, []).append(name)
    members = next((names for names in eligible.values() if len(names) >= least), None)
    if members is None:
        return state, ()
    members = members[: settings.max_members]
    session, leader = state.session + 1, members[0]
    joins = tuple(Action("join", name, session) for name in members[1:])
    state = replace(_train(state, members), session=session, leader=leader)
    return state, (Action("lead", leader, session), *joins)


def _fill_session(state: HarvestState, settings: HarvestSettings) -> Decision:
    """After a worker has left: those that found no place in the session take what is free, or open one."""
    if state.leader is None:
        return _open_session(state, settings)
    if settings.max_members is None:  # all that are idle have joined
        return state, ()
    group = state.workers[state.leader].data_parallel_group
    waiting = [name for name in state.named("IDLE") if state.workers[name].data_parallel_group == group]
    members = waiting[: max(settings.max_members - len(state.named("TRAINING")), 0)]
    return _train(state, members), tuple(Action("join", name, state.session) for name in members)


def _end_session(state: HarvestState) -> Decision:
    """Stop everyone in the session; the leader last, so that nobody waits for one that is gone."""
    members = sorted(state.named("TRAINING"), key=lambda name: name == state.leader)
    workers = {
        name: replace(worker, phase="IDLE") if worker.phase == "TRAINING" else worker
        for name, worker in state.workers.items()
    }
    stops = tuple(Action("stop", name, state.session) for name in members)
    return replace(state, workers=workers, leader=None), stops


def _train(state: HarvestState, names: Iterable[str]) -> HarvestState:
    training = {name: replace(state.workers[name], phase="TRAINING") for name in names}
    return replace(state, workers=state.workers | training)


def _with(state: HarvestState, name: str, worker: Worker) -> HarvestState:
    """The state with this worker behind the others."""
    others = {other: known for other, known in state.workers.items() if other != name}
    return replace(state, workers=others | {name: worker})


def _get(state: HarvestState, name: str) -> Worker:
    worker = state.workers.get(name)
    if worker is None:
        raise EngineError(
            f"worker {name!r} is not among the {len(state.workers)} that are up: report it up first"
        )
    return worker

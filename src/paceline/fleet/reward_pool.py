"""The reward pool: RewardScheduler's decisions carried out with Ray actors, one process for each reward worker.

Fleet owns it and waits on its `calls` together with those of the workers; it decides nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from paceline.config import RewardSettings
from paceline.fleet.rewards import (
    Replace,
    Reward,
    RewardAction,
    RewardFunction,
    RewardScheduler,
    Score,
    Settle,
)
from paceline.types import Response


@dataclass(frozen=True, slots=True)
class Scored:
    """A response with its reward."""

    index: int
    response: Response
    reward: Reward


class RewardWorker:
    """Lives in a process of its own, as a Ray actor."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def start(self) -> int:
        """Answers with the process id, once the process is up and has the function."""
        return os.getpid()

    def score(self, index: int, response: Response) -> Any:
        """What the function says."""
        return self._function(index, response)


@dataclass(frozen=True, slots=True)
class _Call:
    worker: int
    life: int
    is_start: bool


class RewardPool:
    """Scores responses by `function`. Close it."""

    def __init__(self, function: RewardFunction, settings: RewardSettings) -> None:
        self._function = ray.put(function)
        self._failure_reward = settings.failure_reward
        self._scheduler = RewardScheduler(settings)
        self._actors: dict[int, Any] = {}
        self._lives: dict[int, int] = {}
        self._processes: dict[int, int] = {}
        self._calls: dict[Any, _Call] = {}
        self._open: dict[int, tuple[int, Response]] = {}  # by ticket
        self._num_tickets = 0
        self._act(self._scheduler.open(time.monotonic()))

    @property
    def num_open(self) -> int:
        """Responses that have no reward yet."""
        return len(self._open)

    @property
    def calls(self) -> Iterable[Any]:
        """Ray references of what is being waited for."""
        return self._calls.keys()

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the reward workers that are up, each on its own node."""
        return tuple(self._processes.values())

    def add(self, index: int, response: Response) -> list[Scored]:
        """Score a finished response."""
        ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
        self._open[ticket] = index, response
        return self._act(self._scheduler.add(ticket, time.monotonic()))

    def fail(self, index: int, response: Response) -> Scored:
        """A response has failed: nothing is scored."""
        return Scored(index, response, Reward(self._failure_reward, f"it {response.failure}"))

    def take(self, ref: Any) -> list[Scored]:
        """One of `calls` has been answered. Where this is interrupted the call stays, and is taken the next time."""
        call, now_s = self._calls[ref], time.monotonic()
        try:
            value = ray.get(ref)
        except ray.exceptions.RayError as error:
            del self._calls[ref]
            has_raised = isinstance(error, ray.exceptions.RayTaskError) and not call.is_start
            tell = self._scheduler.raised if has_raised else self._scheduler.died
            return self._act(tell(call.worker, call.life, _reason(error), now_s))
        del self._calls[ref]
        if call.is_start:
            if self._lives[call.worker] == call.life:
                self._processes[call.worker] = value
            return self._act(self._scheduler.up(call.worker, call.life, now_s))
        return self._act(self._scheduler.returned(call.worker, call.life, value, now_s))

    def tick(self) -> list[Scored]:
        """Look at the clock."""
        return self._act(self._scheduler.tick(time.monotonic()))

    def clear(self) -> None:
        """Drop everything that is open."""
        self._open.clear()
        self._act(self._scheduler.clear(time.monotonic()))

    def close(self) -> None:
        """End all reward workers."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._calls.clear()
        self._open.clear()

    def _act(self, actions: list[RewardAction]) -> list[Scored]:
        settled = []
        for action in actions:
            match action:
                case Score(worker, life, ticket):
                    ref = self._actors[worker].score.remote(*self._open[ticket])
                    self._calls[ref] = _Call(worker, life, is_start=False)
                case Replace(worker, life):
                    self._replace(worker, life)
                case Settle(ticket, reward):
                    settled.append(Scored(*self._open.pop(ticket), reward))
        return settled

    def _replace(self, worker: int, life: int) -> None:
        self._processes.pop(worker, None)
        if worker in self._actors:
            ray.kill(self._actors[worker])
        actor = ray.remote(RewardWorker).options(num_cpus=0, max_restarts=0).remote(self._function)
        self._actors[worker], self._lives[worker] = actor, life
        self._calls[actor.start.remote()] = _Call(worker, life, is_start=True)


def _reason(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"

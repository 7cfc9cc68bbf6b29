"""Rewards while rolling out: finished responses are scored at once, each exactly once, whatever the function does.

`RewardScheduler` decides, `RewardPool` (reward_pool.py) carries out with Ray actors. What can go wrong has one outcome
each, and the response gets `RewardSettings.failure_reward` with the reason beside it:

* the function raises, or returns something that is no finite number: at once, for it would do so again;
* it takes longer than `timeout_s`: its worker is killed and replaced;
* its worker dies: scored again up to `max_crashes` times, for it may have been killed from outside. Idle workers
  are replaced first: that one has died too is only noticed when it is given something.

Time counts from when a worker is up: starting one, with everything that the function imports, has a limit of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import RewardSettings
from paceline.errors import EngineError
from paceline.types import Response

START_S = 300.0
"""A reward worker that is not up after so long is replaced."""

MOST_FAILED_STARTS = 5
"""So many starts in a row that came to nothing, of all workers together, end the rollout."""

RewardFunction = Callable[[int, Response], float]
"""Reward of a response, given its place among the requests. It is sent to other processes."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What became of scoring a response."""

    value: float | None
    """The reward; after a failure `failure_reward`."""
    failure: str | None = None
    """Why the function gave none; None: it did."""


@dataclass(slots=True)
class _WorkerState:
    """A reward worker."""

    life: int = 0
    is_up: bool = False
    ticket: int | None = None
    until_s: float = math.inf
    """When it has to be up, or to have scored its ticket."""


@dataclass(frozen=True, slots=True)
class Score:
    """Let a worker score a response."""

    worker: int
    life: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Replace:
    """Kill a worker, if it still lives, and start another in its place."""

    worker: int
    life: int
    """Of the new one."""


@dataclass(frozen=True, slots=True)
class Settle:
    """A response has its reward."""

    ticket: int
    reward: Reward


RewardAction = Score | Replace | Settle


class RewardScheduler:
    """Which reward worker scores what. No clock and no I/O; every call returns what to do, in order."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._states = [_WorkerState() for _ in range(settings.workers)]
        self._line: deque[int] = deque()
        self._num_crashes: dict[int, int] = {}  # of every ticket that is not settled
        self._num_failed_starts = 0

    @property
    def num_open(self) -> int:
        """Responses without a reward."""
        return len(self._num_crashes)

    def add(self, ticket: int, now_s: float) -> list[RewardAction]:
        """A response is finished. ticket: another one each time."""
        self._line.append(ticket)
        self._num_crashes[ticket] = 0
        return self._hand_out(now_s)

    def open(self, now_s: float) -> list[RewardAction]:
        """The pool begins: start all workers."""
        return [action for worker in range(len(self._states)) for action in self._replace(worker, now_s)]

    def up(self, worker: int, life: int, now_s: float) -> list[RewardAction]:
        """A worker has started."""
        state = self._states[worker]
        if state.life == life:
            state.is_up, state.until_s = True, math.inf
            self._num_failed_starts = 0
        return self._hand_out(now_s)

    def returned(self, worker: int, life: int, value: Any, now_s: float) -> list[RewardAction]:
        """A worker's function returned."""
        try:
            number = float(value)
        except Exception:  # whatever a function may return: a tensor, an integer beyond all floats
            number = math.nan
        if math.isfinite(number):
            return self._leave(worker, life, Reward(number), now_s)
        return self._leave(worker, life, self._failed(f"it returned {value!r:.80}"), now_s)

    def raised(self, worker: int, life: int, reason: str, now_s: float) -> list[RewardAction]:
        """A worker's function raised."""
        return self._leave(worker, life, self._failed(f"it raised {reason:.200}"), now_s)

    def died(self, worker: int, life: int, reason: str, now_s: float) -> list[RewardAction]:
        """A worker's process ended. Raises EngineError if none can be started."""
        state = self._states[worker]
        if state.life != life:
            return []
        ticket = state.ticket
        self._count_start(state, reason)
        actions = self._replace(worker, now_s)
        if ticket is not None:
            self._num_crashes[ticket] += 1
            crashes = self._num_crashes[ticket]
            if crashes <= self._settings.max_crashes:
                self._line.appendleft(ticket)
                for other, idle in enumerate(self._states):  # whatever ended that one may have ended them
                    if crashes == 1 and idle.is_up and idle.ticket is None:
                        actions += self._replace(other, now_s)
            else:
                actions.append(self._settle(ticket, self._failed(f"its process died, {crashes} times")))
        return [*actions, *self._hand_out(now_s)]

    def tick(self, now_s: float) -> list[RewardAction]:
        """Give up calls whose time is over. Raises EngineError if no worker can be started."""
        actions: list[RewardAction] = []
        for worker, state in enumerate(self._states):
            if now_s < state.until_s:
                continue
            ticket = state.ticket
            self._count_start(state, f"it was not up after {START_S:g} s")
            actions += self._replace(worker, now_s)
            if ticket is not None:
                late = self._failed(f"it took longer than {self._settings.timeout_s:g} s")
                actions.append(self._settle(ticket, late))
        return [*actions, *self._hand_out(now_s)]

    def clear(self, now_s: float) -> list[RewardAction]:
        """Nobody wants the open rewards; what is being scored is cut off. After starts that failed, who is not up is
        started anew.
        """
        has_failed = self._num_failed_starts > 0
        self._line.clear()
        self._num_crashes.clear()
        self._num_failed_starts = 0
        return [
            action
            for worker, state in enumerate(self._states)
            if state.ticket is not None or (has_failed and not state.is_up)
            for action in self._replace(worker, now_s)
        ]

    def _failed(self, reason: str) -> Reward:
        return Reward(self._settings.failure_reward, f"the reward function failed: {reason}")

    def _leave(self, worker: int, life: int, reward: Reward, now_s: float) -> list[RewardAction]:
        state = self._states[worker]
        if state.life != life or state.ticket is None:
            return []
        ticket, state.ticket, state.until_s = state.ticket, None, math.inf
        return [self._settle(ticket, reward), *self._hand_out(now_s)]

    def _settle(self, ticket: int, reward: Reward) -> Settle:
        del self._num_crashes[ticket]
        return Settle(ticket, reward)

    def _count_start(self, state: _WorkerState, reason: str) -> None:
        """A worker is gone: if it never was up, the function may be one that cannot be loaded."""
        if state.is_up:
            return
        self._num_failed_starts += 1
        if self._num_failed_starts >= MOST_FAILED_STARTS:
            raise EngineError(
                f"{self._num_failed_starts} reward workers in a row did not start, the last because {reason}: check "
                "that the reward function and what it imports can be loaded in another process"
            )

    def _replace(self, worker: int, now_s: float) -> list[RewardAction]:
        state = self._states[worker]
        state.life += 1
        state.ticket, state.is_up, state.until_s = None, False, now_s + START_S
        return [Replace(worker, state.life)]

    def _hand_out(self, now_s: float) -> list[RewardAction]:
        actions: list[RewardAction] = []
        for worker, state in enumerate(self._states):
            if self._line and state.is_up and state.ticket is None:
                state.ticket = self._line.popleft()
                state.until_s = now_s + self._settings.timeout_s
                actions.append(Score(worker, state.life, state.ticket))
        return actions

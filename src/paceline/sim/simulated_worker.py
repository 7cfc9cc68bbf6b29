"""A simulated engine: it advances its batch by whole stretches of rounds, not step by step.

A round is one verification (plain: one step). While the batch stays the same, request i gains rate_i tokens a round and
the context grows with them, so k rounds take

    k base_s + context_s (k C + k^2 R / 2),    C: context now, R: sum of the rates

and whatever comes next (a chunk ends, KV memory is full, acceptance changes) lies in closed form ahead. An event costs
O(batch) in NumPy, whatever the number of tokens between events.

Invariants: tokens never fall; a request is running or waiting here, or gone; the KV of what runs never exceeds
`EngineCosts.kv_tokens` (the request admitted last is preempted, and its context computed again, as in vLLM). With
data-parallel ranks, a request goes to the rank with the fewest and a step takes what the fullest rank takes; their KV
memory is one pool. Called by the rollout (`rollout.py`), with times that never go back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.sim.costs import EngineCosts
from paceline.sim.speculation import Batch, RoundPlan, Speculation
from paceline.types import Float64Array, Int64Array

_LEFT, _TOKENS, _CONTEXT = range(3)
_DONE: Final = 1e-6


class Job(NamedTuple):
    """A chunk of a response."""

    response: int
    tokens: float
    """Generated before."""
    chunk_tokens: float
    """To be generated here."""
    prompt_tokens: int
    is_resumed: bool
    """Its KV is in the pool, if there is one."""
    is_here: bool = False
    """Its last chunk has just ended here, so its KV is still in the engine's memory."""


class HomeChunk(NamedTuple):
    """A chunk that runs where the controller sent it."""

    worker: int
    chunk: int
    """The controller's number for it."""


@dataclass(slots=True)
class Counters:
    """What a worker has done."""

    generated_tokens: float = 0.0
    rounds: float = 0.0
    """Verifications, each request's counted."""
    drafted_tokens: float = 0.0
    accepted_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    preemptions: int = 0
    intervals: list[tuple[float, float]] = field(default_factory=list)
    """(from, to) of every time in which it had something to run."""

    @property
    def busy_s(self) -> float:
        """All these times together."""
        return sum((until_s - since_s for since_s, until_s in self.intervals), 0.0)


Rates = Callable[[Int64Array, Float64Array], Float64Array]
"""(responses, tokens so far of each) -> acceptance [num_drafters, num_requests]"""


class SimulatedWorker:
    """One engine."""

    def __init__(
        self,
        number: int,
        costs: EngineCosts,
        speculation: Speculation,
        rates: Rates,
        refresh_rounds: float = 512.0,
    ) -> None:
        """refresh_rounds: rounds after which acceptance and plan are looked at again though the batch is the same."""
        self.number = number
        self.costs = costs
        self.speculation = speculation
        self.counters = Counters()
        self.clock_s = 0.0
        """Until when its requests are advanced; ahead of the fleet's clock while it prefills."""
        self.responses: Int64Array = np.empty(0, dtype=np.int64)
        self.waiting: deque[Job] = deque()
        self._rates = rates
        self._refresh_rounds = refresh_rounds
        self._state: Float64Array = np.empty((3, 0))  # rows: _LEFT, _TOKENS, _CONTEXT
        self._acceptance: Float64Array | None = None
        self._plan: RoundPlan | None = None
        self._ranks: Int64Array = np.empty(0, dtype=np.int64)  # of what runs
        self._context: float | None = None  # sum of the row; None: to be found
        self._ahead: float | None = None  # see _rounds_ahead
        self._rounds_left = refresh_rounds
        self._busy_since = 0.0
        self._look = 0

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.responses)

    @property
    def is_free(self) -> bool:
        """Nothing runs or waits."""
        return not len(self.responses) and not self.waiting

    @property
    def acceptance(self) -> Float64Array:
        """Acceptance of every drafter for what runs, [num_drafters, num_running]."""
        if self._acceptance is None:
            self._acceptance = self._rates(self.responses, self._state[_TOKENS])
        return self._acceptance

    @property
    def tokens(self) -> Float64Array:
        """Tokens that each running response has. [num_running]"""
        return np.asarray(self._state[_TOKENS])

    def add(self, jobs: Sequence[Job], now_s: float) -> None:
        """Take chunks, in order; those that find no KV wait here. The worker must be advanced to `now_s`."""
        if self.is_free:
            self.clock_s = max(self.clock_s, now_s)
            self._busy_since = self.clock_s
        self.waiting.extend(jobs)
        self._admit()

    def delay(self, seconds: float, now_s: float) -> None:
        """It does nothing for so long (a drafter is loaded, weights are switched)."""
        self.clock_s = max(self.clock_s, now_s) + seconds

    def next_event_s(self) -> float:
        """When a chunk ends, KV memory is full, or acceptance has to be looked at again; inf: never."""
        if not len(self.responses):
            return math.inf
        return self.clock_s + self._seconds(self._rounds_ahead())

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        """Run until `now_s`, at most `next_event_s`; gives (response, tokens) of the chunks that ended."""
        if now_s <= self.clock_s or not len(self.responses):
            return []
        plan, ahead = self._planned(), self._rounds_ahead()
        rounds = min(self._rounds_in(now_s - self.clock_s), ahead)
        gained = plan.tokens * rounds
        self._state[_LEFT] -= gained
        self._state[_TOKENS] += gained
        self._state[_CONTEXT] += gained
        self._context = self._ahead = None
        self._count(plan, rounds, float(gained.sum()))
        self.clock_s = now_s
        self._rounds_left -= rounds
        ended = self._take_ended()
        if self._rounds_left <= _DONE * self._refresh_rounds:
            self.look_again()
        self._make_room()
        self._admit()
        return ended

    def remove(self, response: int) -> None:
        """Stop a response, wherever it is here."""
        at = np.flatnonzero(self.responses == response)
        if len(at):
            self._keep(self.responses != response)
            self._admit()
        else:
            self.waiting = deque(job for job in self.waiting if job.response != response)
        self._rest()

    def tokens_of(self, response: int) -> float | None:
        """Tokens that a response has here, running or waiting; None: it is not here."""
        at = np.flatnonzero(self.responses == response)
        if len(at):
            return float(self._state[_TOKENS, at[0]])
        return next((job.tokens for job in self.waiting if job.response == response), None)

    def catch_up(self, response: int, tokens: float) -> None:
        """A racer elsewhere has so many tokens of the response: go on from there."""
        at = np.flatnonzero(self.responses == response)
        if len(at) and tokens > self._state[_TOKENS, at[0]]:
            most = max(float(self._state[_LEFT, at[0]]) - 1.0, 0.0)
            gained = min(tokens - float(self._state[_TOKENS, at[0]]), most)
            self._state[_LEFT, at[0]] -= gained
            self._state[_TOKENS, at[0]] += gained
            self._state[_CONTEXT, at[0]] += gained
            self._context = self._ahead = None
            self._make_room()

    def look_again(self) -> None:
        """Acceptance may have changed."""
        self._acceptance = self._plan = self._ahead = None
        self._rounds_left = self._refresh_rounds
        self._look += 1

    @property
    def num_looks(self) -> int:
        """How often acceptance was looked at anew."""
        return self._look

    def close(self, now_s: float) -> None:
        """The rollout is over: a worker whose racers were stopped while it prefilled does not do the rest of that."""
        if not self.is_free:
            self.counters.intervals.append((self._busy_since, now_s))
        self.counters.intervals = [
            (since_s, min(until_s, now_s)) for since_s, until_s in self.counters.intervals if since_s < now_s
        ]

    @property
    def plan(self) -> RoundPlan:
        """The rounds of what runs."""
        return self._planned()

    def _planned(self) -> RoundPlan:
        if self._plan is None:
            batch = Batch(self.acceptance, self._context_tokens(), self._look)
            self._plan = self.speculation.plan(batch, self._step_costs())
        return self._plan

    def _step_costs(self) -> EngineCosts:
        """The costs of a step, of which every rank waits for the one with the most to do."""
        if self.costs.num_ranks == 1:
            return self.costs
        counts = np.bincount(self._ranks, minlength=self.costs.num_ranks)
        contexts = np.bincount(self._ranks, self._state[_CONTEXT], minlength=self.costs.num_ranks)
        return self.costs.skewed(float(counts.max() / counts.mean()), float(contexts.max() / contexts.mean()))

    def _rounds_ahead(self) -> float:
        """Rounds until the first of the events."""
        if self._ahead is None:
            plan = self._planned()
            ends = float((self._state[_LEFT] / plan.tokens).min())
            room = self.costs.kv_tokens - self._context_tokens()
            full = max(room, 0.0) / plan.sum_tokens if len(self.responses) > 1 else math.inf
            self._ahead = max(min(ends, full, self._rounds_left), 0.0)
        return self._ahead

    def _context_tokens(self) -> float:
        """Tokens of context of what runs, all together."""
        if self._context is None:
            self._context = float(self._state[_CONTEXT].sum())
        return self._context

    def _seconds(self, rounds: float) -> float:
        plan, context = self._planned(), self._context_tokens()
        return rounds * plan.base_s + plan.context_s * rounds * (context + 0.5 * rounds * plan.sum_tokens)

    def _rounds_in(self, seconds: float) -> float:
        """The inverse of `_seconds`."""
        plan, context = self._planned(), self._context_tokens()
        linear, square = plan.base_s + plan.context_s * context, 0.5 * plan.context_s * plan.sum_tokens
        if square <= 0.0:
            return seconds / linear
        return 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))

    def _count(self, plan: RoundPlan, rounds: float, gained: float) -> None:
        self.counters.generated_tokens += gained
        self.counters.rounds += rounds * len(self.responses)
        self.counters.drafted_tokens += rounds * plan.drafted_tokens
        if plan.drafted_tokens:
            self.counters.accepted_tokens += gained - rounds * plan.bonus_tokens

    def _take_ended(self) -> list[tuple[int, float]]:
        done = self._state[_LEFT] <= _DONE
        if not done.any():
            return []
        ended = list(
            zip(self.responses[done].tolist(), np.rint(self._state[_TOKENS, done]).tolist(), strict=True)
        )
        self._keep(~done)
        return ended

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.responses = self.responses[kept]
        self._ranks = self._ranks[kept]
        self._state = self._state[:, kept]
        if self._acceptance is not None:
            self._acceptance = self._acceptance[:, kept]
        self._plan = self._context = self._ahead = None

    def _make_room(self) -> None:
        """Preempt what was admitted last while the KV of the rest is full."""
        while len(self.responses) > 1 and self._context_tokens() >= self.costs.kv_tokens - _DONE:
            left, tokens, context = self._state[:, -1].tolist()
            self.waiting.appendleft(
                Job(int(self.responses[-1]), tokens, left, round(context - tokens), False)
            )
            kept = np.ones(len(self.responses), dtype=np.bool_)
            kept[-1] = False
            self._keep(kept)
            self.counters.preemptions += 1

    def _admit(self) -> None:
        """Begin what waits, first come first served, while its context fits (vLLM V1 keeps no room for growth)."""
        room = self.costs.kv_tokens - self._context_tokens()
        begun: list[Job] = []
        while self.waiting and len(self.responses) + len(begun) < self.costs.max_requests:
            context = self.waiting[0].prompt_tokens + self.waiting[0].tokens
            if context + 1 > room and (len(self.responses) or begun):
                break
            room -= context + 1
            begun.append(self.waiting.popleft())
        if begun:
            self._begin(begun)
        self._rest()

    def _begin(self, jobs: list[Job]) -> None:
        tokens = np.array([job.tokens for job in jobs])
        context = tokens + np.array([job.prompt_tokens for job in jobs])
        left = np.array([job.chunk_tokens for job in jobs])
        moves = self.costs.kv_load_token_s is not None
        here = np.array([job.is_here for job in jobs])
        resumed = np.array([job.is_resumed and moves for job in jobs])
        loaded, prefilled = float(context[resumed & ~here].sum()), float(context[~resumed & ~here].sum())
        self.clock_s += loaded * (self.costs.kv_load_token_s or 0.0) + prefilled * self.costs.prefill_token_s
        self.counters.prefilled_tokens += prefilled
        begun = np.array([job.response for job in jobs], dtype=np.int64)
        if self._acceptance is not None:
            self._acceptance = np.concatenate([self._acceptance, self._rates(begun, tokens)], axis=1)
        self.responses = np.concatenate([self.responses, begun])
        self._ranks = np.concatenate([self._ranks, self._free_ranks(len(begun))])
        self._state = np.concatenate([self._state, np.stack([left, tokens, context])], axis=1)
        self._plan = self._context = self._ahead = None

    def _free_ranks(self, count: int) -> Int64Array:
        """The ranks of `count` requests that begin: each goes to the one with the fewest, where it stays."""
        ranks = np.zeros(count, dtype=np.int64)
        if self.costs.num_ranks == 1:
            return ranks
        loads = np.bincount(self._ranks, minlength=self.costs.num_ranks)
        for at in range(count):
            ranks[at] = loads.argmin()
            loads[ranks[at]] += 1
        return ranks

    def _rest(self) -> None:
        """Note the end of a busy time."""
        if self.is_free and self._busy_since < self.clock_s:
            self.counters.intervals.append((self._busy_since, self.clock_s))
            self._busy_since = self.clock_s

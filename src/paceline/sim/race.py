"""Best-of-N and fastest-of-N in the simulated fleet: free workers run further drafters for the slowest responses.

Carries out SpecActor's algorithm 3 (`planning.racing`) in either version: which drafter a free worker runs, and whom it
serves. A racer is a copy of the response on another worker, with prefill (or a KV load) and deployment paid; the first
copy to end wins and the others are removed. A worker that gets responses of its own again lets its racers go.
`shares_progress` is ours: racers throw the same dice, so one that is behind goes on from the leader's tokens. Owned by
the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.planning.racing import Racer, RacingSnapshot, assign_fastest_of_n, deploy_drafters
from paceline.sim.simulated_worker import HomeChunk, Job, SimulatedWorker
from paceline.sim.speculation import Speculation
from paceline.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Racing:
    """How free workers race."""

    speculate: tuple[Callable[[], Speculation], ...]
    """How a worker speculates that runs the drafter of each ladder rank."""
    drafter_rows: tuple[int, ...]
    """The drafter of each rank, as a row of the acceptance rates."""
    home: Callable[[], Speculation]
    """How a worker speculates that gets responses of its own again."""
    max_batch: int
    """b_max, responses a racing worker may take."""
    deploy_s: float = 0.0
    """Until a free worker runs its drafter (model scale)."""
    first_rank: int = 0
    """Rank of the drafter that every response began with."""
    shares_progress: bool = False
    """Whether a racer that is behind goes on from the leader's tokens."""
    hosts_every: int = 0
    """Every how many-th free worker runs no racers but the drafters of those that do, the first one first; 0: none, as
    workers have drafters of their own."""
    assign: Callable[[RacingSnapshot, int], tuple[Racer, ...]] = assign_fastest_of_n
    """Whom the workers serve."""
    interval_s: float = 1.0
    """Seconds between two assignments at least."""


class RacedFleet(Protocol):
    """What a race needs of its fleet."""

    workers: list[SimulatedWorker]
    running: dict[int, HomeChunk]
    work: Workload

    def advance(self, worker: SimulatedWorker, now_s: float) -> None:
        """Bring a worker to the present."""

    def schedule(self, worker: SimulatedWorker) -> None:
        """Enter the worker's next event."""

    def call_again(self, at_s: float) -> None:
        """Enter a turn of the fleet."""


class Race:
    """The racers of one rollout."""

    def __init__(self, settings: Racing, fleet: RacedFleet) -> None:
        self.settings, self.fleet = settings, fleet
        self.num_racers = 0
        self._rank_of: dict[
            int, int
        ] = {}  # of workers that are there for racers: rank of the drafter they run
        self._hosts: set[int] = set()  # workers whose devices draft for racers
        self._since_s: dict[int, float] = {}
        self._spans: list[list[tuple[float, float]]] = [[] for _ in fleet.workers]
        self._racers: dict[int, list[int]] = {}  # by response: workers that race for it
        self._last_s = -math.inf

    def run(self, free: Iterable[int], now_s: float) -> None:
        """Workers have fallen free: deploy drafters on them, and assign racers, not more often than every interval."""
        for number in free:
            if number in self._rank_of or number in self._hosts:
                continue
            every = self.settings.hosts_every
            if every and len(self._hosts) * every <= len(self._rank_of) + len(self._hosts):
                self._hosts.add(number)
            else:
                self._deploy(self.fleet.workers[number], now_s)
        if not self._rank_of:
            return
        due_s = self._last_s + self.settings.interval_s
        if now_s >= due_s:
            self._last_s = now_s
            self._assign(now_s)
        elif free:
            self.fleet.call_again(due_s)

    def won(self, response: int, elsewhere: Iterable[int], now_s: float) -> None:
        """A response has ended: stop it everywhere else."""
        for number in sorted({*elsewhere, *self._racers.pop(response, ())}):
            worker = self.fleet.workers[number]
            self.fleet.advance(worker, now_s)
            worker.remove(response)
            self.fleet.schedule(worker)

    def comes_home(self, worker: SimulatedWorker, response: int, now_s: float) -> float:
        """A response begins its next chunk on a worker: if that is there for racers, these make room.

        Gives the tokens that the furthest copy of the response has, 0 without copies or where they are not shared.
        """
        self._hosts.discard(worker.number)
        racers = self._racers.get(response, ())
        copies = [self.fleet.workers[number].tokens_of(response) or 0.0 for number in racers]
        if worker.number in self._rank_of:
            for other in [*worker.responses.tolist(), *(job.response for job in worker.waiting)]:
                self._racers[other].remove(worker.number)
                worker.remove(other)
            del self._rank_of[worker.number]
            self._spans[worker.number].append((self._since_s.pop(worker.number), now_s))
            worker.speculation = self.settings.home()
        return max(copies, default=0.0) if self.settings.shares_progress else 0.0

    def share_progress(self, worker: SimulatedWorker, now_s: float) -> None:
        """Bring all copies of what the worker runs to the leader's tokens."""
        if not (self.settings.shares_progress and self._racers):
            return
        for response in [r for r in worker.responses.tolist() if self._racers.get(r)]:
            copies = [self.fleet.workers[at] for at in sorted(self._places(response))]
            for copy in copies:
                self.fleet.advance(copy, now_s)
            best = max((copy.tokens_of(response) or 0.0) for copy in copies)
            for copy in copies:
                copy.catch_up(response, best)
                self.fleet.schedule(copy)

    def close(self, now_s: float) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The rollout is over; gives (from, to) of the times in which each worker was there for racers."""
        for number, since_s in self._since_s.items():
            self._spans[number].append((since_s, now_s))
        return tuple(tuple(spans) for spans in self._spans)

    def _places(self, response: int) -> set[int]:
        home = self.fleet.running.get(response)
        return {*self._racers.get(response, ()), *([home.worker] if home is not None else ())}

    def _deploy(self, worker: SimulatedWorker, now_s: float) -> None:
        population = [0] * len(self.settings.speculate)
        population[self.settings.first_rank] = len(self.fleet.workers) - len(self._rank_of)
        for rank in self._rank_of.values():
            population[rank] += 1
        rank = deploy_drafters(1, population)[0]
        self._rank_of[worker.number] = rank
        self._since_s[worker.number] = now_s
        worker.speculation = self.settings.speculate[rank]()
        worker.delay(self.settings.deploy_s, now_s)

    def _assign(self, now_s: float) -> None:
        """Algorithm 3 over what runs at home, the workers that are there for racers and their drafters."""
        homes: dict[int, int] = {r: home.worker for r, home in self.fleet.running.items()}
        acceptance = self._observed(set(homes.values()), now_s)
        responses = [response for response in homes if response in acceptance]
        free = sorted(self._rank_of)
        if not responses:
            return
        row = {response: at for at, response in enumerate(responses)}
        is_drafting = np.zeros((len(responses), len(self.settings.speculate)), dtype=np.bool_)
        is_drafting[:, self.settings.first_rank] = True
        for response in responses:
            for number in self._racers.get(response, ()):
                is_drafting[row[response], self._rank_of[number]] = True
        workers = [self.fleet.workers[number] for number in free]
        loads = [worker.num_running + len(worker.waiting) for worker in workers]
        snapshot = RacingSnapshot(
            acceptance=np.array([acceptance[response] for response in responses]),
            is_drafting=is_drafting,
            worker_drafters=np.array([self._rank_of[number] for number in free], dtype=np.int64),
            worker_loads=np.array(loads, dtype=np.int64),
        )
        jobs: dict[int, list[Job]] = {}
        for racer in self.settings.assign(snapshot, self.settings.max_batch):
            response, number = responses[racer.request], free[racer.worker]
            self._racers.setdefault(response, []).append(number)
            jobs.setdefault(number, []).append(self._job(response, homes[response]))
            self.num_racers += 1
        for number, found in jobs.items():
            worker = self.fleet.workers[number]
            self.fleet.advance(worker, now_s)
            worker.add(found, now_s)
            self.fleet.schedule(worker)

    def _observed(self, homes: set[int], now_s: float) -> dict[int, float]:
        """Acceptance of the first drafter for everything that runs at home."""
        row = self.settings.drafter_rows[self.settings.first_rank]
        found: dict[int, float] = {}
        for number in sorted(homes):
            worker = self.fleet.workers[number]
            self.fleet.advance(worker, now_s)
            found.update(zip(worker.responses.tolist(), worker.acceptance[row].tolist(), strict=True))
            self.fleet.schedule(worker)
        return found

    def _job(self, response: int, home: int) -> Job:
        tokens = self.fleet.workers[home].tokens_of(response) or 0.0
        left = float(self.fleet.work.length_tokens[response]) - tokens
        prompt = int(self.fleet.work.prompt_tokens[response // self.fleet.work.group_size])
        return Job(response, tokens, left, prompt, True)

"""Fastest-of-N in the simulated fleet: workers that have fallen free run further drafters for the slowest responses.

Carries out SpecActor's algorithm 3 (`planning.racing`): which drafter a free worker runs, and whom it serves. A racer
is a copy of the response on another worker, with prefill (or a KV load) and deployment paid; the first copy to end
wins and the others are removed. `shares_progress` is ours: racers throw the same dice, so one that is behind goes on
from the leader's tokens. Owned by the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.planning.racing import RacingSnapshot, assign_best_of_n, assign_fastest_of_n, deploy_drafters
from paceline.sim.speculation import Speculation
from paceline.sim.worker import Job, SimulatedWorker


@dataclass(frozen=True, slots=True)
class Racing:
    """How free workers race."""

    speculate: tuple[Callable[[], Speculation], ...]
    """How a worker speculates that runs the drafter of each ladder rank."""
    drafter_rows: tuple[int, ...]
    """The drafter of each rank, as a row of the acceptance rates."""
    max_batch: int
    """b_max, responses a racing worker may take."""
    deploy_s: float = 0.0
    """Until a free worker runs its drafter (model scale)."""
    first_rank: int = 0
    """Rank of the drafter that every response began with."""
    is_best_of_n: bool = False
    """v1 of the paper (drafter by drafter) in place of v2 (response by response)."""
    shares_progress: bool = False
    """Whether a racer that is behind goes on from the leader's tokens."""
    interval_s: float = 1.0
    """Seconds between two assignments at least."""


class RacedFleet(Protocol):
    """What a race needs of its fleet."""

    workers: list[SimulatedWorker]
    running: dict[int, Any]
    work: Any

    def advance(self, worker: SimulatedWorker, now_s: float) -> None:
        """Bring a worker to the present."""

    def schedule(self, worker: SimulatedWorker) -> None:
        """Enter the worker's next event."""


class Race:
    """The racers of one rollout."""

    def __init__(self, settings: Racing, fleet: RacedFleet) -> None:
        self.settings, self.fleet = settings, fleet
        self.num_racers = 0
        self.since_s = [math.inf] * len(fleet.workers)
        self._rank_of: dict[int, int] = {}  # workers that fell free: the rank of the drafter they run
        self._racers: dict[int, list[int]] = {}  # by response: workers that race for it
        self._last_s = -math.inf

    def freed(self, worker: SimulatedWorker, now_s: float) -> None:
        """A worker has nothing to do: deploy a drafter on it, and assign racers to all that have room."""
        if worker.number not in self._rank_of:
            self._deploy(worker, now_s)
        if now_s >= self._last_s + self.settings.interval_s:
            self._last_s = now_s
            self._assign(now_s)

    def won(self, response: int, elsewhere: Iterable[int], now_s: float) -> None:
        """A response has ended: stop it everywhere else."""
        for number in {*elsewhere, *self._racers.pop(response, ())}:
            worker = self.fleet.workers[number]
            self.fleet.advance(worker, now_s)
            worker.remove(response)
            self.fleet.schedule(worker)

    def comes_home(self, worker: SimulatedWorker, responses: Iterable[int]) -> None:
        """The next chunk of a response begins on a worker that may be racing for it."""
        for response in responses:
            racers = self._racers.get(response, [])
            if worker.number in racers:
                racers.remove(worker.number)
                worker.remove(response)

    def share_progress(self, worker: SimulatedWorker, now_s: float) -> None:
        """Bring all copies of what the worker runs to the leader's tokens."""
        if not (self.settings.shares_progress and self._racers):
            return
        for response in [r for r in worker.responses.tolist() if r in self._racers]:
            copies = [self.fleet.workers[at] for at in self._places(response)]
            for copy in copies:
                self.fleet.advance(copy, now_s)
            best = max(copy.tokens_of(response) for copy in copies)
            for copy in copies:
                copy.catch_up(response, best)
                self.fleet.schedule(copy)

    def _places(self, response: int) -> set[int]:
        home = self.fleet.running.get(response)
        return {*self._racers.get(response, ()), *([int(home.worker)] if home is not None else ())}

    def _deploy(self, worker: SimulatedWorker, now_s: float) -> None:
        population = [0] * len(self.settings.speculate)
        population[self.settings.first_rank] = len(self.fleet.workers) - len(self._rank_of)
        for rank in self._rank_of.values():
            population[rank] += 1
        rank = deploy_drafters(1, population)[0]
        self._rank_of[worker.number] = rank
        worker.speculation = self.settings.speculate[rank]()
        worker.delay(self.settings.deploy_s, now_s)
        self.since_s[worker.number] = now_s

    def _assign(self, now_s: float) -> None:
        """Algorithm 3 over what runs at home, the workers that fell free and their drafters."""
        homes: dict[int, int] = {r: int(a.worker) for r, a in self.fleet.running.items()}
        acceptance = self._observed(set(homes.values()), now_s)
        responses = [r for r in homes if r in acceptance and homes[r] not in self._rank_of]
        if not responses:
            return
        row = {response: at for at, response in enumerate(responses)}
        is_drafting = np.zeros((len(responses), len(self.settings.speculate)), dtype=np.bool_)
        is_drafting[:, self.settings.first_rank] = True
        for response in responses:
            for number in self._racers.get(response, ()):
                is_drafting[row[response], self._rank_of[number]] = True
        free = sorted(self._rank_of)
        snapshot = RacingSnapshot(
            acceptance=np.array([acceptance[response] for response in responses]),
            is_drafting=is_drafting,
            worker_drafters=np.array([self._rank_of[number] for number in free], dtype=np.int64),
            worker_loads=np.array(
                [self.fleet.workers[number].num_running for number in free], dtype=np.int64
            ),
        )
        assign = assign_best_of_n if self.settings.is_best_of_n else assign_fastest_of_n
        jobs: dict[int, list[Job]] = {}
        for racer in assign(snapshot, self.settings.max_batch):
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
        for number in homes:
            worker = self.fleet.workers[number]
            self.fleet.advance(worker, now_s)
            found.update(zip(worker.responses.tolist(), worker.acceptance[row].tolist(), strict=True))
            self.fleet.schedule(worker)
        return found

    def _job(self, response: int, home: int) -> Job:
        tokens = self.fleet.workers[home].tokens_of(response)
        left = float(self.fleet.work.length_tokens[response]) - tokens
        prompt = int(self.fleet.work.prompt_tokens[response // self.fleet.work.group_size])
        return Job(response, tokens, left, prompt, True)

"""A simulated rollout: workers, and the decisions that steer them, on one clock.

The loop takes the next event of any worker, advances that worker, tells the controller what ended and carries out what
it decides. The controller (`control.controller`) is the live fleet's own. Workers that are free may join a race
(`planning.racing`) or train the drafter (`planning.harvest`). Invariants: every response ends exactly once; whatever is
brought to the present may end something, so a turn is over only when nothing more has ended; time never goes back; the
same arguments give the same result. Called by `step.py` and the benchmarks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    Action,
    Deliver,
    Ending,
    Event,
    Fail,
    Keep,
    Opened,
    Report,
    Reported,
    RunChunk,
    StartWorker,
    Submitted,
    WorkerUp,
)
from paceline.control.packed import Digest, Packed
from paceline.errors import ConfigError
from paceline.planning.dispatch import DispatchSettings
from paceline.planning.harvest import HarvestSettings
from paceline.record import measure_tail
from paceline.sim.acceptance_model import AcceptanceModel
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.counted_response import CountedResponse, make_requests
from paceline.sim.drafter_training import Training
from paceline.sim.help import Helpers, Helping
from paceline.sim.race import Race, Racing
from paceline.sim.simulated_worker import Counters, HomeChunk, Job, SimulatedWorker
from paceline.sim.speculation import Speculation
from paceline.sim.workload import Workload
from paceline.types import Float64Array, Int64Array

_TIMER = -1
_ENDLESS = 1 << 40  # KV blocks and concurrency of a worker that queues for itself


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One way to run a rollout. Raises ConfigError without workers."""

    engine: EngineCosts
    num_workers: int
    dispatch: DispatchSettings
    speculate: Callable[[], Speculation]
    drafters: tuple[Drafter, ...] = ()
    racing: Racing | None = None
    helpers: Helpers | None = None
    """Free workers help as in a live fleet; not beside `racing`."""
    harvest: HarvestSettings | None = None
    refresh_rounds: float = 512.0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(
                f"no worker fits: an engine takes {self.engine.num_gpus} GPUs, beside those of its drafter: give more"
            )


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout took."""

    rollout_s: float
    end_s: Float64Array  # [num_responses] when each ended
    tail_s: float
    """From 90 % of the responses ended to the end."""
    counters: tuple[Counters, ...]  # of each worker
    racing: tuple[
        tuple[tuple[float, float], ...], ...
    ]  # of each worker: (from, to) of the times it was there for racers
    training_s: float
    """Worker seconds spent on training the drafter."""
    num_racers: int
    num_helps: int = 0
    """How often a free worker began to draft for another one."""

    @property
    def idle_share(self) -> float:
        """Share of the workers' time in which nothing ran."""
        busy_s = sum(one.busy_s for one in self.counters)
        return max(1.0 - busy_s / (self.rollout_s * len(self.counters)), 0.0)  # sums are rounded

    @property
    def wasted_tokens(self) -> float:
        """Draft tokens that were not accepted."""
        return sum(one.drafted_tokens - one.accepted_tokens for one in self.counters)

    @property
    def preemptions(self) -> int:
        """Requests that lost their KV while they ran."""
        return sum(one.preemptions for one in self.counters)


def simulate_rollout(plan: FleetPlan, workload: Workload, seed: int = 0) -> RolloutResult:
    """Run one rollout. Raises RequestError if a response fits on no worker."""
    return _Fleet(plan, workload, seed).run()


class _Fleet:
    def __init__(self, plan: FleetPlan, workload: Workload, seed: int) -> None:
        self.plan, self.work = plan, workload
        processes = tuple(drafter.acceptance for drafter in plan.drafters)
        self.acceptance = AcceptanceModel(processes, workload.group_size, workload.num_responses, seed)
        self.group_tokens = np.zeros(workload.num_groups)
        self.known_to_trees = np.zeros(workload.num_responses)  # tokens that suffix trees know of
        self.told = [0] * workload.num_responses  # tokens that the controller knows of
        self.workers = [
            SimulatedWorker(at, plan.engine, plan.speculate(), self.rates, plan.refresh_rounds)
            for at in range(plan.num_workers)
        ]
        self.events: list[tuple[float, int, int]] = []  # time, worker or _TIMER, version
        self.versions = [0] * plan.num_workers
        self.ends: deque[tuple[SimulatedWorker, int, float]] = (
            deque()
        )  # chunks that ended and were not told yet
        self.actions: deque[Action] = deque()  # decided and not carried out yet
        self.free: set[int] = set()  # workers that have fallen free since anyone looked
        self.controller = Controller(
            FleetSettings.model_construct(  # unchecked: a simulated fleet may be larger than a live one
                workers=plan.num_workers,
                variant=plan.dispatch.variant,
                chunk_tokens=plan.dispatch.chunk_tokens,
                guard_interval=plan.dispatch.guard_interval,
                help="none",
            ),
            CountedResponse,
        )
        self.numbers = {name: number for number, name in enumerate(self.controller.workers)}
        self.names = self.controller.workers
        self.running: dict[int, HomeChunk] = {}  # by response
        self.left: dict[int, tuple[int, float]] = {}  # by response: where its last chunk ended, and when
        self.end_s = np.zeros(workload.num_responses)
        self.num_left = workload.num_responses
        self.race = Race(plan.racing, self) if plan.racing else None
        self.helping = Helping(plan.helpers, self) if plan.helpers else None
        self.training = Training(plan.harvest, plan.num_workers) if plan.harvest else None

    def run(self) -> RolloutResult:
        now_s = 0.0
        self.free.update(range(len(self.workers)))
        self._begin()
        self._settle(now_s)
        while self.num_left:
            now_s, number, version = heappop(self.events)
            if number == _TIMER:
                self._settle(now_s)
            elif version == self.versions[number]:
                self._turn(self.workers[number], now_s)
        assert self.race or not self.controller.num_unfinished
        for worker in self.workers:
            worker.close(now_s)
        return RolloutResult(
            rollout_s=now_s,
            end_s=self.end_s,
            tail_s=measure_tail(self.end_s.tolist()),
            counters=tuple(worker.counters for worker in self.workers),
            racing=self.race.close(now_s) if self.race else ((),) * len(self.workers),
            training_s=self.training.end(now_s) if self.training else 0.0,
            num_racers=self.race.num_racers if self.race else 0,
            num_helps=self.helping.num_helps if self.helping else 0,
        )

    def advance(self, worker: SimulatedWorker, now_s: float) -> None:
        """Bring a worker to the present; what ends on it is told before the turn is over."""
        self.ends.extend((worker, *ended) for ended in worker.advance(now_s))

    def rates(self, responses: Int64Array, tokens: Float64Array) -> Float64Array:
        """Acceptance now, [num_drafters, num_requests]; suffix trees know what was reported."""
        others = self.group_tokens[responses // self.work.group_size] - self.known_to_trees[responses]
        siblings = np.maximum(others, 0.0) / np.maximum(tokens, 64.0)
        rows = [
            self.acceptance.rates(at, responses, tokens, siblings) for at in range(len(self.plan.drafters))
        ]
        return np.array(rows) if rows else np.empty((0, len(responses)))

    def schedule(self, worker: SimulatedWorker) -> None:
        """Enter the worker's next event; to be called after every change to it."""
        self.versions[worker.number] += 1
        next_s = worker.next_event_s()
        if next_s < math.inf:
            heappush(self.events, (next_s, worker.number, self.versions[worker.number]))
        if worker.is_free:
            self.free.add(worker.number)

    def call_again(self, at_s: float) -> None:
        """Enter a turn at this time even if no worker has one."""
        heappush(self.events, (at_s, _TIMER, 0))

    def _turn(self, worker: SimulatedWorker, now_s: float) -> None:
        look = worker.num_looks
        self.advance(worker, now_s)
        if worker.num_looks != look:
            self._feed_trees(worker)
            if self.race:
                self.race.share_progress(worker, now_s)
        self.schedule(worker)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Tell what ended, carry out what is decided, and look after free workers, until nothing more ends."""
        while True:
            self._tell_ends(now_s)
            self._carry_out(now_s)
            if not self.ends:
                self._look_after_free(now_s)
            if not self.ends:
                return

    def _feed_trees(self, worker: SimulatedWorker) -> None:
        """What the worker has generated reaches the suffix trees of all."""
        gained = np.maximum(worker.tokens - self.known_to_trees[worker.responses], 0.0)
        np.add.at(self.group_tokens, worker.responses // self.work.group_size, gained)
        self.known_to_trees[worker.responses] += gained

    def _tell_ends(self, now_s: float) -> None:
        """The controller is told which chunks have ended, worker by worker."""
        endings: dict[int, list[Ending]] = {}
        while self.ends:
            worker, response, tokens = self.ends.popleft()
            if not self.end_s[response]:
                home = self._ended(worker, response, tokens, now_s)
                if home is not None:  # None: a racer finished what waits for its next chunk, see _carry_out
                    endings.setdefault(home.worker, []).append(self._make_ending(home, response, int(tokens)))
            self.schedule(worker)
        for number, found in endings.items():
            self._tell_endings(number, found)

    def _ended(self, worker: SimulatedWorker, response: int, tokens: float, now_s: float) -> HomeChunk | None:
        """A chunk ended, or a racer's copy of the response; gives where the response is at home."""
        group = response // self.work.group_size
        self.group_tokens[group] += max(tokens - self.known_to_trees[response], 0.0)
        self.known_to_trees[response] = max(tokens, self.known_to_trees[response])
        home = self.running.pop(response, None)
        self.left[response] = worker.number, now_s
        if tokens >= self.work.length_tokens[response]:
            self.end_s[response] = now_s
            self.num_left -= 1
            if self.race:
                elsewhere = {home.worker} - {worker.number} if home is not None else set()
                self.race.won(response, elsewhere, now_s)
        return home

    def _make_ending(self, home: HomeChunk, response: int, tokens: int) -> Ending:
        """What the home tells of its chunk; counts it as told."""
        start, self.told[response] = self.told[response], tokens
        reason = "stop" if tokens >= self.work.length_tokens[response] else "length"
        return Ending(home.chunk, start, tokens - start, Packed(), Digest(), 0, 0, reason)

    def _tell_endings(self, number: int, endings: list[Ending]) -> None:
        self._tell(Reported(self.names[number], 0, Report(0, endings=tuple(endings))))

    def _tell(self, event: Event) -> None:
        """Raises what the controller finds impossible."""
        for action in self.controller.decide(event):
            if isinstance(action, Fail):
                raise action.error(action.message)
            self.actions.append(action)

    def _carry_out(self, now_s: float) -> None:
        """Do what the controller decided: run chunks. It hears at once of those that a racer has finished already."""
        jobs: dict[int, list[Job]] = {}
        while self.actions:
            action = self.actions.popleft()
            if not isinstance(action, RunChunk):
                # Nothing to do: all workers are up, and nothing is kept.
                assert isinstance(action, StartWorker | Keep | Deliver), action
                continue
            response, worker = action.index, self.workers[self.numbers[action.worker]]
            home = HomeChunk(worker.number, action.chunk)
            if self.end_s[response]:
                ending = self._make_ending(home, response, int(self.work.length_tokens[response]))
                self._tell_endings(worker.number, [ending])
                continue
            if worker.number not in jobs:
                self.advance(worker, now_s)
            so_far = float(self.known_to_trees[response])
            if self.race:
                so_far = max(so_far, self.race.comes_home(worker, response, now_s))
            self.running[response] = home
            is_here = self.left.get(response) == (worker.number, now_s)
            jobs.setdefault(worker.number, []).append(self._job(action, so_far, is_here))
        for number, found in jobs.items():
            worker = self.workers[number]
            if self.helping:
                self.helping.needed(number, now_s)
            if self.training and worker.is_free:
                self.training.needed(number, now_s)
            self.free.discard(number)
            worker.add(found, now_s)
            self.schedule(worker)

    def _job(self, order: RunChunk, so_far: float, is_here: bool) -> Job:
        """The chunk, as far as the controller ordered it; what racers have generated of it need not be again."""
        end = float(min(self.work.length_tokens[order.index], order.request.max_tokens))
        so_far = min(so_far, end - 1.0)
        return Job(order.index, so_far, end - so_far, len(order.request.prompt), so_far > 0.0, is_here)

    def _look_after_free(self, now_s: float) -> None:
        """Workers that have fallen free race, or train."""
        free = sorted(self.free)
        self.free.clear()
        if self.training:
            for number in free:
                self.training.idle(number, now_s)
        if self.helping and self.num_left and not self.controller.num_waiting:
            self.helping.run(now_s)
        if self.race and self.num_left and not self.controller.num_waiting:
            self.race.run(free, now_s)
        elif self.race:
            self.free.update(free)

    def _begin(self) -> None:
        """All workers are up, and the rollout is submitted."""
        engine, dispatch = self.plan.engine, self.plan.dispatch
        queues = dispatch.variant == "group"
        blocks = _ENDLESS if queues else engine.kv_tokens // dispatch.block_tokens
        seats = _ENDLESS if queues else engine.max_requests
        self._tell(Opened())
        for name in self.names:
            self._tell(WorkerUp(name, 0, 0, blocks, dispatch.block_tokens, seats))
        truth = tuple(self.work.length_tokens.tolist()) if dispatch.variant == "oracle" else ()
        self._tell(Submitted(make_requests(self.work), true_lengths=truth))

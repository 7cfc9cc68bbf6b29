"""The controller under random orders of events: losses, late and doubled reports, silence, new and missed weights, and
free workers that copy and take over what others generate.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import make_ending, make_growths, pack

from paceline.config import FleetSettings, Variant
from paceline.control import helping
from paceline.control.controller import MOST_FAILURES, Controller
from paceline.control.events import (
    Abandoned,
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    EndTraining,
    Event,
    Fail,
    Growth,
    Growths,
    Keep,
    Kept,
    LoadWeights,
    Opened,
    Report,
    Reported,
    RunChunk,
    StartWorker,
    StopWorker,
    Submitted,
    Tick,
    TrainDrafter,
    WeightsChanged,
    WeightsLoaded,
    WorkerLost,
    WorkerUp,
)
from paceline.control.helping import Helping, Standing
from paceline.control.packed import Packed
from paceline.errors import EngineError
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.controller_log import open_log
from paceline.fleet.controller_replay import replay_controller
from paceline.planning.help import Ends, Help, HelpChoice, Helper, Load
from paceline.record.decisions import DecisionReader
from paceline.types import Progress, Response, RolloutRequest, StepCosts

BLOCK, LIMIT, CHUNK = 4, 40, 8
SILENCE_S = 2.0  # ticks come less than a second apart, so all of the time counts
seeds = st.integers(0, 2**32 - 1)


def token(key: int, version: int, place: int) -> int:
    """What the engines generate: a pure function, as the dice make it."""
    return (key * 7919 + version * 104729 + place * 31) % 1000


@dataclass
class Running:
    """A chunk on a simulated worker."""

    order: RunChunk
    num_made: int = 0
    num_told: int = 0


@dataclass
class Worker:
    """A simulated worker."""

    life: int
    version: int | None = None  # None: the engine is starting
    loads: list[int] = field(default_factory=list)
    """Versions that it was given and has not answered, in order."""
    chunks: dict[int, Running] = field(default_factory=dict)
    num_steps: int = 0
    progress: Progress = field(default_factory=Progress)
    is_stale: bool = False
    """Its weights are not those that it told of: it refuses every chunk."""
    has_run: bool = False
    has_generated: bool = False
    is_broken: bool = False
    """It gives up whatever it runs."""


@dataclass
class World:
    """A fleet in memory that checks the controller's promises at every event."""

    controller: Controller
    lengths: list[int]
    rng: random.Random
    rooms: dict[str, tuple[int, int]]
    failing: set[int] = field(default_factory=set)
    """Responses that the engines give up midway."""
    has_broken: bool = False
    """Some workers, in some lives, give up whatever they run."""
    version: int = 0
    workers: dict[str, Worker] = field(default_factory=dict)
    requests: tuple[RolloutRequest, ...] = ()
    delivered: dict[int, Response] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    told: list[Event] = field(default_factory=list)
    now_s: float = 0.0
    num_lives: Counter[str] = field(default_factory=Counter)
    num_given: Counter[int] = field(default_factory=Counter)  # tokens that a response's chunks began with
    num_held: Counter[int] = field(default_factory=Counter)  # tokens of a response that have arrived
    owners: dict[int, str] = field(default_factory=dict)  # workers of the chunks that run
    indices: dict[int, int] = field(default_factory=dict)  # responses of all chunks
    num_fruitless: Counter[str] = field(default_factory=Counter)  # lives in a row, by worker
    num_crashes: Counter[int] = field(
        default_factory=Counter
    )  # workers in a row that it alone had just begun on
    suspects: set[int] = field(default_factory=set)  # responses
    fatal: set[int] = field(default_factory=set)  # responses whose prompt has ended workers
    proven: set[str] = field(default_factory=set)  # workers that may blame a response
    failed: dict[int, set[tuple[str, int]]] = field(default_factory=dict)  # places where responses failed
    num_failed: Counter[int] = field(default_factory=Counter)  # times that each did
    verdicts: dict[int, tuple[str, int, int]] = field(
        default_factory=dict
    )  # the last one, until it is refuted: place, end
    has_buried: bool = False  # a worker, in this rollout
    alone: set[int] = field(default_factory=set)  # responses that failed where no other worker was up
    failure: Fail | None = None
    num_helps: Counter[Help | None] = field(default_factory=Counter)
    trainers: dict[str, int] = field(default_factory=dict)  # workers that train the drafter, and their lives
    most_trainers: int = 1
    num_trained: int = 0  # events after which one did
    log: ChunkLog = field(default_factory=ChunkLog)
    clock_s: float = 0.0

    @property
    def settings(self) -> FleetSettings:
        return self.controller._settings

    @property
    def is_over(self) -> bool:
        """Every worker was lost too often."""
        return all(self.num_fruitless[name] >= self.settings.max_failed_starts for name in self.rooms)

    def truth(self, index: int) -> tuple[int, ...]:
        key = self.requests[index].key
        assert key is not None
        return tuple(token(key, self.version, place) for place in range(self.lengths[index]))

    def hear(self, event: Event) -> None:
        """What of a report is new."""
        if not isinstance(event, Reported) or event.life != self.num_lives[event.worker] - 1:
            return
        for growth in event.report.growths:
            self.take(event.worker, growth.chunk, growth.start, len(growth.piece))
        for ending in event.report.endings:
            num_told = ending.num_tokens - len(ending.rest)
            if self.owners.get(ending.chunk) == event.worker:
                if ending.failure is None or ending.num_tokens > 0:
                    self.prove(event.worker)
                if ending.failure is not None:
                    self.note_failure(
                        self.indices[ending.chunk], event.worker, ending.start + ending.num_tokens
                    )
                self.take(event.worker, ending.chunk, ending.start + num_told, len(ending.rest))
                del self.owners[ending.chunk]

    def prove(self, name: str) -> None:
        self.workers[name].has_generated = True
        self.proven.add(name)

    def take(self, name: str, chunk: int, start: int, count: int) -> None:
        """Tokens of a chunk arrived: they count unless something before them is missing."""
        index = self.indices.get(chunk, -1)
        if self.owners.get(chunk) == name and start <= self.num_held[index] < start + count:
            self.num_held[index] = start + count
            self.num_crashes[index] = 0
            self.suspects.discard(index)
            self.fatal.discard(index)
            self.prove(name)
            if index in self.verdicts and self.num_held[index] > self.verdicts[index][-1]:
                del self.verdicts[index]

    def tell(self, event: Event) -> None:
        self.clock_s += 1.0
        self.log.hear(event, self.clock_s)
        self.hear(event)
        goes_on = self.goes_on()
        actions = self.controller.decide(event)
        self.log.note(actions, self.clock_s)
        leaders: list[str | None] = []
        for action in actions:
            match action:
                case StartWorker(name, life):
                    assert name not in self.workers
                    assert self.num_fruitless[name] < self.settings.max_failed_starts
                    assert life == self.num_lives[name], "each life has a number of its own"
                    self.num_lives[name] += 1
                    self.workers[name] = Worker(life)
                case StopWorker(name, life):
                    assert self.workers[name].life == life
                    is_broken = isinstance(event, Reported) and event.worker != name
                    waits = isinstance(event, Tick) and self.workers[name].version is None and goes_on
                    self.bury(name, blames=not is_broken, is_fruitless=not waits)
                case LoadWeights(name, life, version):
                    assert self.workers[name].life == life
                    assert version > 0, "nobody has the weights of the checkpoint"
                    assert not self.workers[name].chunks, "an engine that generates cannot load"
                    self.workers[name].loads.append(version)
                case RunChunk():
                    self.begin(action)
                case Adopt(name, life, number, start, tokens):
                    assert self.workers[name].life == life
                    assert number in self.workers[name].chunks
                    told = tuple(array("i", tokens))
                    assert told == self.truth(self.indices[number])[start : start + len(told)] != ()
                case CancelChunk(name, life, number):
                    assert self.workers[name].life == life
                    self.workers[name].chunks.pop(number, None)
                    self.owners.pop(number, None)
                case TrainDrafter(name, life, leader):
                    assert name not in self.trainers
                    self.trainers[name] = life
                    assert len(self.trainers) <= self.most_trainers
                    leaders.append(leader)
                case EndTraining(name, life, leader):
                    assert self.trainers.pop(name) == life
                    leaders.append(leader)
                case Keep():
                    self.keep(action)
                case Deliver(index, response):
                    assert index not in self.delivered
                    self.check_response(index, response)
                    assert response.policy_version == self.version
                    self.delivered[index] = response
                case Fail():
                    self.fail(action)
        assert all(len(worker.loads) <= 1 for worker in self.workers.values())
        if leaders:
            assert leaders[-1] in (self.trainers or {None})
        for name, life in self.trainers.items() if not self.failure else ():
            assert (self.workers[name].life, self.workers[name].chunks) == (life, {})
            assert self.controller.num_unfinished
            self.num_trained += 1
        for worker in self.controller._workers.values():
            copies = [number for number, chunk in worker.chunks.items() if chunk.response.owner != number]
            assert worker.copies == copies
        for name in set(self.rooms) - set(self.workers):
            assert self.failure or self.num_fruitless[name] >= self.settings.max_failed_starts
        self.check_rooms()

    def check_response(self, index: int, response: Response) -> None:
        if response.failure is None:
            assert response.tokens == self.truth(index)
            return
        assert self.settings.on_failure == "deliver"
        assert response.finish_reason == "error"
        assert response.tokens == self.truth(index)[: len(response.tokens)]
        if "got no token" in response.failure:
            assert self.num_crashes[index] == self.settings.max_crashes + 1
        else:
            assert "NaN" in response.failure
            often = self.num_failed[index] == MOST_FAILURES  # on one worker, as each other one was lost first
            assert len(self.failed[index]) > 1 or index in self.alone or often
            assert index in self.failing or self.has_broken

    def note_failure(self, index: int, name: str, end: int) -> None:
        place = name, self.workers[name].life
        self.failed.setdefault(index, set()).add(place)
        self.num_failed[index] += 1
        self.verdicts[index] = *place, end
        if self.up() == {name} or self.settings.variant == "group":
            self.alone.add(index)

    def up(self) -> set[str]:
        return {name for name, one in self.workers.items() if one.version == self.version and not one.loads}

    def goes_on(self) -> bool:
        """Whether others generate, or could: a worker that has not started may wait for room."""
        if self.controller.num_unfinished:
            return any(worker.chunks for worker in self.workers.values())
        return bool(self.up())

    def bury(self, name: str, *, blames: bool = True, is_fruitless: bool = True) -> int:
        """A worker's life is over: what follows from it, by the rules of FleetSettings. Gives its number.

        blames: what had begun there may have ended it, not what another worker has said of it.
        """
        worker = self.workers.pop(name)
        self.has_buried = True
        self.owners = {chunk: owner for chunk, owner in self.owners.items() if owner != name}
        is_up = worker.version is not None and not worker.loads
        new = self.new_on(worker) if blames else set()
        self.suspects |= new
        is_blamed = len(new) == 1 and (name in self.proven or new <= self.fatal)
        if is_blamed:
            self.blame(worker, name, *new)
        if worker.has_generated:
            self.num_fruitless[name] = 0
        elif is_blamed:
            pass
        elif is_fruitless and (not is_up or worker.has_run):
            self.num_fruitless[name] += 1
        return worker.life

    def blame(self, worker: Worker, name: str, index: int) -> None:
        """A response has ended a worker. Too many, and its prompt is taken to be what ends them."""
        self.num_crashes[index] += 1
        if self.num_crashes[index] <= self.settings.max_crashes:
            return
        if not worker.has_generated and index not in self.fatal:
            self.proven.discard(name)
        if self.num_held[index] == 0:
            request = self.requests[index]
            for other, one in enumerate(self.requests):
                if one.group == request.group and other != index and not self.num_held[other]:
                    self.suspects.add(other)
                    self.fatal.add(other)
                    self.num_crashes[other] = self.settings.max_crashes

    def new_on(self, worker: Worker) -> set[int]:
        """The responses whose chunks there have brought no token yet."""
        orders = [running.order for running in worker.chunks.values() if running.order.help is not Help.COPY]
        found = {self.index_of(order): len(order.request.generated) for order in orders}
        return {index for index, begin in found.items() if self.num_held[index] == begin}

    def fail(self, failure: Fail) -> None:
        assert failure.error is EngineError
        self.failure = failure
        if "no worker is left" in failure.message:
            assert self.is_over
        else:
            assert self.settings.on_failure == "raise"
            assert "got no token from" in failure.message
            assert max(self.num_crashes.values()) == self.settings.max_crashes + 1

    def index_of(self, order: RunChunk) -> int:
        return next(i for i, request in enumerate(self.requests) if request.key == order.request.key)

    def begin(self, order: RunChunk) -> None:
        worker = self.workers[order.worker]
        assert (order.life, order.version, worker.version) == (worker.life, self.version, self.version)
        assert not worker.loads, "a worker that loads weights cannot generate"
        index = self.index_of(order)
        assert self.num_crashes[index] <= self.settings.max_crashes
        # Else who missed weights may be asked again, and what waited for a suspect was given out while no other was up.
        if self.version == 0 and self.settings.help == "none" and not self.has_buried:
            has_failed_there = (order.worker, order.life) == self.verdicts.get(index, ())[:2]
            assert not has_failed_there or self.up() == {order.worker}, "another worker goes on with it"
        others = self.new_on(worker)
        assert not others & self.suspects, "nothing begins beside a suspect"
        assert not others or index not in self.suspects, "a suspect begins alone"
        assert index not in self.delivered
        running = [
            name
            for name, other in self.workers.items()
            for one in other.chunks.values()
            if self.index_of(one.order) == index
        ]
        assert running == ([order.helped] if order.help is Help.COPY else [])
        assert order.help is not Help.COPY or not worker.chunks, "only who has nothing else runs copies"
        done = len(order.request.generated)
        assert order.request.generated == self.truth(index)[:done]
        assert self.num_given[index] <= done == self.num_held[index]
        assert done < order.request.max_tokens <= LIMIT
        self.num_given[index] = done
        worker.has_run |= order.help is not Help.COPY
        self.num_helps[order.help] += 1
        worker.chunks[order.chunk] = Running(order)
        self.owners[order.chunk], self.indices[order.chunk] = order.worker, index

    def keep(self, keep: Keep) -> None:
        known = self.kept.get(keep.index, Kept(Packed()))
        assert known.finish_reason is None
        assert keep.start == len(known.packed)
        assert keep.start + len(keep.packed) == self.num_held[keep.index]
        self.kept[keep.index] = Kept(
            Packed(known.packed.tokens + keep.packed.tokens, known.packed.logprobs + keep.packed.logprobs),
            keep.num_steps,
            keep.num_draft_tokens,
            keep.finish_reason,
        )

    def check_log(self) -> None:
        """The chunks of each response follow one another unless they race, and their tokens are all that it has."""
        spans = self.log.take()
        if self.settings.help != "none":
            for index, response in self.delivered.items():
                assert sum(span.num_tokens for span in spans if span.index == index) == len(response.tokens)
            return
        for index, response in self.delivered.items():
            own = [span for span in spans if span.index == index]
            assert all(before.end_s <= after.start_s for before, after in pairwise(own))
            assert all(before.start + before.num_tokens == after.start for before, after in pairwise(own))
            assert (own[0].start, own[-1].start + own[-1].num_tokens) == (0, len(response.tokens))
            ends = {"lost", "error"} if response.failure is not None else {response.finish_reason}
            assert own[-1].finish_reason in ends, "what a failed one had may have been lost on the way"
            again = {"error"} if index in self.failed else set()
            assert {span.finish_reason for span in own[:-1]} <= {"length", "lost", "abort"} | again

    def check_rooms(self) -> None:
        for name, worker in self.workers.items():
            num_blocks, concurrency = self.rooms[name]
            requests = [running.order.request for running in worker.chunks.values()]
            need = sum(-(-(len(request.prompt) + request.max_tokens) // BLOCK) for request in requests)
            assert need <= num_blocks
            assert len(requests) <= concurrency

    # -- what may happen

    def come_up(self, name: str) -> None:
        worker = self.workers[name]
        worker.version, worker.is_stale = 0, self.rng.random() < 0.05
        worker.is_broken = self.has_broken and self.rng.random() < 0.3
        self.say(WorkerUp(name, worker.life, 0, self.rooms[name][0], BLOCK, self.rooms[name][1]))

    def load(self, name: str) -> None:
        worker = self.workers[name]
        worker.version = worker.loads.pop(0)
        worker.is_stale = self.rng.random() < 0.2
        self.say(WeightsLoaded(name, worker.life, worker.version))

    def say(self, event: Event) -> None:
        self.told.append(event)
        self.tell(event)

    def work(self, name: str) -> None:
        """Some chunks grow or end; what the report says of them may be lost on the way."""
        worker = self.workers[name]
        if worker.is_stale:
            self.say(Reported(name, worker.life, Report(worker.num_steps, refused=tuple(worker.chunks))))
            return
        growths, endings = [], []
        worker.num_steps += 1
        for number, running in list(worker.chunks.items()):
            request = running.order.request
            start, key = len(request.generated), request.key
            assert key is not None
            index = self.index_of(running.order)
            end = min(self.lengths[index], request.max_tokens)
            running.num_made = min(running.num_made + self.rng.randrange(6), end - start)
            tokens = tuple(token(key, self.version, start + i) for i in range(running.num_made))
            fails = index in self.failing and start + running.num_made > self.lengths[index] // 2
            if fails or worker.is_broken:
                told, so_far = running.num_told, tokens[: end - start - 1]  # the last one would have ended it
                ending = make_ending(number, start, so_far, "error", num_told=told, logprob=-0.5)
                endings.append(replace(ending, failure="NaN"))
                del worker.chunks[number]
                continue
            if start + running.num_made == end and self.rng.random() < 0.7:
                stops = end == self.lengths[index] < LIMIT
                reason = "stop" if stops else "length"
                endings.append(
                    make_ending(number, start, tokens, reason, num_told=running.num_told, logprob=-0.5)
                )
                del worker.chunks[number]
            else:
                told = running.num_told
                fresh = tokens[told : end - start - 1]
                if fresh and self.rng.random() < 0.8:
                    growths.append(Growth(number, start + told, pack(fresh, -0.5), 1))
                    running.num_told += len(fresh)
                    if self.rng.random() < 0.2:
                        growths.pop()  # lost on the way
        costs = StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.0, 0.0)
        steps, batch = self.rng.randint(0, 60), len(worker.chunks) + len(endings)
        worker.progress += Progress(self.rng.randint(0, 40), 0.1 * steps, 0.1 * steps * batch, steps)
        report = Report(
            worker.num_steps, Growths.pack(growths), tuple(endings), costs=costs, progress=worker.progress
        )
        self.say(Reported(name, worker.life, report))

    def lose(self, name: str) -> None:
        self.say(WorkerLost(name, self.bury(name), "killed"))

    def repeat(self) -> None:
        """Something that was said before arrives again."""
        again = self.rng.choice(self.told)
        if isinstance(again, WorkerUp | WeightsLoaded) and again.life == self.num_lives[again.worker] - 1:
            return  # Ray answers a call once
        self.tell(again)

    def tick(self) -> None:
        self.now_s += self.rng.random() * SILENCE_S / 2
        self.tell(Tick(self.now_s))

    def happen(self) -> None:
        name = self.rng.choice(sorted(self.workers))
        worker, chance = self.workers[name], self.rng.random()
        if chance < 0.05:
            self.lose(name)
        elif chance < 0.12 and self.told:
            self.repeat()
        elif chance < 0.2:
            self.tick()
        elif worker.version is None:
            self.come_up(name)
        elif worker.loads:
            self.lose(name) if chance > 0.9 else self.load(name)
        else:
            self.work(name)

    def change_weights(self) -> None:
        """New weights, and a while in which nobody waits for them."""
        self.version += 1
        self.tell(WeightsChanged(self.version))
        for _ in range(self.rng.randrange(8)):
            if self.workers:
                self.happen()

    def begin_rollout(self, requests: tuple[RolloutRequest, ...], kept: dict[int, Kept]) -> None:
        self.requests, self.delivered, self.kept, self.failure = requests, {}, dict(kept), None
        self.num_given.clear()
        self.num_held = Counter({index: len(one.packed) for index, one in kept.items()})
        self.num_crashes.clear()
        self.suspects.clear()
        self.fatal.clear()
        self.failed.clear()
        self.verdicts.clear()
        self.has_buried = False
        self.alone.clear()
        self.num_failed.clear()
        self.most_trainers = 1 + len(requests) % 3
        self.tell(Submitted(requests, kept, tuple(self.lengths), trainers=self.most_trainers))

    def roll_out(self, requests: tuple[RolloutRequest, ...]) -> None:
        self.log.take()  # chunks of a rollout that failed
        self.begin_rollout(requests, {})
        for _ in range(20_000):
            if self.failure or len(self.delivered) == len(requests):
                break
            self.happen()
        if self.failure:
            return
        assert self.controller.num_unfinished == 0
        assert sorted(self.delivered) == list(range(len(requests)))
        for index in range(len(requests)):
            if self.delivered[index].failure is not None:
                continue
            assert self.kept[index].packed == pack(self.truth(index), -0.5)
            assert self.kept[index].finish_reason is not None
        self.check_log()


def help_whoever_can_be(load: Load, helper: Helper) -> HelpChoice:
    """Copy and take over, by turns as it were, whatever it brings."""
    seed, kind = int(load.steps.sum()), Help.NOTHING
    if helper.can_take and len(load.steps) > 1 and seed % 3:
        kind = Help.TAKE
    elif helper.can_copy and not load.is_helped:
        kind = Help.COPY
    return HelpChoice(
        kind, load.end_s, num_taken=1 + seed % (len(load.steps) - 1) if kind is Help.TAKE else 0
    )


def judge_soon(before: Progress, after: Progress) -> bool | None:
    """Help that has been there for a while pays or not, as it happens."""
    return None if after.num_steps < 20 else after.num_steps % 2 == 0


@pytest.fixture(autouse=True, scope="module")
def eager_help() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helping, "decide_help", help_whoever_can_be)
        patch.setattr(helping, "judge_help", judge_soon)
        patch.setattr(helping, "EARLY_S", 0.0)
        yield


class SearchingController(Controller):
    """Asks all workers after every event, where its base class asks those that have changed."""

    def _help(self, helping: Helping, event: Event) -> list[Action]:
        actions = super()._help(helping, event)
        standings = {name: self._standing(worker.place) for name, worker in self._workers.items()}
        settled = standings.keys() - self._runs.changed.keys()  # the others begin a copy, or take over, now
        assert self._idle & settled == {name for name in settled if standings[name] is Standing.IDLE}
        assert helping._doors == {}, "nobody can be drafted for"
        for pair in [pair for name in self._workers for pair in self.pairs_of(name)]:
            assert self._standing(pair.helper) is Standing.RACING
        self._check_predictions(helping, settled - helping._stale.keys())
        return actions

    def _check_predictions(self, helping: Helping, workers: Iterable[str]) -> None:
        scratch = replace(helping, _ends=Ends(), _busy={}, _stale={})
        dispatcher = self._runs.dispatcher
        for name in workers if dispatcher is not None else ():
            worker = self._workers[name]
            can_move = dispatcher.can_move and not worker.held and not worker.new
            scratch.predict(worker.place, self._remainders(worker), worker.costs, can_move=can_move)
            found, wanted = helping._busy.get(name), scratch._busy.get(name)
            assert (found is None) is (wanted is None)
            if found is None or wanted is None:
                assert name not in helping._ends._ends_s
                continue
            assert found[:1] + found[2:3] + found[4:] == wanted[:1] + wanted[2:3] + wanted[4:]
            assert sorted(found.chunks) == sorted(wanted.chunks)
            if self._rollout is not None and self._rollout.variant in {"oracle", "no-context"}:
                assert helping._ends._ends_s[name] == wanted.load.end_s  # else others' ends change estimates


@st.composite
def worlds(draw: st.DrawFn) -> World:
    variant = draw(st.sampled_from(["even", "context", "no-context", "oracle", "sticky", "group"]))
    num_workers = draw(st.integers(1, 3))
    configured = FleetSettings(
        workers=num_workers,
        variant=variant,
        help=draw(st.sampled_from(["none", "auto"])),
        chunk_tokens=CHUNK,
        guard_interval=draw(st.integers(0, 3)),
        silence_s=SILENCE_S,
        start_timeout_s=SILENCE_S,
        max_failed_starts=draw(st.sampled_from([1, 2, 3, 10_000])),
        max_crashes=draw(st.sampled_from([0, 1, 10_000])),
    )
    least = -(-(3 + LIMIT) // BLOCK)
    rooms = {
        f"w{i}": (draw(st.integers(least, 3 * least)), draw(st.integers(1, 4))) for i in range(num_workers)
    }
    lengths = draw(st.lists(st.integers(1, LIMIT), min_size=1, max_size=12))
    on_failure = draw(st.sampled_from(["deliver", "raise"]))
    configured = configured.model_copy(update={"on_failure": on_failure})
    failing = draw(st.sets(st.integers(0, 11), max_size=2)) if on_failure == "deliver" else set()
    has_broken = on_failure == "deliver" and draw(st.booleans())
    rng = random.Random(draw(seeds))
    return World(SearchingController(configured), lengths, rng, rooms, failing, has_broken=has_broken)


def make_requests(world: World, first_key: int) -> tuple[RolloutRequest, ...]:
    size = world.rng.randrange(1, 5)
    return tuple(
        RolloutRequest((1, 2, i // size), LIMIT, key=first_key + i, group=i // size, sample=i % size)
        for i in range(len(world.lengths))
    )


@given(worlds())
@settings(max_examples=150)
def test_every_response_comes_once_and_right_whatever_happens(world: World) -> None:
    world.tell(Opened())
    world.roll_out(make_requests(world, 100))
    for step in range(1, 4):
        world.tell(Abandoned())
        for _ in range(world.rng.randrange(1, 3)):
            world.change_weights()
        if world.is_over:
            break
        world.roll_out(make_requests(world, 100 + 800 * step))
    if world.is_over:
        world.tell(Abandoned())
        with pytest.raises(EngineError, match="no worker is left, all have been given up"):
            world.tell(Submitted(world.requests, true_lengths=tuple(world.lengths)))


@given(worlds())
@settings(max_examples=60)
def test_a_restarted_driver_goes_on_from_what_was_kept(world: World) -> None:
    world.tell(Opened())
    requests = make_requests(world, 100)
    world.begin_rollout(requests, {})
    for _ in range(world.rng.randrange(60)):
        if not world.failure:
            world.happen()
    before = dict(world.kept)
    world.tell(Abandoned())
    assert all(not worker.chunks for worker in world.workers.values())
    assert not world.log._open
    if world.is_over:
        return
    world.begin_rollout(requests, before)
    while len(world.delivered) < len(requests) and not world.failure:
        world.happen()
    for index, response in world.delivered.items():
        world.check_response(index, response)
        assert len(response.logprobs) == len(response.tokens)
        assert response.num_steps >= before.get(index, Kept(Packed())).num_steps


@given(worlds())
@settings(max_examples=60)
def test_the_same_events_give_the_same_actions(world: World) -> None:
    twin = Controller(world.controller._settings)
    seen: list[Event] = []
    decide = world.controller.decide

    def both(event: Event) -> list[object]:
        actions = decide(event)
        seen.append(event)
        assert twin.decide(event) == actions
        return actions

    world.controller.decide = both  # type: ignore[method-assign, assignment]
    world.tell(Opened())
    world.roll_out(make_requests(world, 100))
    assert seen


@given(worlds())
@settings(max_examples=40)
def test_a_logged_run_is_replayed_without_a_difference(world: World) -> None:
    with TemporaryDirectory() as folder:
        log = open_log(world.controller._settings, folder)
        assert log is not None
        unlogged = SimpleNamespace(decide=world.controller.decide)
        decided: list[Event] = []

        def decide(event: Event) -> list[Action]:
            decided.append(event)
            return log.decide(unlogged, event)  # type: ignore[arg-type]

        world.controller.decide = decide  # type: ignore[method-assign]
        world.tell(Opened())
        world.roll_out(make_requests(world, 100))
        log.close()
        with DecisionReader(Path(folder) / "controller-1.decisions") as reader:
            [tally] = replay_controller(reader)
    assert tally.num_planned == len(decided) > 1
    assert (tally.num_different, tally.num_left) == (0, 0)


def test_worlds_race_take_over_and_train() -> None:
    """What the tests above claim of it is not claimed of none."""
    num_helps: Counter[Help | None] = Counter()
    num_trained = num_in_vain = 0
    for seed in range(60):
        rooms = {f"w{i}": (40, 4) for i in range(2)}
        fleet = FleetSettings(
            workers=2, help="auto", chunk_tokens=LIMIT, silence_s=SILENCE_S, max_failed_starts=10_000
        )
        world = World(SearchingController(fleet), [LIMIT, 2] * 3, random.Random(seed), rooms)
        world.tell(Opened())
        world.roll_out(make_requests(world, 100))
        num_helps += world.num_helps
        num_trained += world.num_trained
        assert world.controller._helping is not None
        num_in_vain += len(world.controller._helping._refused)
    assert num_helps[Help.COPY] >= 20
    assert num_helps[Help.TAKE] >= 10
    assert num_in_vain > 0
    assert num_trained > 0


@pytest.mark.parametrize("variant", ["even", "sticky", "context"])
def test_a_broken_worker_among_good_ones_costs_no_response(variant: Variant) -> None:
    num_lives, num_failures = 0, 0
    for seed in range(10):
        rooms = {f"w{i}": (40, 4) for i in range(3)}
        fleet = FleetSettings(
            workers=3, variant=variant, chunk_tokens=CHUNK, silence_s=100.0, max_failed_starts=10_000
        )
        world = World(SearchingController(fleet), [LIMIT, 5] * 12, random.Random(seed), rooms)
        world.tell(Opened())
        for name in rooms:
            world.come_up(name)
            world.workers[name].is_stale = False
        world.workers["w1"].is_broken = True
        world.lose = lambda name: None  # type: ignore[method-assign]
        world.roll_out(make_requests(world, 100))
        assert all(response.failure is None for response in world.delivered.values())
        num_lives += world.num_lives["w1"] - 1
        num_failures += len(world.failed)
    assert num_lives >= 10, "it is started again"
    assert num_failures >= 20


def test_a_token_that_differs_is_an_error_that_names_it() -> None:
    world = World(
        Controller(FleetSettings(workers=1, chunk_tokens=CHUNK)), [30], random.Random(0), {"w0": (99, 4)}
    )
    world.tell(Opened())
    world.requests = make_requests(world, 5)
    world.tell(Submitted(world.requests))
    world.come_up("w0")
    [number] = world.workers["w0"].chunks
    right = world.truth(0)[:3]
    world.say(Reported("w0", 0, Report(3, make_growths(number, 0, right))))
    wrong = make_growths(number, 1, (right[1], right[2] + 1))
    with pytest.raises(EngineError, match=rf"response 0 \(key 5\): token 2 was {right[2]} and is now"):
        world.tell(Reported("w0", 0, Report(4, wrong)))

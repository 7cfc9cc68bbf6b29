"""The controller: the slow loop's state machine. The only place that decides where a response runs.

`decide(event) -> actions`, without clock, I/O or Ray: the live fleet (`fleet.rollout`) carries out what it says, and so
does the simulated one (`sim.fleet`). Owns the dispatcher of the rollout, the only copy of every response's state, and
what each worker is about.

Invariants: a response is delivered exactly once, whatever is lost, told late or told twice; its tokens only grow; a
worker generates only with the weights of the present version; the chunks of a worker fit into its KV cache.

A worker is *starting* (no engine yet), *loading* (weights), *up*, or *given up* after too many fruitless lives. Only
those that are up are known to the dispatcher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.config import FleetSettings, Variant
from paceline.control.events import (
    Abandoned,
    Action,
    CancelChunk,
    Deliver,
    Ending,
    Event,
    Fail,
    Growth,
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
    WeightsChanged,
    WeightsLoaded,
    WorkerEvent,
    WorkerLost,
    WorkerUp,
)
from paceline.control.ledger import LiveResponse, RunningChunk
from paceline.errors import EngineError, RequestError
from paceline.planning.dispatch import Assignment, Dispatcher, DispatchSettings
from paceline.types import RolloutRequest

WorkerState = Literal["starting", "loading", "up", "given up"]


@dataclass(slots=True)
class _Worker:
    """A place for an engine, and its present life."""

    name: str
    life: int = 0
    state: WorkerState = "starting"
    facts: WorkerUp | None = None
    num_steps: int = 0
    has_run: bool = False
    """Chunks, in this life."""
    has_generated: bool = False
    chunks: dict[int, RunningChunk] = field(default_factory=dict)
    """Those that run here, by number."""
    num_fruitless: int = 0
    """Lives in a row that came to nothing."""
    waiting_since_s: float | None = None
    """When a tick first found that something is expected of it; None: nothing is, or it has just done something."""


@dataclass(slots=True)
class _Rollout:
    """What `Submitted` gave. Groups as the dispatcher knows them: equal prompts of one group with one limit."""

    true_lengths: Sequence[int]
    variant: Variant
    groups: dict[tuple[int, tuple[int, ...], int], list[LiveResponse]] = field(default_factory=dict)
    places: dict[tuple[int, int], LiveResponse] = field(default_factory=dict)  # by dispatch group and sample

    def add(self, response: LiveResponse) -> None:
        request = response.request
        assert request.group is not None
        self.groups.setdefault((request.group, request.prompt, request.max_tokens), []).append(response)


class Controller:
    """One per fleet. See `decide`."""

    def __init__(
        self,
        settings: FleetSettings,
        open_response: Callable[[int, RolloutRequest, Kept | None], LiveResponse] = LiveResponse,
    ) -> None:
        """open_response: makes the ledger entry of a response; the simulator's counts tokens and holds none."""
        self._settings = settings
        self._open_response = open_response
        self._workers = {name: _Worker(name) for name in (f"w{i}" for i in range(settings.workers))}
        self._version = 0
        self._rollout: _Rollout | None = None
        self._dispatcher: Dispatcher | None = None
        self._numbers = itertools.count()
        self.num_unfinished = 0
        """Responses of the rollout that are not delivered."""

    def decide(self, event: Event) -> list[Action]:
        """What to do now that `event` has happened, in order.

        Raises RequestError for a rollout that cannot begin, EngineError when engines disagree about a token. `Fail` is
        an error that comes with other things to be done. After an error the rollout cannot go on: `Abandoned` gives it
        up.
        """
        actions: list[Action] = []
        match event:
            case Opened():
                actions = [StartWorker(worker.name, worker.life) for worker in self._workers.values()]
            case Submitted():
                actions = self._submit(event)
            case Abandoned():
                actions = self._abandon()
            case WeightsChanged():
                actions = self._change_weights(event.version)
            case Tick():
                actions = self._look_for_silence(event.now_s)
            case _ if self._workers[event.worker].life != event.life:  # a late report
                return []
            case _:
                actions = self._hear(event, self._workers[event.worker])
        if any(isinstance(action, Fail) for action in actions):
            return actions
        return [*actions, *self._match()]

    def _hear(self, event: WorkerEvent, worker: _Worker) -> list[Action]:
        match event:
            case WorkerUp():
                worker.facts = event
                return self._welcome(worker, event.version)
            case WeightsLoaded():
                return self._welcome(worker, event.version)
            case WorkerLost():
                return self._lose(worker, event.reason)
            case Reported():
                return self._read(worker, event.report)

    # -- views, for who shows the fleet

    def state_of(self, worker: str) -> WorkerState:
        """What a worker is about."""
        return self._workers[worker].state

    @property
    def workers(self) -> tuple[str, ...]:
        """All places."""
        return tuple(self._workers)

    @property
    def num_waiting(self) -> int:
        """Responses that wait for a worker; 0 before the first worker is up."""
        return self._dispatcher.num_waiting if self._dispatcher is not None else 0

    @property
    def num_running(self) -> int:
        """Chunks that run somewhere."""
        return sum(len(worker.chunks) for worker in self._workers.values())

    def next_waiting(self, count: int) -> list[RolloutRequest]:
        """The requests whose next chunks will run next if nothing else happens, in that order; at most `count`."""
        if self._dispatcher is None or self._rollout is None:
            return []
        places = self._rollout.places
        return [places[place].request for place in self._dispatcher.next_waiting(count)]

    # -- the rollout

    def _submit(self, event: Submitted) -> list[Action]:
        if self.num_unfinished:
            raise RequestError(
                f"{self.num_unfinished} responses are still running: finish or abandon them first"
            )
        if all(worker.state == "given up" for worker in self._workers.values()):
            raise EngineError("no worker is left, all have been given up: start another fleet")
        self._dispatcher, self._rollout = (
            None,
            _Rollout(event.true_lengths, event.variant or self._settings.variant),
        )
        actions: list[Action] = []
        for index, request in enumerate(event.requests):
            kept = event.kept.get(index)
            response = self._open_response(index, request, kept)
            if kept is not None and (reason := kept.finish_reason) is not None:
                actions.append(Deliver(index, response.finish(reason, self._version)))
                continue
            response.check_room()
            self._rollout.add(response)
            self.num_unfinished += 1
        self._begin_dispatch()
        return actions

    def _begin_dispatch(self) -> None:
        """Make the dispatcher, once there is a rollout and a worker has told how large KV blocks are."""
        rollout = self._rollout
        if self._dispatcher is not None or rollout is None or not self.num_unfinished:
            return
        up = [worker for worker in self._workers.values() if worker.state == "up"]
        if not up:
            return
        assert up[0].facts is not None
        groups = list(rollout.groups.values())
        dispatcher = Dispatcher(
            DispatchSettings(
                variant=rollout.variant,
                chunk_tokens=self._settings.chunk_tokens,
                block_tokens=up[0].facts.block_tokens,
                guard_interval=self._settings.guard_interval,
            ),
            _true_lengths(groups, rollout.true_lengths),
        )
        self._dispatcher = dispatcher
        for worker in up:  # first, so that a response that fits nowhere is refused at once
            self._join(worker)
        for number, responses in enumerate(groups):
            request = responses[0].request
            held = [response.num_tokens for response in responses]
            dispatcher.submit(number, len(responses), len(request.prompt), request.max_tokens, held)
            rollout.places |= {(number, sample): response for sample, response in enumerate(responses)}
        rollout.groups.clear()  # a response is forgotten when it is delivered

    def _match(self) -> list[Action]:
        """Give out chunks until nothing waits or nobody has room, nor ever will, not even a worker that is starting."""
        actions: list[Action] = []
        while self._dispatcher is not None:
            try:
                assignment = self._dispatcher.next_assignment()
            except RequestError as error:
                if all(worker.state in {"up", "given up"} for worker in self._workers.values()):
                    actions.append(Fail(RequestError, str(error)))
                break
            if assignment is None:
                break
            actions.append(self._run(assignment))
        return actions

    def _run(self, assignment: Assignment) -> RunChunk:
        assert self._rollout is not None
        response = self._rollout.places[assignment.group, assignment.sample]
        worker = self._workers[assignment.worker]
        worker.has_run = True
        number = response.chunk = next(self._numbers)
        worker.chunks[number] = RunningChunk(
            assignment, response, worker.name, response.num_tokens, response.num_steps
        )
        request = response.next_request(assignment.chunk_tokens)
        return RunChunk(worker.name, worker.life, number, request, self._version, response.index)

    def _abandon(self) -> list[Action]:
        actions: list[Action] = []
        for worker in self._workers.values():
            actions += [CancelChunk(worker.name, worker.life, number) for number in worker.chunks]
            worker.chunks.clear()
        self._rollout = self._dispatcher = None
        self.num_unfinished = 0
        return actions

    # -- what workers tell

    def _read(self, worker: _Worker, report: Report) -> list[Action]:
        if report.num_steps > worker.num_steps:
            worker.num_steps, worker.waiting_since_s = report.num_steps, None
        actions: list[Action] = []
        for growth in report.growths:
            actions += self._grow(worker, growth)
        for ending in report.endings:
            actions += self._end(worker, ending)
        if any(number in worker.chunks for number in report.refused):
            actions += self._renew(worker)
        for number, reason in report.rejected:
            if number in worker.chunks:
                index = worker.chunks[number].response.index
                message = f"response {index} cannot run on worker {worker.name}: {reason}"
                actions.append(Fail(RequestError, message))
        return actions

    def _grow(self, worker: _Worker, growth: Growth) -> list[Action]:
        chunk = worker.chunks.get(growth.chunk)
        if chunk is None:  # it was taken away or has ended
            return []
        response = chunk.response
        response.check_extent(chunk, growth.start, growth.start + len(growth.tokens) + 1)
        num_new = response.absorb(growth.start, growth.tokens, growth.logprobs)
        if not num_new:
            return []
        worker.has_generated = True
        response.num_steps = chunk.num_steps + growth.num_steps
        return [response.keep(num_new, None)]

    def _end(self, worker: _Worker, ending: Ending) -> list[Action]:
        chunk = worker.chunks.get(ending.chunk)
        if chunk is None:
            return []
        response = chunk.response
        response.check_extent(chunk, ending.start, ending.start + len(ending.tokens))
        num_new = response.absorb(ending.start, ending.tokens, ending.logprobs)
        num_tokens = response.num_tokens
        response.check_end(chunk, ending)
        worker.has_generated = True
        response.num_steps = chunk.num_steps + ending.num_steps
        response.num_draft_tokens += ending.num_draft_tokens
        is_final = ending.finish_reason == "stop" or num_tokens == response.request.max_tokens
        assert self._dispatcher is not None
        self._dispatcher.chunk_finished(chunk.assignment, num_tokens, is_final)
        del worker.chunks[ending.chunk]
        response.chunk = None
        reason = ending.finish_reason if is_final else None
        kept: Keep = response.keep(num_new, reason)
        if reason is None:
            return [kept]
        return [kept, self._deliver(chunk, reason)]

    def _deliver(self, chunk: RunningChunk, reason: str) -> Deliver:
        assert self._rollout is not None
        del self._rollout.places[chunk.assignment.group, chunk.assignment.sample]
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self._rollout = self._dispatcher = None
        return Deliver(chunk.response.index, chunk.response.finish(reason, self._version))

    # -- workers come and go

    def _welcome(self, worker: _Worker, version: int) -> list[Action]:
        """A worker has weights: those of the present, or it shall load them first."""
        worker.waiting_since_s = None
        if version != self._version:
            worker.state = "loading"
            return [LoadWeights(worker.name, worker.life, self._version)]
        worker.state = "up"
        if self._dispatcher is None:
            self._begin_dispatch()
        else:
            self._join(worker)
        return []

    def _join(self, worker: _Worker) -> None:
        facts = worker.facts
        assert facts is not None
        assert self._dispatcher is not None
        self._dispatcher.worker_up(worker.name, facts.num_kv_blocks, facts.max_concurrency)

    def _lose(self, worker: _Worker, reason: str) -> list[Action]:
        """A worker is gone: what it ran goes on elsewhere from the last token told, and another engine is started."""
        lost = self._withdraw(worker).values()
        actions: list[Action] = []
        if worker.has_generated:
            worker.num_fruitless = 0
            actions = self._blame(lost, reason)
        elif worker.state != "up" or worker.has_run:
            worker.num_fruitless += 1
        worker.life += 1
        worker.facts, worker.waiting_since_s, worker.num_steps = None, None, 0
        worker.has_run = worker.has_generated = False
        if worker.num_fruitless < self._settings.max_failed_starts:
            worker.state = "starting"
            return [StartWorker(worker.name, worker.life), *actions]
        worker.state = "given up"
        if all(other.state == "given up" for other in self._workers.values()):
            running = f" while it ran {_name(lost)}" if lost else ""
            message = (
                f"no worker is left: each was lost {self._settings.max_failed_starts} times in a row before it "
                f"generated anything, {worker.name} last{running}: {reason}"
            )
            actions.append(Fail(EngineError, message))
        return actions

    def _blame(self, chunks: Collection[RunningChunk], reason: str) -> list[Action]:
        """A worker that could work was lost with these chunks: does a response end every worker that runs it?"""
        for chunk in chunks:
            chunk.response.num_losses += chunk.response.num_tokens == chunk.start
        most = self._settings.max_crashes
        suspects = [chunk for chunk in chunks if chunk.response.num_losses > most]
        if not suspects:
            return []
        message = (
            f"{most + 1} workers in a row were lost before they brought a token to {_name(suspects)}, the last one "
            f"thus: {reason}; leave it out, or raise max_crashes ({most}) if something else ends the workers"
        )
        return [Fail(EngineError, message)]

    def _withdraw(self, worker: _Worker) -> dict[int, RunningChunk]:
        """Take the worker out of the rollout; its chunks wait again. Gives them by number."""
        if worker.state != "up" or self._dispatcher is None:
            return {}
        lost, worker.chunks = worker.chunks, {}
        progress = {}
        for chunk in lost.values():
            chunk.response.chunk = None
            place = chunk.assignment.group, chunk.assignment.sample
            progress[place] = chunk.response.num_tokens
        self._dispatcher.worker_lost(worker.name, progress)
        return lost

    def _renew(self, worker: _Worker) -> list[Action]:
        """A worker has refused a chunk, so it has missed new weights; those of version 0 nobody can give it."""
        if self._version == 0:
            stop = StopWorker(worker.name, worker.life)
            return [stop, *self._lose(worker, "it refused a chunk with the model's own weights")]
        cancels = [CancelChunk(worker.name, worker.life, number) for number in self._withdraw(worker)]
        worker.state, worker.waiting_since_s = "loading", None
        return [*cancels, LoadWeights(worker.name, worker.life, self._version)]

    def _change_weights(self, version: int) -> list[Action]:
        if self.num_unfinished:
            raise EngineError(
                f"{self.num_unfinished} responses are running: finish or abandon them before new weights"
            )
        self._version = version
        actions: list[Action] = []
        for worker in self._workers.values():
            if worker.state in {"up", "loading"}:
                worker.state, worker.waiting_since_s = "loading", None
                actions.append(LoadWeights(worker.name, worker.life, version))
        return actions

    def _look_for_silence(self, now_s: float) -> list[Action]:
        """Give up on workers of which something has been expected for too long."""
        actions: list[Action] = []
        for worker in self._workers.values():
            if worker.state == "given up" or (worker.state == "up" and not worker.chunks):
                worker.waiting_since_s = None
                continue
            if worker.waiting_since_s is None:
                worker.waiting_since_s = now_s
            is_up = worker.state == "up"
            limit_s = self._settings.silence_s if is_up else self._settings.start_timeout_s
            if now_s - worker.waiting_since_s > limit_s:
                what = "finished no engine step" if is_up else f"was still {worker.state}"
                actions.append(StopWorker(worker.name, worker.life))
                actions += self._lose(worker, f"it {what} after {limit_s:g} s")
        return actions


def _name(chunks: Collection[RunningChunk]) -> str:
    """The responses of chunks, the first ones by number."""
    indices = [str(chunk.response.index) for chunk in chunks]
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"response{'s' * (len(indices) > 1)} {', '.join(indices[:8])}{more}"


def _true_lengths(
    groups: Sequence[Sequence[LiveResponse]], lengths: Sequence[int]
) -> dict[int, list[int]] | None:
    if not lengths:
        return None
    return {number: [lengths[r.index] for r in responses] for number, responses in enumerate(groups)}

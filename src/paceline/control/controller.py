"""The controller: the slow loop's state machine. The only place that decides where a response runs.

`decide(event) -> actions`, without clock, I/O or Ray: the live fleet (`fleet.fleet`) carries out what it says, and so
does the simulated one (`sim.rollout`). Owns the dispatcher of the rollout, the only copy of every response's state, and
what each worker is about.

Invariants: a response is delivered exactly once, whatever is lost, told late or told twice; its tokens only grow; a
worker generates only with the weights of the present version; the chunks of a worker fit into its KV cache.

A worker is *starting* (no engine yet), *loading* (weights), *up*, or *given up* after too many fruitless lives. Only
those that are up are known to the dispatcher. A worker is given one set of weights at a time; if they have become old
when it has them, it is given the present ones next.

A response may run twice (`helping.py`): its chunk, and a copy of that on a worker that has none of its own. Both are
told alike and compared, whichever tells a token first is believed, and the first to end wins. Dispatch knows the first
of the two, the owner; where that one stops for another reason, the copy is the owner from then on.

Workers that are free and find nobody to help may lend their cores to the drafter's trainer (`training.py`).

Silence is measured while the driver listens: of a long time between two ticks only `LONGEST_TICK_S` count.

A worker that is lost makes suspects of the responses that had begun there and had no token yet. Until it gets one, a
suspect begins only where no other chunk is without a token, and none begins beside it. It is blamed only for workers
that are lost while it is alone in that, so something else that ends workers costs time and seldom a response.

Tokens are a function of weights, prefix and key. So a response that fails waits for another worker and is given up
where that one fails it too, or where there is none; if it goes on there, the first one is broken and is replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.config import FleetSettings, Variant
from paceline.control.events import (
    Abandoned,
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    Disagree,
    Ending,
    Event,
    Fail,
    Growth,
    Kept,
    LoadWeights,
    Opened,
    Order,
    Report,
    Reported,
    RunChunk,
    StartWorker,
    StopWorker,
    Submitted,
    Tick,
    Training,
    WeightsChanged,
    WeightsLoaded,
    WorkerEvent,
    WorkerLost,
    WorkerUp,
)
from paceline.control.helping import Door, Helping, Pair, Place, Remainder, Standing
from paceline.control.live_response import FailedChunk, LiveResponse, RunningChunk
from paceline.control.training import TrainingSessions
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.planning.dispatch import Assignment, Dispatcher, DispatchSettings
from paceline.planning.help import Help
from paceline.types import Progress, RolloutRequest, StepCosts

WorkerState = Literal["starting", "loading", "up", "drafting", "racing", "training", "given up"]

HELP_KINDS: dict[str, frozenset[Help]] = {
    "auto": frozenset({Help.DRAFT, Help.COPY, Help.TAKE}),
    "draft": frozenset({Help.DRAFT}),
    "copy": frozenset({Help.COPY}),
    "take": frozenset({Help.TAKE}),
    "none": frozenset(),
}

LONGEST_TICK_S = 1.0
"""Of a longer time between two ticks so much counts as silence: the driver was busy elsewhere and has heard nobody."""

HELP_S = 0.5
"""How often free workers and stragglers are brought together."""

MOST_FAILURES = 4
"""So often a response fails, on whatever workers, until it is given up: each time may have cost an engine."""

KEEP_S = 1.0
"""How often responses that grow are kept for a restarted driver: one growth of all has a few tokens, and a header."""


@dataclass(slots=True)
class _Worker:
    """A place for an engine, and its present life."""

    name: str
    life: int = 0
    is_drafter: bool = False
    """Whether it drafts for others, and verifies nothing."""
    state: WorkerState = "starting"
    facts: WorkerUp | None = None
    costs: StepCosts | None = None
    """Of its steps, as told last."""
    progress: Progress | None = None
    """Of its life, as told last."""
    num_steps: int = 0
    """Of its life, as told last."""
    has_run: bool = False
    """Chunks, in this life."""
    has_generated: bool = False
    may_help: bool = True
    """Drafting for others has not failed here in this rollout."""
    chunks: dict[int, RunningChunk] = field(default_factory=dict)
    """Those that run here, by number."""
    second: set[int] = field(default_factory=set)
    """Of them, those of responses that another worker ran when they came: only these can be copies."""
    new: dict[int, LiveResponse] = field(default_factory=dict)
    """The responses of those that have begun here and brought no token yet."""
    held: list[RunChunk] = field(default_factory=list)
    """Those that have not begun, because of a suspect."""
    num_fruitless: int = 0
    """Lives in a row that came to nothing."""
    waiting_since_s: float | None = None
    """When a tick first found that something is expected of it, in seconds that the driver has listened; None: nothing
    is, or it has just done something."""

    @property
    def copies(self) -> list[int]:
        """The chunks that others own and that run here too."""
        return sorted(number for number in self.second if self.chunks[number].response.owner != number)

    @property
    def place(self) -> Place:
        """Its present life."""
        return Place(self.name, self.life)


@dataclass(slots=True)
class _Rollout:
    """What `Submitted` gave. Groups as the dispatcher knows them: equal prompts of one group with one limit."""

    true_lengths: Sequence[int]
    variant: Variant
    groups: dict[tuple[int, tuple[int, ...], int], list[LiveResponse]] = field(default_factory=dict)
    places: dict[tuple[int, int], LiveResponse] = field(default_factory=dict)  # by dispatch group and sample
    unkept: dict[int, LiveResponse] = field(default_factory=dict)  # by index: have grown since they were kept

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
        first_drafter = settings.workers - settings.num_drafters
        self._workers = {
            f"w{i}": _Worker(f"w{i}", is_drafter=i >= first_drafter) for i in range(settings.workers)
        }
        self._ranks = {name: rank for rank, name in enumerate(self._workers)}
        self._version = 0
        self._rollout: _Rollout | None = None
        self._dispatcher: Dispatcher | None = None
        kinds = HELP_KINDS[settings.help]
        self._helping = Helping(kinds) if kinds or settings.num_drafters else None
        self._changed: dict[str, None] = {}  # workers whose standing may not be what `_help` saw last
        self._idle: set[str] = set()
        self._rested: set[str] = set()  # that were idle when helpers were looked for last, and ever since
        self._progress: dict[str, Progress] = {}  # of the workers that have chunks, as told last
        self._has_suspects = (
            False  # whether a worker was lost in this rollout before some response got a token there
        )
        self._training = TrainingSessions()
        self._numbers = itertools.count()
        self._last_tick_s: float | None = None
        self._listened_s = 0.0
        self._kept_s = self._helped_s = float("-inf")
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
                actions = [*self._keep_grown(event.now_s), *self._look_for_silence(event.now_s)]
            case _ if self._workers[event.worker].life != event.life:  # a late report
                return []
            case _:
                actions = self._hear(event, self._workers[event.worker])
        if any(isinstance(action, Fail) for action in actions):
            return [*actions, *self._keep_all()]
        actions += self._match()
        if self._helping is not None:
            actions += self._help(self._helping, event)
        return [*self._train(event), *actions]

    def _hear(self, event: WorkerEvent, worker: _Worker) -> list[Action]:
        match event:
            case WorkerUp():
                worker.facts = event
                return self._welcome(worker, event.version)
            case WeightsLoaded():
                return self._welcome(worker, event.version) if worker.state == "loading" else []
            case WorkerLost():
                return self._lose(worker, event.reason)
            case Reported():
                return self._read(worker, event.report)

    # -- views, for who shows the fleet

    def state_of(self, worker: str) -> WorkerState:
        """What a worker is about."""
        if pairs := self.pairs_of(worker):
            return "racing" if pairs[0].kind is Help.COPY else "drafting"
        if self._workers[worker].place in self._training.members:
            return "training"
        return self._workers[worker].state

    def pairs_of(self, worker: str) -> list[Pair]:
        """Whom a worker helps, by drafting or by a copy."""
        return [] if self._helping is None else self._helping.find(worker)

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
            _Rollout(event.true_lengths, event.variant or self._settings.variant or "even"),
        )
        self._has_suspects = False
        if self._helping is not None:
            self._helping.use_drafters(event.drafter, event.others)
        for worker in self._workers.values():
            worker.may_help = True
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
        if event.trainers:
            self._training.begin(event.trainers)
        self._begin_dispatch()
        return actions

    def _begin_dispatch(self) -> None:
        """Make the dispatcher, once there is a rollout and a worker has told how large KV blocks are."""
        rollout = self._rollout
        if self._dispatcher is not None or rollout is None or not self.num_unfinished:
            return
        up = [worker for worker in self._workers.values() if worker.state == "up" and not worker.is_drafter]
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
        given: dict[str, _Worker] = {}
        while self._dispatcher is not None:
            try:
                assignment = self._dispatcher.next_assignment()
            except RequestError as error:
                if all(worker.state in {"up", "given up"} for worker in self._workers.values()):
                    actions.append(Fail(RequestError, str(error)))
                break
            if assignment is None:
                break
            given[assignment.worker] = self._give(assignment)
        for worker in given.values():
            actions += [*self._end_copies(worker), *self._begin(worker)]
        return actions

    def _give(self, assignment: Assignment) -> _Worker:
        """A worker gets a chunk, which begins there when it may."""
        assert self._rollout is not None
        response = self._rollout.places[assignment.group, assignment.sample]
        worker = self._workers[assignment.worker]
        worker.has_run = True
        start, response.is_raced = response.num_tokens, False
        end = start + assignment.chunk_tokens
        chunk = RunningChunk(assignment, response, worker.name, start, end, response.num_steps)
        worker.held.append(self._place(worker, chunk))
        return worker

    def _place(self, worker: _Worker, chunk: RunningChunk, pair: Pair | None = None) -> RunChunk:
        """A chunk runs on a worker from now on."""
        number, response = next(self._numbers), chunk.response
        if response.runs:
            worker.second.add(number)
        worker.chunks[number], response.runs[number] = chunk, worker.name
        self._changed[worker.name] = None
        kind, helped = (None, None) if pair is None else (pair.kind, pair.helped.worker)
        request = response.next_request(chunk.end)
        return RunChunk(
            worker.name, worker.life, number, request, self._version, response.index, kind, helped
        )

    def _begin(self, worker: _Worker) -> list[RunChunk]:
        """Begin what may begin on a worker: suspects first, each alone, on one that has worked if there is a choice."""
        if not worker.held:
            return []
        if self._has_suspects and any(response.is_suspect for response in worker.new.values()):
            return []
        responses = {order.chunk: worker.chunks[order.chunk].response for order in worker.held}
        suspects = [order for order in worker.held if responses[order.chunk].is_suspect]
        begun = [order for order in worker.held if not responses[order.chunk].is_suspect]
        if suspects and worker.new:
            return []
        if suspects and begun and not worker.has_generated:
            begun = begun[:1]
        elif suspects:
            begun = [max(suspects, key=lambda order: responses[order.chunk].num_losses)]
        numbers = {order.chunk for order in begun}
        worker.held = [order for order in worker.held if order.chunk not in numbers]
        worker.new |= {number: responses[number] for number in numbers}
        return begun

    def _end_all(self, worker: _Worker) -> dict[int, RunningChunk]:
        """Nothing runs on the worker any more. Gives what had begun there, by number."""
        held = {order.chunk for order in worker.held}
        begun = {number: chunk for number, chunk in worker.chunks.items() if number not in held}
        for found in (worker.chunks, worker.second, worker.new, worker.held):
            found.clear()
        self._changed[worker.name] = None
        return begun

    def _abandon(self) -> list[Action]:
        actions = self._keep_all()
        for worker in self._workers.values():
            actions += [CancelChunk(worker.name, worker.life, number) for number in self._end_all(worker)]
        self._rollout = self._dispatcher = None
        self.num_unfinished = 0
        return actions

    # -- what workers tell

    def _read(self, worker: _Worker, report: Report) -> list[Action]:
        if report.num_steps > worker.num_steps:
            worker.num_steps, worker.waiting_since_s = report.num_steps, None
        worker.costs = report.costs or worker.costs
        worker.progress = report.progress or worker.progress
        worker.may_help &= not report.has_failed_drafting
        actions: list[Action] = []
        broken: dict[FailedChunk, LiveResponse] = {}
        for growth in report.growths:
            actions += self._grow(worker, growth, broken)
        for ending in report.endings:
            actions += self._end(worker, ending, broken)
        if any(number in worker.chunks for number in report.refused):
            actions += self._renew(worker)
        for number, reason in report.rejected:
            if (chunk := worker.chunks.get(number)) is not None:
                actions += self._fail(worker, number, "cannot run", reason, chunk.start)
        for failed, response in broken.items():
            actions = self._replace_broken(failed, response, actions)
        return [*actions, *self._begin(worker)]

    def _grow(self, worker: _Worker, growth: Growth, broken: dict[FailedChunk, LiveResponse]) -> list[Action]:
        chunk = worker.chunks.get(growth.chunk)
        if chunk is None:  # it was taken away or has ended
            return []
        response, known = chunk.response, chunk.response.num_tokens
        try:
            response.check_extent(chunk, growth.start, growth.start + len(growth.piece) + 1)
            is_new = response.absorb(growth.start, growth.piece) > 0
        except EngineError as error:
            return self._disagree(worker, growth.chunk, error)
        if is_new:
            worker.has_generated = True
            worker.new.pop(growth.chunk, None)
            response.num_steps = chunk.num_steps + growth.num_steps
            assert self._rollout is not None
            self._rollout.unkept[response.index] = response
            self._refute(worker, response, broken)
        return self._share_lead(growth.chunk, response, known) if is_new else []

    def _share_lead(self, number: int, response: LiveResponse, known: int) -> list[Action]:
        """In a race the other worker hears what this chunk was the first to tell, behind `known` tokens."""
        others = [(name, other) for other, name in response.runs.items() if other != number]
        tokens = response.tokens[known:].tobytes() if others else b""
        return [Adopt(name, self._workers[name].life, other, known, tokens) for name, other in others]

    def _end(self, worker: _Worker, ending: Ending, broken: dict[FailedChunk, LiveResponse]) -> list[Action]:
        chunk = worker.chunks.get(ending.chunk)
        if chunk is None:
            return []
        response = chunk.response
        try:
            response.check_extent(chunk, ending.start, ending.start + ending.num_tokens)
            response.check_end(chunk, ending)
            is_whole = response.absorb_end(ending)
        except EngineError as error:
            return self._disagree(worker, ending.chunk, error)
        num_tokens = response.num_tokens
        worker.has_generated |= ending.failure is None or ending.num_tokens > 0
        if len(response.runs) > 1 and ending.failure is None and not is_whole:
            self._leave_race(worker, ending.chunk)
            return []
        if len(response.runs) == 1 or ending.failure is None:
            response.num_steps = chunk.num_steps + ending.num_steps
            response.num_draft_tokens += ending.num_draft_tokens
        if ending.failure is not None:
            end = ending.start + ending.num_tokens
            return self._fail(worker, ending.chunk, "failed", ending.failure, end)
        is_final = is_whole and (ending.finish_reason == "stop" or num_tokens == response.request.max_tokens)
        self._refute(worker, response, broken, is_final=is_final)
        assert self._dispatcher is not None
        assert self._rollout is not None
        is_sound = response.failed is None
        self._dispatcher.chunk_finished(chunk.assignment, num_tokens, is_final, is_sound=is_sound)
        self._remove(worker, ending.chunk)
        actions: list[Action] = [*self._cancel_runs(response, keep_kv=not is_final)]
        if not is_final:
            self._rollout.unkept[response.index] = response
            return actions
        self._rollout.unkept.pop(response.index, None)
        return [*actions, response.keep(ending.finish_reason), self._deliver(chunk, ending.finish_reason)]

    def _fail(self, worker: _Worker, number: int, what: str, reason: str, end: int) -> list[Action]:
        """An engine has given a response up behind `end` tokens: another one tries, unless one has or none is up."""
        assert self._dispatcher is not None
        assert self._rollout is not None
        chunk = worker.chunks[number]
        response = chunk.response
        failed = response.failed
        # What a worker says counts no more once it is replaced.
        is_first = (
            failed is None or self._workers[failed.worker].life != failed.life or failed[:2] == worker.place
        )
        response.num_failures += 1
        if is_first:
            response.failed = FailedChunk(*worker.place, end)
        if len(response.runs) > 1:
            self._leave_race(worker, number, for_good=True)
        elif (
            is_first
            and response.num_failures < MOST_FAILURES
            and self._dispatcher.retry(chunk.assignment, response.num_tokens)
        ):
            self._remove(worker, number)
            self._rollout.unkept[response.index] = response
        else:
            before = "" if failed is None or is_first else f", as on {failed.worker} before"
            return self._give_up(worker, number, f"{what} on worker {worker.name}{before}: {reason}")
        return []

    def _refute(
        self,
        worker: _Worker,
        response: LiveResponse,
        broken: dict[FailedChunk, LiveResponse],
        *,
        is_final: bool = False,
    ) -> None:
        """A worker has gone on with a response, behind where another one failed? is_final: it has ended well."""
        failed = response.failed
        if failed is None or not (is_final or response.num_tokens > failed.end):
            return
        response.failed = None
        if failed[:2] != worker.place:
            broken[failed] = response

    def _replace_broken(
        self, failed: FailedChunk, response: LiveResponse, actions: list[Action]
    ) -> list[Action]:
        """A worker failed what another one can generate: it is replaced. Gives all actions, without orders to it."""
        worker = self._workers[failed.worker]
        if worker.place != failed[:2]:
            return actions
        others = [one for one in actions if not (isinstance(one, Order) and one.worker == worker.name)]
        reason = f"it failed response {response.index} behind {failed.end} tokens, and another worker went on with it"
        return [*others, StopWorker(worker.name, worker.life), *self._lose(worker, reason, blames=False)]

    def _give_up(
        self, worker: _Worker, number: int, failure: str, error: type[PacelineError] = RequestError
    ) -> list[Action]:
        """A response has failed: it is delivered as far as it came, or the rollout ends with the error."""
        chunk = worker.chunks[number]
        response = chunk.response
        if self._settings.on_failure == "raise":
            return [Fail(error, f"response {response.index} {failure}")]
        assert self._dispatcher is not None
        assert self._rollout is not None
        self._dispatcher.give_up(chunk.assignment)
        self._remove(worker, number)
        self._rollout.unkept.pop(response.index, None)
        return [*self._cancel_runs(response), self._deliver(chunk, "error", failure)]

    def _remove(self, worker: _Worker, number: int) -> None:
        """A chunk has left its worker."""
        runs = worker.chunks.pop(number).response.runs
        del runs[number]
        self._changed |= dict.fromkeys((worker.name, *runs.values()))
        worker.second.discard(number)
        worker.new.pop(number, None)

    def _cancel_runs(self, response: LiveResponse, *, keep_kv: bool = False) -> list[CancelChunk]:
        """What still generates the response stops."""
        actions = []
        for number, name in list(response.runs.items()):
            worker = self._workers[name]
            self._remove(worker, number)
            actions.append(CancelChunk(name, worker.life, number, keep_kv))
        return actions

    # -- a response that runs twice

    def _copy(self, helping: Helping, helper: _Worker, helped: _Worker, pair: Pair) -> list[Action]:
        """A free worker generates a response of another one too, if it has room for it."""
        assert self._dispatcher is not None
        [number] = pair.chunks
        chunk = helped.chunks[number]
        if not self._dispatcher.has_room(chunk.assignment, helper.name):
            return []
        helping.add(pair)
        response = chunk.response
        response.is_raced = True
        copy = replace(chunk, worker=helper.name, start=response.num_tokens, num_steps=response.num_steps)
        return [self._place(helper, copy, pair)]

    def _take_over(self, helper: _Worker, helped: _Worker, pair: Pair) -> list[Action]:
        """A free worker goes on with responses of another one, as far as it has room for them."""
        assert self._dispatcher is not None
        actions: list[Action] = []
        for number in pair.chunks:
            chunk = helped.chunks[number]
            if not self._dispatcher.has_room(chunk.assignment, helper.name):
                break
            response = chunk.response
            moved = self._dispatcher.move(chunk.assignment, helper.name)
            self._remove(helped, number)
            actions.append(CancelChunk(helped.name, helped.life, number, keep_kv=True))
            start, response.is_raced = response.num_tokens, False
            there = RunningChunk(moved, response, helper.name, start, chunk.end, response.num_steps)
            actions.append(order := self._place(helper, there, pair))
            helper.has_run, helper.new[order.chunk] = True, response
        return actions

    def _leave_race(self, worker: _Worker, number: int, *, for_good: bool = False) -> None:
        """One of the two that generate a response stops; the other one owns it from now on.

        for_good: the response gets no further copy.
        """
        assert self._dispatcher is not None
        chunk = worker.chunks[number]
        chunk.response.may_race &= not for_good
        was_owner = chunk.response.owner == number
        self._remove(worker, number)
        [(copy, name)] = chunk.response.runs.items()
        if was_owner:
            other, moved = self._workers[name], self._dispatcher.move(chunk.assignment, name)
            other.chunks[copy] = replace(other.chunks[copy], assignment=moved)

    def _end_copies(self, worker: _Worker) -> list[CancelChunk]:
        """A worker gets a chunk of its own: it runs copies no more."""
        copies = worker.copies
        for number in copies:
            self._leave_race(worker, number)
        return [CancelChunk(worker.name, worker.life, number) for number in copies]

    def _disagree(self, worker: _Worker, number: int, error: EngineError) -> list[Action]:
        """A worker tells other tokens than are known. In a race it stops, and the other one goes on; else it is an
        error.
        """
        response = worker.chunks[number].response
        if len(response.runs) < 2:
            raise error
        self._leave_race(worker, number, for_good=True)
        cancel = CancelChunk(worker.name, worker.life, number)
        return [Disagree(worker.name, response.index, str(error)), cancel]

    def _deliver(self, chunk: RunningChunk, reason: str, failure: str | None = None) -> Deliver:
        assert self._rollout is not None
        del self._rollout.places[chunk.assignment.group, chunk.assignment.sample]
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self._rollout = self._dispatcher = None
        return Deliver(chunk.response.index, chunk.response.finish(reason, self._version, failure))

    def _keep_grown(self, now_s: float) -> list[Action]:
        """Keep what has grown, from time to time."""
        if now_s - self._kept_s < KEEP_S:
            return []
        self._kept_s = now_s
        return self._keep_all()

    def _keep_all(self) -> list[Action]:
        if self._rollout is None:
            return []
        grown, self._rollout.unkept = self._rollout.unkept.values(), {}
        return [response.keep(None) for response in grown]

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
        elif not worker.is_drafter:
            self._join(worker)
        return []

    def _join(self, worker: _Worker) -> None:
        facts = worker.facts
        assert facts is not None
        assert self._dispatcher is not None
        self._dispatcher.worker_up(worker.name, facts.num_kv_blocks, facts.max_concurrency)

    def _lose(
        self, worker: _Worker, reason: str, *, is_fruitless: bool = True, blames: bool = True
    ) -> list[Action]:
        """A worker is gone: what it ran goes on elsewhere from the last token told, and another engine is started.

        is_fruitless: without a token this life counts as one that came to nothing. blames: what had begun there may
        have ended it.
        """
        actions = self._blame(worker, reason) if blames else []
        lost = self._withdraw(worker).values()
        if worker.has_generated:
            worker.num_fruitless = 0
        elif is_fruitless and (worker.state != "up" or worker.has_run):
            worker.num_fruitless += 1
        worker.life += 1
        self._changed[worker.name] = None
        worker.facts, worker.costs, worker.progress = None, None, None
        worker.waiting_since_s, worker.num_steps = None, 0
        worker.has_run, worker.has_generated, worker.may_help = False, False, True
        if worker.num_fruitless < self._settings.max_failed_starts:
            worker.state = "starting"
            return [StartWorker(worker.name, worker.life), *actions]
        worker.state = "given up"
        self._replace_verifiers()
        if all(other.state == "given up" for other in self._workers.values()):
            running = f" while it ran {_name(lost)}" if lost else ""
            message = (
                f"no worker is left: each was lost {self._settings.max_failed_starts} times in a row before it "
                f"generated anything, {worker.name} last{running}: {reason}"
            )
            actions.append(Fail(EngineError, message))
        return actions

    def _replace_verifiers(self) -> None:
        """Where no verifier is left, the drafters verify."""
        workers = self._workers.values()
        if any(worker.state != "given up" for worker in workers if not worker.is_drafter):
            return
        drafters = [worker for worker in workers if worker.is_drafter]
        for worker in drafters:
            worker.is_drafter = False
        if self._dispatcher is None:
            self._begin_dispatch()
            return
        for worker in drafters:
            if worker.state == "up":
                self._join(worker)

    def _blame(self, worker: _Worker, reason: str) -> list[Action]:
        """A worker is lost: is there a response that ends every worker which runs it?"""
        for response in worker.new.values():
            response.is_suspect = self._has_suspects = True
        if len(worker.new) != 1 or not worker.has_generated:
            return []
        [(number, response)] = worker.new.items()
        response.num_losses += 1
        if response.num_losses <= (most := self._settings.max_crashes):
            return []
        failure = (
            f"got no token from {most + 1} workers in a row that were lost when nothing else had just begun there, the "
            f"last one thus: {reason}; leave it out, or raise max_crashes ({most}) if something else ends the workers"
        )
        return self._give_up(worker, number, failure, EngineError)

    def _withdraw(self, worker: _Worker) -> dict[int, RunningChunk]:
        """Take the worker out of the rollout; its chunks wait again. Gives those that had begun, by number."""
        if worker.state != "up" or worker.is_drafter or self._dispatcher is None:
            return {}
        lost = dict(worker.chunks)
        for number, chunk in lost.items():
            if len(chunk.response.runs) > 1:
                self._leave_race(worker, number)
        progress = {}
        for number, chunk in worker.chunks.items():
            del chunk.response.runs[number]
            place = chunk.assignment.group, chunk.assignment.sample
            progress[place] = chunk.response.num_tokens
        self._dispatcher.worker_lost(worker.name, progress)
        held = {order.chunk for order in worker.held}
        self._end_all(worker)
        return {number: chunk for number, chunk in lost.items() if number not in held}

    # -- help for stragglers

    def _help(self, helping: Helping, event: Event) -> list[Action]:
        """Free workers help those that end last."""
        changed = self._take_changed(event)
        for name in changed:
            place = self._workers[name].place
            standing = self._standing(place)
            if standing is Standing.IDLE:
                self._idle.add(name)
            else:
                self._idle.discard(name)
                self._rested.discard(name)
            helping.note(name, self._door(place) if standing is Standing.BUSY else None)
            self._note_progress(self._workers[name])
        actions = helping.end(changed, self._standing)
        if isinstance(event, Reported):
            actions += helping.judge(event.worker, self._workers[event.worker].progress)
        if not self._idle or self._dispatcher is None:
            return actions
        for name in helping.take_stale():
            worker = self._workers[name]
            settled = self._dispatcher.can_move and not worker.held and not worker.new
            helping.predict(worker.place, self._remainders(worker), worker.costs, can_move=settled)
        if not isinstance(event, Tick) or event.now_s - self._helped_s < HELP_S:
            return actions
        self._helped_s = event.now_s
        helping.look(self._progress.copy())
        rested, self._rested = self._rested, set(self._idle)
        drafters = self._in_order(name for name in self._idle if self._workers[name].is_drafter)
        actions += helping.assign([worker.place for worker in drafters])
        if not helping.kinds or self._dispatcher.num_waiting:
            return actions
        free = (one for one in self._in_order(self._idle - helping.helpers) if not one.is_drafter)
        for pair in helping.choose(((worker.place, worker.costs) for worker in free), rested):
            helper, helped = self._workers[pair.helper.worker], self._workers[pair.helped.worker]
            match pair.kind:
                case Help.COPY:
                    actions += self._copy(helping, helper, helped, pair)
                case Help.TAKE:
                    actions += self._take_over(helper, helped, pair)
                case _:
                    actions.append(helping.draft(pair))
        return actions

    def _note_progress(self, worker: _Worker) -> None:
        """What it has generated counts while it is busy."""
        if worker.chunks and worker.progress is not None:
            self._progress[worker.name] = worker.progress
        else:
            self._progress.pop(worker.name, None)

    def _in_order(self, names: Iterable[str]) -> list[_Worker]:
        """Some workers, in the fleet's order."""
        return [self._workers[name] for name in sorted(names, key=self._ranks.__getitem__)]

    def _take_changed(self, event: Event) -> Iterable[str]:
        """The workers that may have other standings, or other responses left, than at the last call."""
        changed, self._changed = self._changed, {}
        if isinstance(event, WorkerEvent):
            changed[event.worker] = None
        elif isinstance(event, Submitted | WeightsChanged):
            changed = dict.fromkeys(self._workers)
        return changed

    def _standing(self, place: Place) -> Standing:
        """What a worker in this life is to those that help."""
        worker = self._workers[place.worker]
        if worker.place != place or worker.state != "up":
            return Standing.GONE
        if not worker.chunks:
            return Standing.IDLE if worker.may_help else Standing.UNABLE
        return Standing.RACING if worker.copies else Standing.BUSY

    # -- training on free workers

    def _train(self, event: Event) -> list[Training]:
        """Free workers that found nobody to help train the drafter. Whoever trains is looked at after every event, the
        others when there was time to find help.
        """
        training = self._training
        if not training.is_wanted:
            return []
        if not self.num_unfinished:
            return training.end()
        may_begin = isinstance(event, Tick) and (self._helping is None or self._helped_s == event.now_s)
        if not may_begin and all(self._is_free(place) for place in training.members):
            return []
        up = [worker.place for worker in self._workers.values() if worker.state == "up"]
        return training.observe(up, [place for place in up if self._is_free(place)], may_begin=may_begin)

    def _is_free(self, place: Place) -> bool:
        """Whether a worker is up, has nothing to generate and helps nobody."""
        worker = self._workers[place.worker]
        is_up = worker.place == place and worker.state == "up"
        return is_up and not worker.chunks and not self.pairs_of(worker.name)

    def _door(self, place: Place) -> Door | None:
        """Where others may draft for a worker."""
        facts = self._workers[place.worker].facts
        return (place, facts.draft_addresses) if facts is not None and facts.draft_addresses else None

    def expected_rest(self, worker: str, chunk: int, num_tokens: int) -> int:
        """Tokens that the response of a running chunk will still get, now that it has `num_tokens`."""
        assert self._dispatcher is not None
        return self._dispatcher.expected_rest(self._workers[worker].chunks[chunk].assignment, num_tokens)

    def _remainders(self, worker: _Worker) -> list[Remainder]:
        """What is left of a worker's responses."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return []
        return [
            Remainder(
                number,
                dispatcher.expected_rest(chunk.assignment, chunk.response.num_tokens),
                len(chunk.response.request.prompt) + chunk.response.num_tokens,
                chunk.response.may_race,
            )
            for number, chunk in worker.chunks.items()
            if chunk.response.owner == number
        ]

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
            if worker.state == "up":  # one that is loading is given these when it is done
                worker.state, worker.waiting_since_s = "loading", None
                actions.append(LoadWeights(worker.name, worker.life, version))
        return actions

    def _look_for_silence(self, now_s: float) -> list[Action]:
        """Give up on workers of which something has been expected for too long.

        One that only did not start is started again, however often, while others generate: it may wait for room.
        """
        listened_s = self._listen(now_s)
        workers, is_idle = self._workers.values(), not self.num_unfinished
        goes_on = any(worker.state == "up" if is_idle else worker.chunks for worker in workers)
        helpers = self._helping.helpers if self._helping is not None else ()
        actions: list[Action] = []
        for worker in workers:
            state = worker.state
            if state == "up":
                if not worker.chunks and worker.name not in helpers:
                    worker.waiting_since_s = None
                    continue
                limit_s = self._settings.silence_s
            elif state == "given up":
                continue
            else:
                limit_s = self._settings.start_timeout_s
            if worker.waiting_since_s is None:
                worker.waiting_since_s = listened_s
            elif listened_s - worker.waiting_since_s > limit_s:
                actions.append(StopWorker(worker.name, worker.life))
                waits = state == "starting" and goes_on
                actions += self._lose(worker, self._silence_of(worker), is_fruitless=not waits)
        return actions

    def _silence_of(self, worker: _Worker) -> str:
        """What a worker has not done for too long."""
        if worker.state == "up":
            step = "engine step" if worker.chunks else "turn of drafting"
            return f"it finished no {step} after {self._settings.silence_s:g} s"
        hint = " (`ray status` tells whether there was room for it)" if worker.state == "starting" else ""
        return f"it was still {worker.state} after {self._settings.start_timeout_s:g} s{hint}"

    def _listen(self, now_s: float) -> float:
        """Time goes on; gives the seconds that the driver has listened so far."""
        before_s, self._last_tick_s = self._last_tick_s, now_s
        if before_s is not None:
            self._listened_s += min(now_s - before_s, LONGEST_TICK_S)
        return self._listened_s


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

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

A worker that is lost makes suspects of the responses that had begun there and had no token yet. Until it gets one, a
suspect begins only where no other chunk is without a token, and none begins beside it. It is blamed only for workers
that are lost while it is alone in that and that have generated before, in this life or an earlier one; so something
else that ends workers costs time and seldom a response. Who gives one up in a life that generated nothing has to
generate again before it blames another one.

Tokens are a function of weights, prefix and key. So a response that fails waits for another worker and is given up
where that one fails it too, or where there is none; if it goes on there, the first one is broken and is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.config import FleetSettings, Variant
from paceline.control.events import (
    Abandoned,
    Action,
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
from paceline.control.helping import Helping, Pair, Place, Remainder, Standing
from paceline.control.live_response import FailedChunk, LiveResponse, RunningChunk
from paceline.control.placement import Placement
from paceline.control.silence import Silence
from paceline.control.training import TrainingSessions
from paceline.control.worker import Worker, WorkerState
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.planning.dispatch import Dispatcher, DispatchSettings
from paceline.planning.help import Help
from paceline.types import Progress, RolloutRequest

HELP_KINDS: dict[str, frozenset[Help]] = {
    "auto": frozenset({Help.DRAFT, Help.COPY, Help.TAKE}),
    "draft": frozenset({Help.DRAFT}),
    "copy": frozenset({Help.COPY}),
    "take": frozenset({Help.TAKE}),
    "none": frozenset(),
}

HELP_S = 0.5
"""How often free workers and stragglers are brought together."""

MOST_FAILURES = 4
"""So often a response fails, on whatever workers, until it is given up: each time may have cost an engine."""

KEEP_S = 1.0
"""How often responses that grow are kept for a restarted driver: one growth of all has a few tokens, and a header."""


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
            f"w{i}": Worker(f"w{i}", is_drafter=i >= first_drafter) for i in range(settings.workers)
        }
        self._ranks = {name: rank for rank, name in enumerate(self._workers)}
        self._runs = Placement(self._workers)
        self._rollout: _Rollout | None = None
        kinds = HELP_KINDS[settings.help]
        self._helping = Helping(kinds) if kinds or settings.num_drafters else None
        self._idle: set[str] = set()
        self._rested: set[str] = set()  # that were idle when helpers were looked for last, and ever since
        self._progress: dict[str, Progress] = {}  # of the workers that have chunks, as told last
        self._has_suspects = (
            False  # whether a worker was lost in this rollout before some response got a token there
        )
        self._training = TrainingSessions()
        self._silence = Silence(settings)
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
                actions = [StartWorker(*worker.place) for worker in self._workers.values()]
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

    def _hear(self, event: WorkerEvent, worker: Worker) -> list[Action]:
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
        return self._runs.dispatcher.num_waiting if self._runs.dispatcher is not None else 0

    @property
    def num_running(self) -> int:
        """Chunks that run somewhere."""
        return sum(len(worker.chunks) for worker in self._workers.values())

    def next_waiting(self, count: int) -> list[RolloutRequest]:
        """The requests whose next chunks will run next if nothing else happens, in that order; at most `count`."""
        if self._runs.dispatcher is None or self._rollout is None:
            return []
        places = self._rollout.places
        return [places[place].request for place in self._runs.dispatcher.next_waiting(count)]

    # -- the rollout

    def _submit(self, event: Submitted) -> list[Action]:
        if self.num_unfinished:
            raise RequestError(
                f"{self.num_unfinished} responses are still running: finish or abandon them first"
            )
        if all(worker.state == "given up" for worker in self._workers.values()):
            raise EngineError("no worker is left, all have been given up: start another fleet")
        self._runs.dispatcher, self._rollout = (
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
                actions.append(Deliver(index, response.finish(reason, self._runs.version)))
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
        if self._runs.dispatcher is not None or rollout is None or not self.num_unfinished:
            return
        up = [worker for worker in self._workers.values() if worker.verifies]
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
        self._runs.dispatcher = dispatcher
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
        given: dict[str, Worker] = {}
        while self._runs.dispatcher is not None:
            try:
                assignment = self._runs.dispatcher.next_assignment()
            except RequestError as error:
                if all(worker.state in {"up", "given up"} for worker in self._workers.values()):
                    actions.append(Fail(RequestError, str(error)))
                break
            if assignment is None:
                break
            assert self._rollout is not None
            response = self._rollout.places[assignment.group, assignment.sample]
            given[assignment.worker] = self._runs.give(assignment, response)
        for worker in given.values():
            actions += [*self._runs.end_copies(worker), *worker.begin(has_suspects=self._has_suspects)]
        return actions

    def _abandon(self) -> list[Action]:
        actions = self._keep_all()
        for worker in self._workers.values():
            actions += [CancelChunk(*worker.place, number) for number in self._runs.clear(worker)]
        self._rollout = self._runs.dispatcher = None
        self.num_unfinished = 0
        return actions

    # -- what workers tell

    def _read(self, worker: Worker, report: Report) -> list[Action]:
        worker.hear(report)
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
        return [*actions, *worker.begin(has_suspects=self._has_suspects)]

    def _grow(self, worker: Worker, growth: Growth, broken: dict[FailedChunk, LiveResponse]) -> list[Action]:
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
            worker.prove()
            worker.new.pop(growth.chunk, None)
            response.num_steps = chunk.num_steps + growth.num_steps
            assert self._rollout is not None
            self._rollout.unkept[response.index] = response
            self._refute(worker, response, broken)
        return [*self._runs.share_lead(growth.chunk, response, known)] if is_new else []

    def _end(self, worker: Worker, ending: Ending, broken: dict[FailedChunk, LiveResponse]) -> list[Action]:
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
        if ending.failure is None or ending.num_tokens > 0:
            worker.prove()
        if len(response.runs) > 1 and ending.failure is None and not is_whole:
            self._runs.leave_race(worker, ending.chunk)
            return []
        if len(response.runs) == 1 or ending.failure is None:
            response.num_steps = chunk.num_steps + ending.num_steps
            response.num_draft_tokens += ending.num_draft_tokens
        if ending.failure is not None:
            end = ending.start + ending.num_tokens
            return self._fail(worker, ending.chunk, "failed", ending.failure, end)
        is_final = is_whole and (ending.finish_reason == "stop" or num_tokens == response.request.max_tokens)
        self._refute(worker, response, broken, is_final=is_final)
        assert self._rollout is not None
        is_sound = response.failed is None
        self._runs.known.chunk_finished(chunk.assignment, num_tokens, is_final, is_sound=is_sound)
        self._runs.remove(worker, ending.chunk)
        actions: list[Action] = [*self._runs.cancel(response, keep_kv=not is_final)]
        if not is_final:
            self._rollout.unkept[response.index] = response
            return actions
        self._rollout.unkept.pop(response.index, None)
        return [*actions, response.keep(ending.finish_reason), self._deliver(chunk, ending.finish_reason)]

    def _fail(self, worker: Worker, number: int, what: str, reason: str, end: int) -> list[Action]:
        """An engine has given a response up behind `end` tokens: another one tries, unless one has or none is up."""
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
            self._runs.leave_race(worker, number, for_good=True)
        elif (
            is_first
            and response.num_failures < MOST_FAILURES
            and self._runs.known.retry(chunk.assignment, response.num_tokens)
        ):
            self._runs.remove(worker, number)
            self._rollout.unkept[response.index] = response
        else:
            before = "" if failed is None or is_first else f", as on {failed.worker} before"
            return self._give_up(worker, number, f"{what} on worker {worker.name}{before}: {reason}")
        return []

    def _refute(
        self,
        worker: Worker,
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
        return [*others, StopWorker(*worker.place), *self._lose(worker, reason, blames=False)]

    def _give_up(
        self, worker: Worker, number: int, failure: str, error: type[PacelineError] = RequestError
    ) -> list[Action]:
        """A response has failed: it is delivered as far as it came, or the rollout ends with the error."""
        chunk = worker.chunks[number]
        response = chunk.response
        if self._settings.on_failure == "raise":
            return [Fail(error, f"response {response.index} {failure}")]
        assert self._rollout is not None
        self._runs.known.give_up(chunk.assignment)
        self._runs.remove(worker, number)
        self._rollout.unkept.pop(response.index, None)
        return [*self._runs.cancel(response), self._deliver(chunk, "error", failure)]

    # -- a response that runs twice

    def _disagree(self, worker: Worker, number: int, error: EngineError) -> list[Action]:
        """A worker tells other tokens than are known. In a race it stops, and the other one goes on; else it is an
        error.
        """
        response = worker.chunks[number].response
        if len(response.runs) < 2:
            raise error
        self._runs.leave_race(worker, number, for_good=True)
        cancel = CancelChunk(*worker.place, number)
        return [Disagree(worker.name, response.index, str(error)), cancel]

    def _deliver(self, chunk: RunningChunk, reason: str, failure: str | None = None) -> Deliver:
        assert self._rollout is not None
        del self._rollout.places[chunk.assignment.group, chunk.assignment.sample]
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self._rollout = self._runs.dispatcher = None
        return Deliver(chunk.response.index, chunk.response.finish(reason, self._runs.version, failure))

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

    def _welcome(self, worker: Worker, version: int) -> list[Action]:
        """A worker has weights: those of the present, or it shall load them first."""
        worker.waiting_since_s = None
        if version != self._runs.version:
            worker.state = "loading"
            return [LoadWeights(*worker.place, self._runs.version)]
        worker.state = "up"
        if self._runs.dispatcher is None:
            self._begin_dispatch()
        elif not worker.is_drafter:
            self._join(worker)
        return []

    def _join(self, worker: Worker) -> None:
        facts = worker.facts
        assert facts is not None
        self._runs.known.worker_up(worker.name, facts.num_kv_blocks, facts.max_concurrency)

    def _lose(
        self, worker: Worker, reason: str, *, is_fruitless: bool = True, blames: bool = True
    ) -> list[Action]:
        """A worker is gone: what it ran goes on elsewhere from the last token told, and another engine is started.

        is_fruitless: without a token this life counts as one that came to nothing. blames: what had begun there may
        have ended it.
        """
        actions, is_excused = self._blame(worker, reason) if blames else ([], False)
        lost = self._runs.withdraw(worker).values()
        worker.end_life(is_fruitless=is_fruitless and not is_excused)
        self._runs.changed[worker.name] = None
        if worker.num_fruitless < self._settings.max_failed_starts:
            worker.state = "starting"
            return [StartWorker(*worker.place), *actions]
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
        if self._runs.dispatcher is None:
            self._begin_dispatch()
            return
        for worker in drafters:
            if worker.state == "up":
                self._join(worker)

    def _blame(self, worker: Worker, reason: str) -> tuple[list[Action], bool]:
        """A worker is lost: is there a response that ends every worker which runs it? Gives whether one is held to have
        ended this one.
        """
        for response in worker.new.values():
            response.is_suspect = self._has_suspects = True
        if len(worker.new) != 1:
            return [], False
        [(number, response)] = worker.new.items()
        if not (worker.is_proven or response.has_fatal_prompt):
            return [], False
        response.num_losses += 1
        if response.num_losses <= (most := self._settings.max_crashes):
            return [], True
        if response.has_fatal_prompt:
            workers = f"a worker that was lost, as {most + 1} were with another response to its prompt,"
        else:
            workers = f"{most + 1} workers in a row that were lost when nothing else had just begun there, the last one"
            worker.is_proven = worker.has_generated
        failure = (
            f"got no token from {workers} thus: {reason}; leave it out, or raise max_crashes ({most}) if something "
            "else ends the workers"
        )
        if response.num_tokens == 0:
            self._warn_of_prompt(worker.chunks[number].assignment.group)
        return self._give_up(worker, number, failure, EngineError), True

    def _warn_of_prompt(self, group: int) -> None:
        """A response has ended its workers before its first token: the others of its group begin with the same prefill.
        Each of them is given up with the first worker that it ends.
        """
        assert self._rollout is not None
        for (number, _), response in self._rollout.places.items():
            if number == group and response.num_tokens == 0:
                response.is_suspect = response.has_fatal_prompt = True
                response.num_losses = self._settings.max_crashes

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
            helping.note(name, self._workers[name].door if standing is Standing.BUSY else None)
            self._note_progress(self._workers[name])
        actions = helping.end(changed, self._standing)
        if isinstance(event, Reported):
            in_vain = helping.judge(event.worker, self._progress, self._count_copied)
            if in_vain is not None and in_vain.kind is Help.COPY:
                actions += self._runs.end_copies(self._workers[in_vain.helper.worker])
            elif in_vain is not None:
                actions += helping.stop_drafting(in_vain)
        if not self._idle or self._runs.dispatcher is None:
            return actions
        for name in helping.take_stale():
            worker = self._workers[name]
            settled = self._runs.dispatcher.can_move and not worker.held and not worker.new
            helping.predict(worker.place, self._remainders(worker), worker.costs, can_move=settled)
        if not isinstance(event, Tick) or event.now_s - self._helped_s < HELP_S:
            return actions
        self._helped_s = event.now_s
        helping.look(self._progress.copy())
        rested, self._rested = self._rested, set(self._idle)
        drafters = self._in_order(name for name in self._idle if self._workers[name].is_drafter)
        actions += helping.assign([worker.place for worker in drafters])
        if not helping.kinds or self._runs.dispatcher.num_waiting:
            return actions
        free = (one for one in self._in_order(self._idle - helping.helpers) if not one.is_drafter)
        for pair in helping.choose(((worker.place, worker.costs) for worker in free), rested):
            helper, helped = self._workers[pair.helper.worker], self._workers[pair.helped.worker]
            match pair.kind:
                case Help.COPY:
                    if (order := self._runs.copy(helper, helped, pair)) is not None:
                        generated = helper.progress.num_tokens if helper.progress else 0
                        helping.race(pair, generated, self._count_copied(pair))
                        actions.append(order)
                case Help.TAKE:
                    actions += self._runs.take_over(helper, helped, pair)
                case _:
                    actions.append(helping.draft(pair))
        return actions

    def _count_copied(self, pair: Pair) -> int:
        """Tokens of the response that two workers generate."""
        return self._workers[pair.helped.worker].chunks[pair.chunks[0]].response.num_tokens

    def _note_progress(self, worker: Worker) -> None:
        """What it has generated counts while it is busy."""
        if worker.chunks and worker.progress is not None:
            self._progress[worker.name] = worker.progress
        else:
            self._progress.pop(worker.name, None)

    def _in_order(self, names: Iterable[str]) -> list[Worker]:
        """Some workers, in the fleet's order."""
        return [self._workers[name] for name in sorted(names, key=self._ranks.__getitem__)]

    def _take_changed(self, event: Event) -> Iterable[str]:
        """The workers that may have other standings, or other responses left, than at the last call."""
        changed, self._runs.changed = self._runs.changed, {}
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

    def expected_rest(self, worker: str, chunk: int, num_tokens: int) -> int:
        """Tokens that the response of a running chunk will still get, now that it has `num_tokens`."""
        return self._runs.known.expected_rest(self._workers[worker].chunks[chunk].assignment, num_tokens)

    def _remainders(self, worker: Worker) -> list[Remainder]:
        """What is left of a worker's responses."""
        dispatcher = self._runs.dispatcher
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

    def _renew(self, worker: Worker) -> list[Action]:
        """A worker has refused a chunk, so it has missed new weights; those of version 0 nobody can give it."""
        if self._runs.version == 0:
            stop = StopWorker(*worker.place)
            return [stop, *self._lose(worker, "it refused a chunk with the model's own weights")]
        cancels = [CancelChunk(*worker.place, number) for number in self._runs.withdraw(worker)]
        worker.state, worker.waiting_since_s = "loading", None
        return [*cancels, LoadWeights(*worker.place, self._runs.version)]

    def _change_weights(self, version: int) -> list[Action]:
        if self.num_unfinished:
            raise EngineError(
                f"{self.num_unfinished} responses are running: finish or abandon them before new weights"
            )
        self._runs.version = version
        actions: list[Action] = []
        for worker in self._workers.values():
            if worker.state == "up":  # one that is loading is given these when it is done
                worker.state, worker.waiting_since_s = "loading", None
                actions.append(LoadWeights(*worker.place, version))
        return actions

    def _look_for_silence(self, now_s: float) -> list[Action]:
        """Give up on workers of which something has been expected for too long.

        One that only did not start is started again, however often, while others generate: it may wait for room.
        """
        helpers = self._helping.helpers if self._helping is not None else ()
        is_idle = not self.num_unfinished
        actions: list[Action] = []
        for worker, reason, may_wait in self._silence.look(
            now_s, self._workers.values(), helpers, is_idle=is_idle
        ):
            stop = StopWorker(*worker.place)
            actions += [stop, *self._lose(worker, reason, is_fruitless=not may_wait)]
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

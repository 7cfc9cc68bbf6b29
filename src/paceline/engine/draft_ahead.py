"""The fast loop's end of its draft workers: feeds the draft trees, waits for drafts where that pays (planning/wait)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from paceline.config import EngineSettings
from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import DraftCounts, Drafts, WorkerSettings
from paceline.engine.draft_windows import DraftWindows
from paceline.engine.loop_log import EngineLog
from paceline.engine.model_watch import ModelWatch
from paceline.planning.latency import MAX_TOKENS, StepTimeModel, predict_one_s
from paceline.planning.wait import WaitSnapshot, decide_wait
from paceline.types import DraftQuery, Int32Array, Int64Array, MetDrafts

UNHEARD_CALLS = 1.5
"""Drafting calls until the next drafts of a worker that has not heard of the last step: half of the one in which it is,
and its next. One that has heard of it needs one."""

TURN_CALLS = 20.0
"""Drafting calls after which a turn goes on without drafts: the worker has died."""

ARRIVAL_S = 60.0
"""An engine that starts waits so long for its draft workers, at most; they come later then, or never."""

_SOONEST = 0.1
"""Of a call: drafts that are overdue are expected so soon."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of the engine's target that drafting depends on."""

    vocab_size: int = 1 << 31
    """What other workers tell of other ids is dropped."""
    max_step_tokens: int = MAX_TOKENS
    """The engine's token budget. Drafts get what other tokens of the step leave of it."""
    slots_per_request: int = 0
    """Of that budget vLLM takes so much more of each request in the step, for a draft model of its own."""
    max_model_len: int = 2048
    max_requests: int = 128


UNKNOWN_SIZES = TargetSizes()


class _Worker:
    """What an engine knows of one of its draft workers."""

    def __init__(self, link: WorkerLink, source: int, windows: DraftWindows | None, folder: str) -> None:
        """source: its number in the draft trees. windows: None: they stay as they are. folder: of its drafter."""
        self.link, self.source, self.windows = link, source, windows
        self.watch = ModelWatch(folder, is_elsewhere=True)
        self.latest: Drafts | None = None
        self.since_s = 0.0
        """When it was told of the last step, or said something about it."""
        self.is_late = False
        """Whether the last wait for it was in vain."""
        self.is_resting = False
        """The engine drafts by itself."""

    @property
    def has_come(self) -> bool:
        """Whether it could draft: it has come, and its drafter is not dead."""
        return self.link.is_there and self.watch.is_used

    @property
    def is_there(self) -> bool:
        """Whether it may be counted on."""
        return self.has_come and not self.is_resting

    @property
    def is_drafting(self) -> bool:
        """Whether it takes the place of the engine's own drafter: it may be counted on, and a helper has found drafts
        that pay. While it has not, or is tried again, the engine drafts by itself.
        """
        is_idle = self.windows is not None and self.windows.is_idle and self.link.child is None
        return self.is_there and not is_idle

    @property
    def level_s(self) -> float:
        """What it takes for one more token of all responses that it drafts for; 0 before it has drafted."""
        return 0.0 if self.latest is None else self.latest.level_s

    def take(self, trees: DraftTrees, timeout_s: float = 0.0) -> bool:
        """Put what arrives into the trees; returns whether something has."""
        drafts = self.link.take(timeout_s)
        if drafts is None or not self.watch.is_used:
            return False
        trees.add_packed(self.source, drafts.trees)
        self.latest, self.is_late = drafts, False
        if drafts.number == self.link.number:
            self.since_s = time.perf_counter()
        return True

    def learn(self, responses: Int64Array, told: Int32Array, right: Int32Array) -> None:
        """What a step has decided about its drafts (`DraftTrees.judge`): for the windows, and the first ones for the
        watch.
        """
        if self.windows is not None:
            self.windows.learn(responses, told, right)
        if self.is_drafting:
            self.watch.count(int(np.count_nonzero(told)), int(np.count_nonzero(right)))
            if not self.watch.is_used:
                self.link.rest()

    def arrival_s(self, latest: Drafts, now_s: float) -> float:
        """Until it says something more. latest: what it has said last."""
        calls = 1.0 if latest.number == self.link.number else UNHEARD_CALLS
        return max(latest.call_s * calls - (now_s - self.since_s), _SOONEST * latest.call_s)


class DraftAhead:
    """One per engine with draft workers, its own or others that help it."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        trees: DraftTrees,
        log: EngineLog,
        every: int = 0,
        max_window: int = 0,
        *,
        by_turns: bool = False,
        folders: Sequence[str] = (),
    ) -> None:
        """links: of the model drafter's worker, and of further ones. folders: of their drafters, for warnings.

        every, max_window: as `DraftWindows`; 0: windows are not planned. by_turns: each step waits for whole windows.
        """
        self.links, self._trees, self._log = tuple(links), trees, log
        self._by_turns = by_turns
        self._workers = []
        for place, link in enumerate(links):
            source = Source.MODEL - place
            windows = DraftWindows(link, source, every, max_window, log) if every and max_window else None
            folder = folders[place] if folders else f"of place {place}"
            self._workers.append(_Worker(link, source, windows, folder))
        self.wait_s = 0.0
        """Of all steps."""
        self.step_wait_s = 0.0
        """Of the present step."""
        self._step_s = 0.0
        """What a step takes, as far as is known."""

    # -- responses

    def open(self, response: int, key: int, temperature: float, limit: int) -> None:
        """A response is to run, as `WorkerLink.open`."""
        for link in self.links:
            link.open(response, key, temperature, limit)

    def grow(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None:
        """Responses have grown, as `DraftTrees.advance`, which has heard of it."""
        for worker in self._workers:
            begun = worker.link.grow(responses, offsets, tokens, self._step_s)
            worker.since_s = time.perf_counter()
        if begun:  # for one worker as for all
            self._allow(begun)

    def close(self, response: int) -> None:
        """A response has ended."""
        for worker in self._workers:
            worker.link.close(response)
            if worker.windows is not None:
                worker.windows.close(response)

    def forget(self) -> None:
        """Forget all responses: the policy has changed."""
        for worker in self._workers:
            worker.link.forget()
            worker.watch.begin_trial()
            if worker.windows is not None:
                worker.windows.clear()
            if worker.is_resting:
                worker.link.rest()

    def rest(self) -> None:
        """Have nothing drafted until `wake`: the engine drafts by itself."""
        for worker in self._workers:
            worker.is_resting = True
            worker.link.rest()

    def wake(self) -> None:
        """Go on drafting ahead, of all that runs, with the windows of the beginning: a plan of no drafts would stand
        for long.
        """
        running: list[int] = []
        for worker in self._workers:
            worker.is_resting = False
            if worker.windows is not None:
                worker.windows.leave()
            if worker.watch.is_used:
                running = worker.link.wake()  # the same for all
        self._allow(running)

    @property
    def is_idle(self) -> bool:
        """Whether no response runs, nor waits to."""
        return all(link.is_idle for link in self.links)

    def shut_down(self) -> None:
        """End the workers."""
        for link in self.links:
            link.shut_down()

    # -- what is known of the workers

    @property
    def is_there(self) -> bool:
        """Whether any worker may be counted on."""
        return any(worker.is_there for worker in self._workers)

    @property
    def is_drafting(self) -> bool:
        """Whether any worker drafts what the engine need not, or cannot."""
        return any(worker.is_drafting for worker in self._workers)

    @property
    def has_come(self) -> bool:
        """Whether any worker could draft, resting or not."""
        return any(worker.has_come for worker in self._workers)

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """What each worker has done, as far as was heard."""
        return tuple(link.counts for link in self.links)

    def has(self, place: int) -> bool:
        """Whether a worker drafts with the model drafter of this place, so that the engine need not."""
        return self._workers[place].is_drafting

    @property
    def num_alarms(self) -> int:
        """Times that a worker's drafter was found dead, and dropped."""
        return sum(worker.watch.score.alarms for worker in self._workers)

    def drafting(self, place: int) -> tuple[float, float] | None:
        """What that drafter takes for one more token of all responses, and how often its tokens are accepted, as its
        worker has told; None before it has drafted.
        """
        worker = self._workers[place]
        if worker.latest is None or not worker.level_s:
            return None
        return worker.level_s, worker.latest.mean_acceptance

    # -- a step

    def plan(self, responses: Int64Array, step_time: StepTimeModel) -> None:
        """A step begins: plan how far each worker drafts ahead, where it is time.

        responses: that draft in it; those that wait begin with what is planned for the mean. step_time: of the target's
        steps without prefill.
        """
        has_changed = False
        for worker in self._workers:
            if worker.windows is None or worker.is_resting:
                continue
            if worker.is_there:
                has_changed |= worker.windows.advance(responses, step_time, worker.level_s)
            else:
                has_changed |= worker.windows.leave()
        if has_changed:
            self._allow(responses.tolist())

    def _allow(self, responses: list[int]) -> None:
        """Let the trees know how far any worker drafts ahead of these responses."""
        most = np.max([link.most_ahead(responses) for link in self.links], axis=0)
        self._trees.allow(np.asarray(responses, np.int64), most)

    def learn(self, responses: Int64Array, decided: Int32Array) -> None:
        """What a step has decided, as `DraftTrees.judge`: each worker is judged by what it has proposed itself."""
        for worker in self._workers:
            if not worker.is_resting:
                worker.learn(responses, *self._trees.judge(worker.source, responses, decided))

    def listen(self) -> bool:
        """Take what has arrived; returns whether any worker may be counted on."""
        for worker in self._workers:
            worker.take(self._trees)
        return self.is_there

    def best(
        self, query: DraftQuery, step_time: StepTimeModel, num_drafted: int, may_wait: bool
    ) -> MetDrafts:
        """Wait for more than has arrived where that pays, and return the best chains.

        What is waited for are the drafts that are expected first. step_time: of the target's steps without prefill.
        num_drafted: draft tokens of the last step.
        """
        began_s = time.perf_counter()
        drafts = self._trees.best(query.responses, query.positions, query.max_tokens)
        while may_wait and (soonest := self._soonest()) is not None:
            worker, latest, arrival_s = soonest
            snapshot = _snapshot(query, drafts, step_time, num_drafted, latest, arrival_s)
            self._step_s = snapshot.step_s
            if self._by_turns:
                wait_s = TURN_CALLS * latest.call_s if drafts.num_open else 0.0
            else:
                wait_s = decide_wait(snapshot)
                self._log.write_wait(snapshot, wait_s, worker.source)
            is_over = time.perf_counter() - began_s > snapshot.step_s and not self._by_turns
            if not wait_s or is_over:
                break
            worker.is_late = not worker.take(self._trees, wait_s)
            drafts = self._trees.best(query.responses, query.positions, query.max_tokens)
        self.step_wait_s = time.perf_counter() - began_s
        self.wait_s += self.step_wait_s
        return drafts

    def _soonest(self) -> tuple[_Worker, Drafts, float] | None:
        """Whose drafts are expected first, what it has said last, and when they come; of equal ones the first."""
        now_s = time.perf_counter()
        expected = [
            (worker, worker.latest, worker.arrival_s(worker.latest, now_s))
            for worker in self._workers
            if worker.latest and worker.latest.call_s and worker.is_there and not worker.is_late
        ]
        return min(expected, key=lambda one: one[2], default=None)


def _snapshot(
    query: DraftQuery,
    drafts: MetDrafts,
    step_time: StepTimeModel,
    num_drafted: int,
    latest: Drafts,
    arrival_s: float,
) -> WaitSnapshot:
    count = len(query.responses)
    num_tokens = count + num_drafted
    more = latest.num_levels * drafts.num_open
    step_s, longer_step_s = (predict_one_s(step_time, size) for size in (num_tokens, num_tokens + more))
    return WaitSnapshot(
        count,
        drafts.open_probability,
        latest.mean_acceptance,
        latest.num_levels,
        arrival_s,
        step_s,
        longer_step_s,
    )


def start_draft_ahead(
    settings: EngineSettings, sizes: TargetSizes, trees: DraftTrees, log: EngineLog
) -> DraftAhead | None:
    """An engine's end of its own draft workers, once they have come, or of another worker's help; None if there is to
    be neither.

    Raises CheckpointError for a model drafter that does not fit the target, ConfigError where no worker can be.
    """
    if settings.model_drafter is None or not (settings.draft_worker or settings.draft_help):
        return None
    from paceline.drafting.checkpoint import check_drafter_folder

    for folder in settings.model_drafters:
        check_drafter_folder(Path(folder), sizes.vocab_size)
    wanted = WorkerSettings(
        address="",
        parent=0,
        model="",
        dtype=settings.model_drafter_dtype,
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        vocab_size=sizes.vocab_size,
        floor=0.0 if settings.draft_by_turns else settings.draft_floor,
        sharpness=settings.sharpness,
        num_branches=0 if settings.draft_by_turns else settings.draft_branches,
        interface=settings.draft_interface if settings.draft_help else None,
        secret_file=settings.draft_secret_file,
    )
    with ExitStack() as started:
        links = []
        for folder in settings.model_drafters:
            own = replace(wanted, model=folder)
            links.append(WorkerLink(own, settings.most_ahead, trees, has_child=bool(settings.draft_worker)))
            started.callback(links[-1].shut_down)
        until_s = time.monotonic() + ARRIVAL_S
        for link in links:
            link.await_worker(until_s)
        started.pop_all()
    longest = min(settings.max_draft_tokens, settings.budget.max_draft_tokens)
    every = 0 if settings.draft_by_turns else settings.reconfigure_steps
    return DraftAhead(
        links,
        trees,
        log,
        every,
        longest,
        by_turns=settings.draft_by_turns,
        folders=settings.model_drafters,
    )

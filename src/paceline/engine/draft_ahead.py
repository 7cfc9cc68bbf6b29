"""The fast loop's end of a draft worker: feeds the draft trees, waits for drafts where that pays (planning/wait.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config import EngineSettings
from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import Drafts, WorkerSettings
from paceline.engine.loop_log import EngineLog
from paceline.planning.latency import MAX_TOKENS, StepTimeModel, predict_s
from paceline.planning.wait import WaitSnapshot, decide_wait
from paceline.types import DraftQuery, Int32Array, Int64Array, MetDrafts

UNHEARD_CALLS = 1.5
"""Drafting calls until the next drafts of a worker that has not heard of the last step: half of the one in which it is,
and its next. One that has heard of it needs one."""

_SOONEST = 0.1
"""Of a call: drafts that are overdue are expected so soon."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of the engine's target that drafting depends on."""

    vocab_size: int = 1 << 31
    """What other workers tell of other ids is dropped."""
    max_step_tokens: int = MAX_TOKENS
    """The engine's token budget. Drafts get what other tokens of the step leave of it."""
    max_model_len: int = 2048
    max_requests: int = 128


UNKNOWN_SIZES = TargetSizes()


class DraftAhead:
    """One per engine with a draft worker."""

    def __init__(self, link: WorkerLink, trees: DraftTrees, log: EngineLog) -> None:
        self.link, self._trees, self._log = link, trees, log
        self.wait_s = 0.0
        """Of all steps."""
        self.step_wait_s = 0.0
        """Of the present step."""
        self._latest: Drafts | None = None
        self._since_s = 0.0
        """When the worker was told of the last step, or said something about it."""
        self._is_late = False
        """Whether the last wait was in vain."""
        self._step_s = 0.0
        """What a step takes, as far as is known."""

    @property
    def acceptance(self) -> float:
        """Of the worker's tokens, as it has told; 0 before it has drafted."""
        return self._latest.mean_acceptance if self._latest is not None else 0.0

    @property
    def level_s(self) -> float:
        """What the worker takes for one more token of all responses that it drafts for; 0 before it has drafted."""
        return self._latest.call_s / max(self._latest.num_levels, 1) if self._latest is not None else 0.0

    def grow(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None:
        """Responses have grown, as `DraftTrees.advance`, which has heard of it."""
        self.link.grow(responses, offsets, tokens, self._step_s)
        self._since_s = time.perf_counter()

    def best(
        self, query: DraftQuery, step_time: StepTimeModel, num_drafted: int, may_wait: bool
    ) -> MetDrafts:
        """Take what has arrived, wait for more where that pays, and return the best chains.

        step_time: of the target's steps without prefill. num_drafted: draft tokens of the last step.
        """
        started_s = time.perf_counter()
        self._take(0.0)
        drafts = self._trees.best(query.responses, query.positions, query.max_tokens)
        began_s = time.perf_counter()
        while may_wait and not self._is_late and self.link.is_there and self._latest and self._latest.call_s:
            snapshot = self._snapshot(query, drafts, step_time, num_drafted, self._latest)
            self._step_s = snapshot.step_s
            wait_s = decide_wait(snapshot)
            self._log.write_wait(snapshot, wait_s)
            if not wait_s or time.perf_counter() - began_s > snapshot.step_s:
                break
            self._is_late = not self._take(wait_s)
            drafts = self._trees.best(query.responses, query.positions, query.max_tokens)
        self.step_wait_s = time.perf_counter() - started_s
        self.wait_s += self.step_wait_s
        return drafts

    def _take(self, timeout_s: float) -> bool:
        """Put what arrives into the trees; returns whether something has."""
        drafts = self.link.take(timeout_s)
        if drafts is None:
            return False
        self._trees.add_packed(Source.MODEL, drafts.trees)
        self._latest, self._is_late = drafts, False
        if drafts.number == self.link.number:
            self._since_s = time.perf_counter()
        return True

    def _snapshot(
        self,
        query: DraftQuery,
        drafts: MetDrafts,
        step_time: StepTimeModel,
        num_drafted: int,
        latest: Drafts,
    ) -> WaitSnapshot:
        count = len(query.responses)
        calls = 1.0 if latest.number == self.link.number else UNHEARD_CALLS
        arrival_s = latest.call_s * calls - (time.perf_counter() - self._since_s)
        num_tokens = count + num_drafted
        more = latest.num_levels * drafts.num_open
        step_s, longer_step_s = predict_s(step_time, [num_tokens, num_tokens + more]).tolist()
        return WaitSnapshot(
            count,
            drafts.open_probability,
            latest.mean_acceptance,
            latest.num_levels,
            max(arrival_s, _SOONEST * latest.call_s),
            step_s,
            longer_step_s,
        )


def start_draft_ahead(
    settings: EngineSettings, sizes: TargetSizes, trees: DraftTrees, log: EngineLog
) -> DraftAhead | None:
    """An engine's end of its own draft worker, or of other workers' help; None if there is to be neither.

    Raises CheckpointError for a model drafter that does not fit the target, ConfigError where no worker can be.
    """
    if settings.model_drafter is None or not (settings.draft_worker or settings.draft_help):
        return None
    from paceline.drafting.checkpoint import check_drafter_folder

    check_drafter_folder(Path(settings.model_drafter), sizes.vocab_size)
    wanted = WorkerSettings(
        address="",
        parent=0,
        model=settings.model_drafter,
        dtype=settings.model_drafter_dtype,
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        vocab_size=sizes.vocab_size,
        floor=settings.draft_floor,
        sharpness=settings.sharpness,
        num_branches=settings.draft_branches,
    )
    link = WorkerLink(wanted, settings.draft_window, trees, has_child=settings.draft_worker)
    return DraftAhead(link, trees, log)

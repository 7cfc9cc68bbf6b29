"""The fast loop's end of a draft worker: feeds the draft trees, waits for drafts where that pays (planning/wait.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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

_SMOOTHING = 0.2
"""What a new measurement of a call's time counts."""


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
        self._call_s, self._num_levels, self._acceptance = 0.0, 0, 0.0
        self._heard = 0
        """Number of the last growth that the worker had heard of when it drafted what came last."""
        self._since_s = 0.0
        """When the worker was told of the last step, or said something about it."""
        self._is_late = False
        """Whether the last wait was in vain."""

    @property
    def acceptance(self) -> float:
        """Of the worker's tokens, as it has told; 0 before it has drafted."""
        return self._acceptance

    @property
    def level_s(self) -> float:
        """What the worker takes for one more token of all responses that it drafts for; 0 before it has drafted."""
        return self._call_s / max(self._num_levels, 1)

    def grow(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None:
        """Responses have grown, as `DraftTrees.advance`."""
        self.link.grow(responses, offsets, tokens)
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
        most_s = float(predict_s(step_time, len(query.responses) + num_drafted))
        began_s = time.perf_counter()
        while may_wait and self._call_s and self.link.is_there and not self._is_late:
            snapshot = self._snapshot(query, drafts, step_time, num_drafted)
            wait_s = decide_wait(snapshot)
            self._log.write_wait(snapshot, wait_s)
            waited_s = time.perf_counter() - began_s
            if not wait_s or waited_s > most_s:
                break
            self._is_late = not self._take(wait_s)
            drafts = self._trees.best(query.responses, query.positions, query.max_tokens)
        self.step_wait_s = time.perf_counter() - started_s
        self.wait_s += self.step_wait_s
        return drafts

    def _take(self, timeout_s: float) -> bool:
        """Put what arrives into the trees; returns whether something has."""
        arrived = self.link.take(timeout_s)
        latest = {
            drafts.responses: drafts for drafts in arrived
        }  # each has all that is ahead of its responses
        for drafts in latest.values():
            self._trees.add(Source.MODEL, drafts.responses_array(), drafts.starts_array(), drafts.chains())
        if arrived:
            self._learn(arrived[-1])
        return bool(arrived)

    def _learn(self, drafts: Drafts) -> None:
        change = drafts.call_s - self._call_s
        self._call_s = self._call_s + _SMOOTHING * change if self._call_s else drafts.call_s
        self._num_levels, self._acceptance = drafts.num_levels, drafts.mean_acceptance
        self._heard, self._is_late = drafts.number, False
        if self._heard == self.link.number:
            self._since_s = time.perf_counter()

    def _snapshot(
        self, query: DraftQuery, drafts: MetDrafts, step_time: StepTimeModel, num_drafted: int
    ) -> WaitSnapshot:
        count = len(query.responses)
        rows = np.arange(count)
        last = np.maximum(drafts.num_tokens - 1, 0)
        whole = np.where(drafts.num_tokens > 0, drafts.path_probability[rows, last], 1.0)
        is_open = drafts.num_tokens < np.minimum(
            query.max_tokens, self.link.most_ahead(query.responses.tolist())
        )
        calls = 1.0 if self._heard == self.link.number else UNHEARD_CALLS
        arrival_s = self._call_s * calls - (time.perf_counter() - self._since_s)
        num_tokens = count + num_drafted
        more = self._num_levels * int(is_open.sum())
        step_s, longer_step_s = predict_s(step_time, [num_tokens, num_tokens + more]).tolist()
        return WaitSnapshot(
            count,
            whole[is_open].astype(np.float64),
            self._acceptance,
            self._num_levels,
            max(arrival_s, _SOONEST * self._call_s),
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
    )
    link = WorkerLink(wanted, settings.draft_window, has_child=settings.draft_worker)
    return DraftAhead(link, trees, log)

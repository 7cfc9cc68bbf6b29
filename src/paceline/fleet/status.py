"""What the workers are doing, for who watches: gathered from their reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.control.events import Report, Telemetry, WorkerStep
from paceline.types import DrafterScore, DraftSharingCounters, KvPoolCounters

MOST_STEPS = 1 << 14
"""Engine steps that are kept for a reader; older ones are dropped."""


@dataclass(slots=True)
class WorkerStatus:
    """One worker, over all its lives."""

    name: str
    state: str = "starting"
    helps: str | None = None
    """The worker for which it drafts, or of which it runs a copy."""
    num_losses: int = 0
    num_running: int = 0
    """Chunks that it has, and of these how many wait in its engine."""
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_kv_used: int = 0
    num_preemptions: int = 0
    kv_pool: KvPoolCounters = field(default_factory=KvPoolCounters)
    """What it has done with the KV pool; a hit is a chunk that found the keys and values of the one before."""
    draft_sharing: DraftSharingCounters = field(default_factory=DraftSharingCounters)
    """What it has told the draft servers and heard from them."""
    drafter_score: DrafterScore = field(default_factory=DrafterScore)
    """How often its own model drafter was right."""
    num_tokens: int = 0
    """Tokens that it has generated."""
    num_decoded: int = 0
    """(request, step) pairs in which a request decoded."""
    num_accepted: int = 0
    num_model: int = 0
    """Of these, drafted by the model drafter, in the engine or ahead of it."""
    num_adopted: int = 0
    """Likewise, taken over from the other worker of a race."""
    num_wasted: int = 0
    """Tokens drafted ahead for it behind a rejected one."""
    num_branches: int = 0
    """Likely corrections prepared for it."""
    num_branch_hits: int = 0
    """Rejections whose correction was prepared."""
    num_disagreed: int = 0
    """Times that it told other tokens than the worker that generated the same response."""

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks that is in use."""
        return self.num_kv_used / self.num_kv_blocks if self.num_kv_blocks else 0.0

    @property
    def model_share(self) -> float:
        """Of the accepted draft tokens, those of the model drafter."""
        return self.num_model / self.num_accepted if self.num_accepted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step; 1 before the first."""
        return 1.0 + self.num_accepted / self.num_decoded if self.num_decoded else 1.0


@dataclass(slots=True)
class StatusBoard:
    """Kept by Fleet, read by its users."""

    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    _steps: deque[tuple[str, WorkerStep]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _preempted: dict[str, int] = field(default_factory=dict)  # by the present engine, already counted
    _kv_before: dict[str, KvPoolCounters] = field(default_factory=dict)  # of the lives before
    _shared_before: dict[str, DraftSharingCounters] = field(default_factory=dict)  # of the lives before
    _score_before: dict[str, DrafterScore] = field(default_factory=dict)  # of the lives before

    def hear(self, worker: str, report: Report) -> None:
        """A report has come."""
        if report.telemetry is None:
            return
        status, seen = self.workers[worker], report.telemetry
        status.num_running = seen.num_running
        status.num_kv_blocks, status.num_kv_used = seen.kv.num_blocks, seen.kv.num_used
        status.num_preemptions += seen.kv.num_preemptions - self._preempted.get(worker, 0)
        self._preempted[worker] = seen.kv.num_preemptions
        status.kv_pool = self._kv_before.get(worker, KvPoolCounters()) + seen.kv_pool
        shared_before = self._shared_before.get(worker, DraftSharingCounters())
        status.draft_sharing = shared_before + seen.draft_sharing
        status.drafter_score = self._score_before.get(worker, DrafterScore()) + seen.drafter_score
        self._count(status, seen)

    def _count(self, status: WorkerStatus, seen: Telemetry) -> None:
        for step in seen.steps:
            status.num_waiting = step.seen.num_waiting
            status.num_decoded += step.seen.num_requests
            status.num_accepted += step.seen.num_accepted_tokens
            status.num_model += step.seen.num_model_tokens
            status.num_adopted += step.seen.num_adopted_tokens
            status.num_wasted += step.seen.num_wasted_tokens
            status.num_branches += step.seen.num_branches
            status.num_branch_hits += step.seen.num_branch_hits
            status.num_tokens += step.num_tokens
            self._steps.append((status.name, step))

    def lose(self, worker: str, life: int) -> None:
        """A life of a worker is over; every life is, once, so what is told again or late changes nothing."""
        status = self.workers[worker]
        if life < status.num_losses:
            return
        status.num_losses = life + 1
        status.num_running = status.num_waiting = status.num_kv_used = 0
        self._preempted.pop(worker, None)
        self._kv_before[worker] = status.kv_pool
        self._shared_before[worker] = status.draft_sharing
        self._score_before[worker] = status.drafter_score

    def take_steps(self) -> list[tuple[str, WorkerStep]]:
        """Engine steps since the last call, with their workers."""
        steps = list(self._steps)
        self._steps.clear()
        return steps

    @property
    def draft_sharing(self) -> DraftSharingCounters:
        """Of all workers over all their lives."""
        return sum((status.draft_sharing for status in self.workers.values()), DraftSharingCounters())

    @property
    def drafter_score(self) -> DrafterScore:
        """Of all workers over all their lives."""
        return sum((status.drafter_score for status in self.workers.values()), DrafterScore())

    @property
    def num_preemptions(self) -> int:
        """Of all workers; 0 unless the dispatcher has miscounted."""
        return sum(status.num_preemptions for status in self.workers.values())


def describe_sharing_trouble(shared: DraftSharingCounters) -> str | None:
    """What made drafts shorter than they could have been, in one sentence; None where nothing did."""
    parts = {
        "took no message {} times": shared.held_messages,
        "left {} questions unanswered": shared.unanswered_fetches,
        "lacked {} tokens that it had been told": shared.lost_tokens,
        "was never told {} tokens": shared.dropped_tokens,
    }
    found = [text.format(count) for text, count in parts.items() if count]
    return f"the draft server {', '.join(found)}: drafts were shorter for a while" if found else None

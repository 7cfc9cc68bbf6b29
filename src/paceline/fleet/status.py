"""What the workers are doing, for who watches: gathered from their reports."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from paceline.control.events import Report, Telemetry, WorkerStep
from paceline.record.steps import add_counts
from paceline.types import DrafterScore, DraftSharingCounters, KvPoolCounters

LEAD = "lead"
"""Source of drafts: what another worker has generated of the same response."""

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
    further: tuple[int, ...] = ()
    """Of the model drafters' tokens those of each further one."""
    num_wasted: int = 0
    """Tokens drafted ahead for it behind a rejected one."""
    further_wasted: tuple[int, ...] = ()
    """Of these, those of each further drafter."""
    wait_s: float = 0.0
    """Time that its steps took for drafts made elsewhere, waiting for them included."""
    num_branches: int = 0
    """Likely corrections prepared for it."""
    num_branch_hits: int = 0
    """Rejections whose correction was prepared."""
    num_races: int = 0
    """Copies of responses of others that it has generated, and of these how many ended first."""
    num_won: int = 0
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
    free_drafter: str = "suffix"
    """Name of the model-free drafter."""
    drafters: tuple[str, ...] = ()
    """Names of the model drafters, by place."""
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
            status.further = add_counts(status.further, step.seen.further_tokens)
            status.num_wasted += step.seen.num_wasted_tokens
            status.further_wasted = add_counts(status.further_wasted, step.seen.further_wasted_tokens)
            status.wait_s += step.seen.wait_s
            status.num_branches += step.seen.num_branches
            status.num_branch_hits += step.seen.num_branch_hits
            status.num_tokens += step.num_tokens
            self._steps.append((status.name, step))

    def accepted_by_source(self, status: WorkerStatus) -> dict[str, int]:
        """Whose draft tokens a worker has accepted: the model-free drafter's, each model drafter's, a race's lead."""
        of_models = self._by_drafter(status.num_model, status.further)
        num_free = status.num_accepted - status.num_model - status.num_adopted
        return {self.free_drafter: num_free, **of_models, LEAD: status.num_adopted}

    def wasted_by_drafter(self, status: WorkerStatus) -> dict[str, int]:
        """What each model drafter has drafted ahead for a worker in vain, tokens."""
        return self._by_drafter(status.num_wasted, status.further_wasted)

    def _by_drafter(self, total: int, further: tuple[int, ...]) -> dict[str, int]:
        counts = (total - sum(further), *further, *[0] * len(self.drafters))
        return dict(zip(self.drafters, counts, strict=False))

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


def describe_drafts(board: StatusBoard) -> str | None:
    """Whose drafts all workers have accepted, what was in vain, and the races, in one line; None where none but the
    model-free drafter has drafted.
    """
    accepted, wasted = Counter[str](), Counter[str]()
    for status in board.workers.values():
        accepted += board.accepted_by_source(status)
        wasted += board.wasted_by_drafter(status)
    num_races = sum(status.num_races for status in board.workers.values())
    if not accepted.keys() - {board.free_drafter} and not wasted and not num_races:
        return None
    shares = ", ".join(f"{name} {count / accepted.total():.0%}" for name, count in accepted.items())
    parts = [f"accepted drafts: {shares or 'none'}"]
    if wasted:
        parts.append(f"in vain: {', '.join(f'{name} {count}' for name, count in wasted.items())}")
    if (wait_s := sum(status.wait_s for status in board.workers.values())) >= 0.05:
        parts.append(f"waited for: {wait_s:.1f} s")
    if num_races:
        num_won = sum(status.num_won for status in board.workers.values())
        parts.append(f"races won by copies: {num_won} of {num_races}")
    return "; ".join(parts)


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

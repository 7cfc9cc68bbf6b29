"""What free workers did, for who watches: who helped whom and how, and who trained the drafter.

Kept by Fleet from what it hears and orders; decides nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.control.events import (
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    DraftFor,
    Event,
    LoseDrafter,
    Reported,
    Rest,
    RunChunk,
    StartWorker,
    StopWorker,
    TrainDrafter,
)
from paceline.planning.help import Help

MOST_HELPS = 1 << 14
"""Those that are over and kept for a reader; older ones are dropped."""

Outcome = Literal["", "won", "lost", "stopped"]


@dataclass(frozen=True, slots=True)
class HelpSpan:
    """A worker has helped another one."""

    kind: Help
    """draft, copy or take."""
    worker: str
    helped: str
    start_s: float
    """When it was ordered, by the clock that was given."""
    end_s: float
    """The same for `take`, which is but a moment."""
    drafter: int = 0
    """draft: with which of the model drafters, by place."""
    outcome: Outcome = ""
    """copy: it ended before the other one (won), after it (lost), or one of the two had to stop before (stopped)."""
    leader: str = ""
    """copy: who was the first to tell the last tokens so far."""
    index: int | None = None
    """copy: of the response at this place of the rollout."""
    num_leads: int = 0
    """copy: times that somebody got ahead of the other."""


@dataclass(frozen=True, slots=True)
class TrainingSpan:
    """A worker has lent its time to the drafter's trainer, by the same clock."""

    worker: str
    start_s: float
    end_s: float
    core_s: float
    """Processor time that the trainer has used."""


class HelpLog:
    """Give it every event with the actions that came of it, and what the trainer did when it has stopped."""

    def __init__(self) -> None:
        self._drafting: dict[str, HelpSpan] = {}  # by helped worker
        self._copying: dict[int, HelpSpan] = {}  # by chunk
        self._training: dict[str, float] = {}  # begin, by worker
        self._done: deque[HelpSpan] = deque(maxlen=MOST_HELPS)
        self._trained: deque[TrainingSpan] = deque(maxlen=MOST_HELPS)
        self.races = Counter[str]()
        """Copies that are over, by the worker that generated them."""
        self.won = Counter[str]()
        """Of these, those that ended first."""

    def take(self) -> list[HelpSpan]:
        """Helps that ended since the last call, in that order (at most the latest `MOST_HELPS`)."""
        done = list(self._done)
        self._done.clear()
        return done

    def take_training(self) -> list[TrainingSpan]:
        """Sessions of the drafter's trainer that ended since the last call."""
        done = list(self._trained)
        self._trained.clear()
        return done

    def note(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """Something happened, and this was ordered."""
        ended = {one.chunk for one in event.report.endings} if isinstance(event, Reported) else set()
        for chunk in ended & self._copying.keys():
            self._end_copy(chunk, now_s, "won")
        went_on = {one.index for one in actions if isinstance(one, (Deliver, RunChunk))}
        for action in actions:
            match action:
                case DraftFor(worker, _, helped):
                    self._end_drafting(worker, now_s, but=helped)
                    for name in helped:
                        span = HelpSpan(Help.DRAFT, worker, name, now_s, now_s, action.drafter)
                        self._drafting.setdefault(name, span)
                case RunChunk(worker):
                    self._end_drafting(worker, now_s)
                    self._begin(action, now_s)
                case Rest(worker) | LoseDrafter(worker):
                    self._end_drafting(worker, now_s)
                case TrainDrafter(worker):
                    self._training[worker] = now_s
                case Adopt(worker):
                    self._note_lead(worker)
                case CancelChunk(_, _, chunk):
                    copy = self._copying.get(chunk)
                    self._end_copy(chunk, now_s, "lost" if copy and copy.index in went_on else "stopped")
                case StartWorker(worker) | StopWorker(worker):
                    self._end_drafting(worker, now_s)
                    for chunk in [at for at, one in self._copying.items() if worker == one.worker]:
                        self._end_copy(chunk, now_s, "stopped")

    def end_training(self, worker: str, core_s: float | None, now_s: float) -> None:
        """The trainer has stopped. core_s: processor time that it has used meanwhile; None: it did not run."""
        start_s = self._training.pop(worker, now_s)
        if core_s is not None:
            self._trained.append(TrainingSpan(worker, start_s, now_s, core_s))

    def _begin(self, order: RunChunk, now_s: float) -> None:
        if order.help is None or order.helped is None:
            return
        span = HelpSpan(order.help, order.worker, order.helped, now_s, now_s)
        if order.help is Help.COPY:
            self._copying[order.chunk] = replace(span, index=order.index)
        else:
            self._done.append(span)

    def _note_lead(self, behind: str) -> None:
        """A racer hears what the other one has."""
        for chunk, span in self._copying.items():
            leader = {span.worker: span.helped, span.helped: span.worker}.get(behind, span.leader)
            changes = leader != span.leader
            self._copying[chunk] = replace(span, leader=leader, num_leads=span.num_leads + changes)

    def _end_drafting(self, worker: str, now_s: float, but: Sequence[str] = ()) -> None:
        """Of a worker that helps, or is helped. but: those that it goes on to help."""
        for helped in [name for name, one in self._drafting.items() if worker in {one.worker, name}]:
            if helped not in but:
                self._done.append(replace(self._drafting.pop(helped), end_s=now_s))

    def _end_copy(self, chunk: int, now_s: float, outcome: Outcome) -> None:
        if (span := self._copying.pop(chunk, None)) is not None:
            self._done.append(replace(span, end_s=now_s, outcome=outcome))
            self.races[span.worker] += 1
            self.won[span.worker] += outcome == "won"

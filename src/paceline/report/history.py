"""One pass over a record: all that the report shows, in memory that does not grow with the engine's steps."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from paceline.record import (
    ChunkDone,
    Comparison,
    DrafterSession,
    DrafterStep,
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    Header,
    HelpDone,
    Machine,
    Note,
    RecordReader,
    ResponseDone,
    Resumed,
    RunEnd,
    TrainStep,
    end_of,
    measure_tail,
)
from paceline.record.steps import add_counts
from paceline.report.bins import Bins
from paceline.report.chunks import Piece, thin_pieces

MAX_POINTS = 2000
MAX_ROLLOUTS = 48
MAX_PIECES = 4000
"""Kept of each rollout's chunks once it is over."""
MAX_MESSAGES = 100
MOST_IDLE = 1.0
"""Between two samples of a fleet's worker, in durations of the first: after a longer pause its requests had left."""


@dataclass(slots=True)
class Speculation:
    """Sums over engine steps."""

    request_steps: float = 0.0
    """Decoding requests, summed over engine steps."""
    drafted: int = 0
    accepted: int = 0
    model: int = 0
    """Of the accepted tokens those of a model drafter."""
    further: tuple[int, ...] = ()
    """Of these, those of each further drafter."""
    adopted: int = 0
    """Of the accepted tokens those that another worker had generated before (a race)."""
    wait_s: float = 0.0
    """Taking drafts that were made elsewhere, and waiting for them."""
    wasted: int = 0
    further_wasted: tuple[int, ...] = ()
    """Of the wasted tokens, likewise."""
    branches: int = 0
    branch_hits: int = 0
    generated: int = 0
    busy_s: float = 0.0

    def add(self, sample: EngineStepSample) -> None:
        """Add one sample."""
        self.request_steps += sample.num_running * sample.num_steps
        self.drafted += sample.num_draft_tokens
        self.accepted += sample.num_accepted_tokens
        self.model += sample.num_model_tokens
        self.further = add_counts(self.further, sample.further_tokens)
        self.adopted += sample.num_adopted_tokens
        self.wait_s += sample.wait_s
        self.wasted += sample.num_wasted_tokens
        self.further_wasted = add_counts(self.further_wasted, sample.further_wasted_tokens)
        self.branches += sample.num_branches
        self.branch_hits += sample.num_branch_hits
        self.generated += sample.num_generated_tokens
        self.busy_s += sample.step_s

    def merge(self, other: Speculation) -> None:
        """Add the sums over other engine steps."""
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            setattr(self, one.name, add_counts(ours, theirs) if isinstance(ours, tuple) else ours + theirs)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted draft tokens per request and step; None while nothing decoded."""
        return 1.0 + self.accepted / self.request_steps if self.request_steps else None

    @property
    def model_free_length(self) -> float | None:
        """The same with the model-free drafter's tokens alone."""
        num_free = self.accepted - self.model - self.adopted
        return 1.0 + num_free / self.request_steps if self.request_steps else None


@dataclass(slots=True)
class StepRow:
    """What is known of one train step; `train` is None while (or because) it did not end."""

    step: int
    session: int
    train: TrainStep | None = None
    speculation: Speculation = field(default_factory=Speculation)
    by_batch: dict[int, Speculation] = field(default_factory=dict)
    """Key: floor(log2(decoding requests per step))."""
    whole_lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each response that ended by itself."""
    cut_lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each response that ended at the length limit."""
    comparisons: list[Comparison] = field(default_factory=list)
    tail_s: float | None = None

    @property
    def num_responses(self) -> int:
        """Responses that finished."""
        return len(self.whole_lengths) + self.num_cut

    @property
    def num_cut(self) -> int:
        """Responses that ended at the length limit."""
        return len(self.cut_lengths)

    @property
    def acceptance_length(self) -> float | None:
        """As measured by the engine; else as the trainer reported it."""
        measured = self.speculation.acceptance_length
        if measured is not None or self.train is None:
            return measured
        return self.train.acceptance_length


@dataclass(slots=True)
class Rollout:
    """The course of one rollout; all times but `begin_s` are relative to it."""

    begin_s: float
    last_s: float = 0.0
    """End of the last engine step."""
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    running: Bins = field(default_factory=lambda: Bins(2, width=0.05, capacity=400))
    """Columns: running requests x seconds, waiting requests x seconds."""
    pieces: list[Piece] = field(default_factory=list)
    """What ran where."""
    num_chunks: int = 0
    losses: Counter[tuple[str, float]] = field(default_factory=Counter)
    """Chunks lost with their worker, by its name and when."""
    sessions: list[DrafterSession] = field(default_factory=list)
    """In which an adaptive drafter was trained."""
    helps: list[HelpDone] = field(default_factory=list)


class RunHistory:
    """Accumulates a record's events.

    Train step 0 stands for rollouts outside of training (evaluation, side by side): they count in the
    throughput alone. After a resumption, a step recorded again replaces the earlier one: sums are kept by step, and
    those of the run are added up when they are asked for.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.machine: Machine = header.machine
        self.versions: dict[str, str] = header.versions
        self.session = 0
        self.steps: dict[int, StepRow] = {}
        self.rollouts: dict[int, Rollout] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.drafter_steps: dict[int, DrafterStep] = {}
        self.session_s = 0.0
        """Of all sessions of an adaptive drafter."""
        self.session_core_s: float | None = None
        """Processor time that its trainer has used in them; None: the record does not say."""
        self.throughput = Bins(2, width=0.05, capacity=MAX_POINTS)
        """Columns: generated tokens, seconds of an engine's rollout; over the run clock."""
        self.messages: list[Note | Failure] = []
        self.num_messages = 0
        self.end: RunEnd | None = None
        self.end_s = 0.0
        self.torn = False
        self._stride = 1
        self._open: dict[str, EngineStepSample] = {}
        """By worker: its newest sample, which lasts until its next one begins."""

    def add(self, event: Event) -> None:
        """Add one event."""
        self.end_s = max(self.end_s, end_of(event))
        match event:
            case EngineStepSample():
                self._add_sample(event)
            case ResponseDone():
                self._add_response(event)
            case ChunkDone():
                self._add_chunk(event)
            case HelpDone():
                self._add_help(event)
            case TrainStep():
                self._add_train_step(event)
            case Evaluation():
                self.evaluations[event.step] = event
            case Comparison():
                self._row(event.step).comparisons.append(event)
            case DrafterStep():
                self.drafter_steps[event.step] = event
            case DrafterSession():
                self._add_session(event)
            case Note() | Failure():
                self._add_message(event)
            case Resumed():
                self._resume(event)
            case RunEnd():
                self.end = event

    def _row(self, step: int) -> StepRow:
        row = self.steps.get(step)
        if row is None or row.session != self.session:
            row = self.steps[step] = StepRow(step, self.session)
            self.rollouts.pop(step, None)
        return row

    def _add_sample(self, sample: EngineStepSample) -> None:
        before = self._open.get(sample.worker)
        if before is not None:
            self._draw(before, _end_of_sample(before, sample))
        self._open[sample.worker] = sample
        if sample.step == 0:
            return
        row = self._row(sample.step)
        row.speculation.add(sample)
        if sample.num_running >= 1:
            row.by_batch.setdefault(round(sample.num_running).bit_length() - 1, Speculation()).add(sample)
        self._rollout(sample.step, sample.t_s)

    def close(self) -> None:
        """Nothing more comes for now: draw what is still open."""
        for sample in self._open.values():
            self._draw(sample, sample.t_s + sample.step_s)
        self._open.clear()

    def _draw(self, sample: EngineStepSample, end_s: float) -> None:
        """Requests do not stop running between two engine steps: draw the sample until `end_s`."""
        lasted_s = end_s - sample.t_s
        self.throughput.spread(sample.t_s, end_s, sample.num_generated_tokens, lasted_s)
        rollout = self.rollouts.get(sample.step)
        if sample.step == 0 or rollout is None:
            return
        begin_s, end_s = sample.t_s - rollout.begin_s, end_s - rollout.begin_s
        rollout.last_s = max(rollout.last_s, end_s)
        rollout.running.spread(begin_s, end_s, sample.num_running * lasted_s, sample.num_waiting * lasted_s)

    def _add_response(self, response: ResponseDone) -> None:
        if response.step == 0:
            return
        row = self._row(response.step)
        lengths = row.cut_lengths if response.finish_reason == "length" else row.whole_lengths
        lengths.append(response.response_tokens)
        rollout = self._rollout(response.step, response.t_start_s)
        rollout.starts_s.append(response.t_start_s - rollout.begin_s)
        rollout.ends_s.append(response.t_end_s - rollout.begin_s)

    def _add_chunk(self, chunk: ChunkDone) -> None:
        if chunk.step == 0:
            return
        self._row(chunk.step)
        rollout = self._rollout(chunk.step, chunk.t_start_s)
        piece = Piece.of(chunk, rollout.begin_s)
        rollout.pieces.append(piece)
        rollout.num_chunks += 1
        if piece.was_lost:
            rollout.losses[piece.worker, piece.end_s] += 1

    def _add_session(self, session: DrafterSession) -> None:
        self.session_s += session.t_end_s - session.t_start_s
        if session.core_s is not None:
            self.session_core_s = (self.session_core_s or 0.0) + session.core_s
        self._rollout(session.step, session.t_start_s).sessions.append(session)

    def _add_help(self, one: HelpDone) -> None:
        self._row(one.step)
        self._rollout(one.step, one.t_start_s).helps.append(one)

    def _add_train_step(self, train: TrainStep) -> None:
        self.close()
        row = self._row(train.step)
        row.train = train
        row.tail_s = train.tail_s
        if (rollout := self.rollouts.get(train.step)) is None:
            return
        rollout.pieces = thin_pieces(rollout.pieces, MAX_PIECES)
        if row.tail_s is None and rollout.ends_s:
            row.tail_s = measure_tail(rollout.ends_s)

    def _rollout(self, step: int, begin_s: float) -> Rollout:
        """The rollout of `step`; of many, only every `_stride`-th and the newest are kept."""
        rollout = self.rollouts.get(step)
        if rollout is None:
            rollout = self.rollouts[step] = Rollout(begin_s)
            self._thin_rollouts(step)
            while len(self.rollouts) > MAX_ROLLOUTS:
                self._stride *= 2
                self._thin_rollouts(step)
        return rollout

    def _thin_rollouts(self, newest: int) -> None:
        kept = self.rollouts.items()
        self.rollouts = {s: r for s, r in kept if s % self._stride == 0 or s >= newest - 1}

    def _add_message(self, message: Note | Failure) -> None:
        self.num_messages += 1
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(message)

    def _resume(self, event: Resumed) -> None:
        self.close()
        self.session += 1
        self.machine = event.machine
        self.versions = event.versions
        self.end = None
        for step in [step for step, row in self.steps.items() if row.train is None]:
            del self.steps[step]
            self.rollouts.pop(step, None)

    @property
    def total(self) -> Speculation:
        """Of all steps."""
        return _sum(row.speculation for row in self.rows)

    @property
    def by_batch(self) -> dict[int, Speculation]:
        """Key: floor(log2(decoding requests per step))."""
        sizes = sorted({size for row in self.rows for size in row.by_batch})
        return {size: _sum(row.by_batch[size] for row in self.rows if size in row.by_batch) for size in sizes}

    @property
    def lengths(self) -> Bins:
        """Columns: responses, of which ended at the length limit; over response tokens."""
        lengths = Bins(2, width=1.0, capacity=8192)
        for row in self.rows:
            for tokens in row.whole_lengths:
                lengths.add(tokens, 1, 0)
            for tokens in row.cut_lengths:
                lengths.add(tokens, 1, 1)
        return lengths

    @property
    def num_responses(self) -> int:
        """That finished, in all steps."""
        return sum(row.num_responses for row in self.rows)

    @property
    def response_tokens(self) -> int:
        """Of these."""
        return sum(sum(row.whole_lengths) + sum(row.cut_lengths) for row in self.rows)

    @property
    def comparisons(self) -> list[Comparison]:
        """Of all steps, in order."""
        return [one for row in self.rows for one in row.comparisons]

    @property
    def drawn_rollouts(self) -> dict[int, Rollout]:
        """The rollouts of which something is known, by train step in order."""
        return {s: r for s, r in sorted(self.rollouts.items()) if r.running.num_used or r.ends_s}

    @property
    def rows(self) -> list[StepRow]:
        """Train steps in order."""
        return [self.steps[step] for step in sorted(self.steps)]

    @property
    def finished_rows(self) -> list[tuple[StepRow, TrainStep]]:
        """Train steps that ended, in order, each with its event."""
        return [(row, row.train) for row in self.rows if row.train is not None]


def collect(header: Header, events: Iterable[Event]) -> RunHistory:
    """The history of `events`."""
    history = RunHistory(header)
    for event in events:
        history.add(event)
    history.close()
    return history


def _sum(parts: Iterable[Speculation]) -> Speculation:
    whole = Speculation()
    for part in parts:
        whole.merge(part)
    return whole


def _end_of_sample(sample: EngineStepSample, following: EngineStepSample) -> float:
    """Until when what the sample says holds, given the same worker's next one."""
    end_s = sample.t_s + sample.step_s
    if following.step != sample.step:
        return end_s
    pause_s = following.t_s - end_s
    if pause_s > MOST_IDLE * sample.step_s and sample.worker:
        return end_s
    return max(following.t_s, sample.t_s)


def read_history(run_dir: Path) -> RunHistory:
    """Read `<run_dir>/record.jsonl`. RecordError if it is missing or cannot be read."""
    with RecordReader(run_dir) as reader:
        history = collect(reader.header, reader)
        history.torn = reader.torn
    return history

"""Replay of an engine's decision log: every decision planned again by the functions that the fast loop calls.

Each decision is planned on the recorded grounds, whatever an earlier one has become: the budget learns from the steps
as they were, with the drafts as they were. Only whether the model drafter rests follows from what is planned now.
"""

from __future__ import annotations

import numpy as np

from paceline.config import EngineSettings
from paceline.engine.model_steering import ModelSteering
from paceline.planning import paths
from paceline.planning.budget import (
    BudgetSnapshot,
    BudgetState,
    decide,
    draft_depth,
    expected_accepted,
    update,
)
from paceline.planning.coupling import Coupling
from paceline.planning.reconfigure import replan
from paceline.planning.wait import WaitSnapshot, decide_wait
from paceline.planning.window import StepTimes
from paceline.record.decisions import (
    BudgetLine,
    CouplingLine,
    DecisionReader,
    DrafterLine,
    GrowthLine,
    NewDrafterLine,
    PathCandidates,
    PathsGainLine,
    PathsLine,
    StepLine,
    WaitLine,
    WindowsLine,
)
from paceline.record.tally import Tally
from paceline.types import DraftGrowth, Int32Array

_MOST_SHOWN = 8
"""Requests or numbers that a difference names."""

Paths = tuple[bool, tuple[int, ...], tuple[int, ...]]
"""Whether alternatives were made, which were chosen, and their lengths."""


Order = tuple[float | None, bytes, int | None]
"""Floor (None: it rests), level costs, most requests."""
Windows = tuple[tuple[int, ...], tuple[bool, ...]]
"""The window of each response, and whether it is coupled."""


def replay_engine(reader: DecisionReader) -> list[Tally]:
    """Plan everything in an engine's log again. Raises RecordError for a damaged log."""
    replay = _Replay(reader.settings(EngineSettings))
    for line in reader:
        match line:
            case BudgetLine():
                replay.plan_budget(line)
            case PathsLine():
                replay.plan_paths(line)
            case DrafterLine():
                replay.plan_drafter(line)
            case WaitLine():
                replay.plan_wait(line)
            case WindowsLine():
                replay.plan_windows(line)
            case CouplingLine():
                replay.plan_coupling(line)
            case StepLine():
                replay.learn(line)
            case GrowthLine():
                growth = DraftGrowth(line.num_levels, line.num_rows, line.seconds)
                replay.steering.outlook.num_open = line.num_open
                replay.steering.outlook.backlog = line.backlog
                replay.steering.receive(growth, line.num_requests, line.reading_s)
            case NewDrafterLine():
                replay.steering.renew(is_other=line.is_other)
            case PathsGainLine():
                replay.trust = paths.update_trust(replay.trust, line.promised, line.gained)
            case _:
                reader.refuse(line)
    return [tally for tally in replay.tallies if tally.num_planned or tally is replay.tallies[0]]


class _Replay:
    """What the fast loop knew at a point of the log."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._budget = self._now = BudgetState.initial(settings.budget)
        self.steering = ModelSteering()
        self.trust = paths.PathTrust()
        self._snapshot = BudgetSnapshot(0, 0, np.zeros((0, 1), np.float32), 0)
        self._lengths: Int32Array = np.zeros(0, np.int32)
        self._budgets = Tally("draft budget")
        self._alternatives = Tally("draft paths")
        self._orders = Tally("model drafter")
        self._waits = Tally("wait for drafts")
        self._windows = Tally("draft windows")
        self._couplings = Tally("coupled or ahead")
        self.tallies = [
            self._budgets,
            self._alternatives,
            self._orders,
            self._waits,
            self._windows,
            self._couplings,
        ]
        self._coupling, self._is_ahead = Coupling(), False
        self._other: BudgetState | None = None

    def plan_budget(self, line: BudgetLine) -> None:
        """Draft lengths of a step."""
        self._now = self._budget.at_context(line.num_context_tokens, line.has_model_drafts)
        probability = line.drafts.unpack()
        self._snapshot = BudgetSnapshot(
            len(probability),
            line.num_other_tokens,
            probability,
            line.max_total_draft_tokens,
            np.frombuffer(line.weights, np.float64) if line.weights else None,
        )
        self._lengths = np.array(line.lengths, np.int32)
        planned = decide(self._snapshot, self._now, self._settings.budget)
        self._budgets.compare(line.lengths, tuple(planned.tolist()), _tell_lengths)
        if line.judged:
            free = None if line.free is None else line.free.unpack()
            self.steering.outlook.steps_left = line.steps_left
            states = self._now, self._budget.at_context(line.num_context_tokens)
            self.steering.judge(self._snapshot, self._lengths, free, states, self._settings.budget)

    def plan_paths(self, line: PathsLine) -> None:
        """Whether alternatives are made, and which are verified."""
        snapshot, budget = self._snapshot, self._settings.budget
        expected = expected_accepted(snapshot, self._lengths)
        pays = paths.may_pay(
            snapshot.path_probability,
            self._lengths,
            snapshot.num_other_tokens,
            expected,
            self._now,
            budget,
        )
        planned: Paths = (pays, (), ())
        if pays and line.candidates is not None:
            candidates = self._path_snapshot(line.candidates, line.max_rows, expected)
            choice = paths.choose_paths(candidates, self._now, budget, self.trust)
            planned = (pays, tuple(choice.candidates.tolist()), tuple(choice.lengths.tolist()))
        recorded: Paths = (line.candidates is not None, line.chosen, line.lengths)
        self._alternatives.compare(recorded, planned, _tell_paths)

    def _path_snapshot(
        self, candidates: PathCandidates, max_rows: int, expected: float
    ) -> paths.PathSnapshot:
        probability = candidates.path_probability.unpack()
        return paths.PathSnapshot(
            num_requests=self._snapshot.num_requests,
            num_other_tokens=self._snapshot.num_other_tokens,
            num_draft_tokens=int(self._lengths.sum()),
            expected_accepted=expected,
            owners=np.array(candidates.owners, np.int64),
            tokens=np.frombuffer(candidates.tokens, np.int32).reshape(probability.shape),
            path_probability=probability,
            limits=np.array(candidates.limits, np.int32),
            covered=np.array(candidates.covered, np.int32),
            contexts=np.array(candidates.contexts, np.int64),
            max_rows=max_rows,
        )

    def plan_drafter(self, line: DrafterLine) -> None:
        """Whether the model drafter works after the step, and how far its drafts go."""
        batch = line.num_requests or max(self._snapshot.num_requests, 1)
        outlook = self.steering.outlook
        outlook.backlog, outlook.coming, outlook.steps_left = line.backlog, 0.0, line.steps_left
        floor, costs, most = None, b"", None
        longest = draft_depth(self._now, self._settings.budget, batch, line.num_coming_tokens)
        if longest and self.steering.advance(batch, self._now.decode_time, line.is_alive):
            floor, table, most = self.steering.limits(
                batch,
                int(self._lengths.sum()),
                self._now.decode_time,
                self._settings.draft_floor,
                for_all=line.for_all,
            )
            costs = table.tobytes()
        recorded = line.floor, line.level_costs, line.most_requests
        self._orders.compare(recorded, (floor, costs, most), _tell_drafter)

    def plan_wait(self, line: WaitLine) -> None:
        """Whether a step waits for drafts under way."""
        snapshot = WaitSnapshot(
            line.num_requests,
            line.open_probability,
            line.acceptance,
            line.num_tokens,
            line.arrival_s,
            line.step_s,
            line.longer_step_s,
        )
        self._waits.compare(line.wait_s, decide_wait(snapshot), _tell_wait)

    def plan_windows(self, line: WindowsLine) -> None:
        """Window and mode of every response."""
        acceptance = np.frombuffer(line.acceptance, np.float64)
        times = StepTimes(1, line.draft_s, np.frombuffer(line.verify_s, np.float64))
        plan = replan(acceptance, times, line.num_idle)
        planned: Windows = tuple(plan.windows.tolist()), tuple(plan.is_coupled.tolist())
        self._windows.compare((line.windows, line.is_coupled), planned, _tell_windows)

    def plan_coupling(self, line: CouplingLine) -> None:
        """How a step's drafts are made: what the budget knows depends on it."""
        if line.begins_again:
            self._coupling.begin_again()
        if not line.has_worker:
            self._coupling = Coupling.without_worker(self._coupling.at)
        self._couplings.compare(line.is_ahead, self._coupling.is_ahead, _tell_coupling)
        if line.is_ahead != self._is_ahead:
            self._is_ahead = line.is_ahead
            fresh = BudgetState.initial(self._settings.budget)
            self._budget, self._other = self._other or fresh, self._budget

    def learn(self, line: StepLine) -> None:
        """A step was measured."""
        self._budget = update(self._budget, line.step, self._settings.budget, line.expected_tokens)
        if self._settings.draft_worker == "auto" and self._coupling.is_ahead == self._is_ahead:
            self._coupling.after_step(line.step)


def _tell_lengths(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """The sum, and the requests in which two decisions of one step differ."""
    differing = [
        (row, mine) for row, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs
    ]
    named = ", ".join(f"request {row} takes {length}" for row, length in differing[:_MOST_SHOWN])
    more = (
        f", and {len(differing) - _MOST_SHOWN} more requests differ" if len(differing) > _MOST_SHOWN else ""
    )
    return f"{sum(one)} draft tokens of {len(one)} requests: {named}{more}"


def _tell_paths(one: Paths, _: Paths) -> str:
    made, chosen, lengths = one
    if not made:
        return "no alternatives are made: none can pay"
    rows = [f"{row} ({length} tokens)" for row, length in zip(chosen, lengths, strict=True)]
    return (
        f"{len(rows)} alternatives are verified: candidates {', '.join(rows)}" if rows else "none is verified"
    )


def _tell_drafter(one: Order, _: Order) -> str:
    floor, costs, most = one
    if floor is None:
        return "it rests"
    whom = "" if most is None else f"for {most} requests "
    shown = ", ".join(f"{cost:.9g}" for cost in np.frombuffer(costs, np.float32)[-_MOST_SHOWN:])
    return f"it drafts {whom}down to path probability {floor:.17g}; tokens that a level must be worth: .. {shown}"


def _tell_wait(one: float, _: float) -> str:
    return f"it waits at most {1e3 * one:.9g} ms" if one else "it does not wait"


def _tell_coupling(one: bool, _: bool) -> str:
    return "the worker drafts ahead" if one else "the engine drafts by turns, on all cores"


def _tell_windows(one: Windows, other: Windows) -> str:
    """Windows and modes of the responses in which two plans differ."""
    pairs = zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
    differing = [(row, mine) for row, (mine, theirs) in enumerate(pairs) if mine != theirs]
    named = [
        f"response {row} drafts {window} tokens {'coupled' if is_coupled else 'ahead'}"
        for row, (window, is_coupled) in differing[:_MOST_SHOWN]
    ]
    return ", ".join(named)

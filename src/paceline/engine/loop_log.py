"""What the fast loop tells the decision log. In the order of events.

Without a log every call returns at once, so that callers need not ask.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from paceline.config import EngineSettings
from paceline.drafting.tree import Source
from paceline.engine.model_steering import Outlook
from paceline.planning.budget import BudgetSnapshot
from paceline.planning.paths import PathChoice, PathSnapshot
from paceline.planning.reconfigure import Reconfiguration
from paceline.planning.wait import WaitSnapshot
from paceline.planning.window import StepTimes
from paceline.record.decisions import (
    BudgetLine,
    CouplingLine,
    DecisionHeader,
    DecisionWriter,
    DrafterLine,
    GrowthLine,
    NewDrafterLine,
    PathCandidates,
    PathsGainLine,
    PathsLine,
    Rows,
    StepLine,
    WaitLine,
    WindowsLine,
)
from paceline.types import DraftGrowth, Float32Array, Float64Array, Int32Array, StepObservation


class EngineLog:
    """One per engine, open or not."""

    def __init__(self, writer: DecisionWriter | None, num_paths: int) -> None:
        self._writer = writer
        self._has_paths = num_paths > 1

    def write_budget(
        self,
        num_context_tokens: int,
        has_model_drafts: bool,
        snapshot: BudgetSnapshot,
        lengths: Int32Array,
        steps_left: float | None,
        free: Float32Array | None,
    ) -> None:
        """The draft budget's decision. steps_left: of `Outlook`; None where `ModelSteering.judge` is not called.
        free: see there.
        """
        if self._writer is None:
            return
        line = BudgetLine(
            num_context_tokens=num_context_tokens,
            has_model_drafts=has_model_drafts,
            num_other_tokens=snapshot.num_other_tokens,
            max_total_draft_tokens=snapshot.max_total_draft_tokens,
            drafts=Rows.pack(snapshot.path_probability),
            lengths=tuple(lengths.tolist()),
            weights=b"" if snapshot.weight is None else snapshot.weight.tobytes(),
            judged=steps_left is not None,
            steps_left=math.inf if steps_left is None else steps_left,
            free=None if free is None else Rows.pack(free),
        )
        self._writer.write(line)

    def write_no_paths(self) -> None:
        """No alternative could pay, so none were made."""
        if self._writer is not None:
            self._writer.write(PathsLine())

    def write_paths(self, snapshot: PathSnapshot, choice: PathChoice) -> None:
        """Alternatives were made and chosen from."""
        if self._writer is None:
            return
        made = PathCandidates(
            owners=tuple(snapshot.owners.tolist()),
            tokens=snapshot.tokens.tobytes(),
            path_probability=Rows.pack(snapshot.path_probability),
            limits=tuple(snapshot.limits.tolist()),
            covered=tuple(snapshot.covered.tolist()),
            contexts=tuple(snapshot.contexts.tolist()),
        )
        line = PathsLine(
            max_rows=snapshot.max_rows,
            candidates=made,
            chosen=tuple(choice.candidates.tolist()),
            lengths=tuple(choice.lengths.tolist()),
        )
        self._writer.write(line)

    def write_paths_gain(self, promised: float, gained: float) -> None:
        """What came of a step's alternatives."""
        if self._writer is not None and self._has_paths:
            self._writer.write(PathsGainLine(promised=promised, gained=gained))

    def write_wait(self, snapshot: WaitSnapshot, wait_s: float, source: int) -> None:
        """Whether a step waits for drafts that are under way. source: whose (drafting/tree.py)."""
        if self._writer is None:
            return
        line = WaitLine(
            num_requests=snapshot.num_requests,
            open_probability=snapshot.open_probability,
            acceptance=snapshot.acceptance,
            num_tokens=snapshot.num_tokens,
            arrival_s=snapshot.arrival_s,
            step_s=snapshot.step_s,
            longer_step_s=snapshot.longer_step_s,
            wait_s=wait_s,
            drafter=Source.MODEL - source,
        )
        self._writer.write(line)

    def write_windows(
        self, acceptance: Float64Array, times: StepTimes, num_idle: int, plan: Reconfiguration, source: int
    ) -> None:
        """A draft worker's windows and modes, planned anew for every response that drafts (`replan`)."""
        if self._writer is None:
            return
        line = WindowsLine(
            acceptance=acceptance.tobytes(),
            draft_s=float(np.asarray(times.draft_s)),
            verify_s=times.verify_s.tobytes(),
            num_idle=num_idle,
            windows=tuple(plan.windows.tolist()),
            is_coupled=tuple(plan.is_coupled.tolist()),
            drafter=Source.MODEL - source,
        )
        self._writer.write(line)

    def write_coupling(self, is_ahead: bool, has_worker: bool = True, *, begins_again: bool = False) -> None:
        """How the coming step's drafts are made."""
        if self._writer is not None:
            line = CouplingLine(is_ahead=is_ahead, has_worker=has_worker, begins_again=begins_again)
            self._writer.write(line)

    def write_drafter(
        self,
        limits: tuple[float, Float32Array, int | None] | None,
        num_requests: int,
        num_coming_tokens: int | None,
        outlook: Outlook,
        is_alive: bool,
        *,
        for_all: bool,
    ) -> None:
        """What the model drafter shall do after the step: (floor, level costs, most requests), or None, rest."""
        if self._writer is None:
            return
        floor, costs, most = (None, b"", None) if limits is None else limits
        line = DrafterLine(
            floor=floor,
            level_costs=bytes(costs),
            most_requests=most,
            for_all=for_all,
            num_requests=num_requests,
            num_coming_tokens=num_coming_tokens,
            backlog=outlook.backlog + outlook.coming,
            steps_left=outlook.steps_left,
            is_alive=is_alive,
        )
        self._writer.write(line)

    def write_growth(
        self, growth: DraftGrowth, num_requests: int, reading_s: float, outlook: Outlook
    ) -> None:
        """What the model drafter's drafts for so many requests cost, and catching up before them."""
        if self._writer is not None:
            self._writer.write(
                GrowthLine(
                    num_levels=growth.num_levels,
                    num_rows=growth.num_rows,
                    seconds=float(growth.seconds),
                    num_requests=num_requests,
                    reading_s=reading_s,
                    num_open=outlook.num_open,
                    backlog=outlook.backlog,
                )
            )

    def write_new_drafter(self, is_other: bool) -> None:
        """The model drafter has other weights."""
        if self._writer is not None:
            self._writer.write(NewDrafterLine(is_other=is_other))

    def write_step(self, step: StepObservation, expected_tokens: float) -> None:
        """A measured step, when the budget learns from it."""
        if self._writer is not None:
            self._writer.write(StepLine(step=step, expected_tokens=expected_tokens))

    def close(self) -> None:
        """Write no more."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def open_log(settings: EngineSettings) -> EngineLog:
    """The log of a new engine, if there is to be one."""
    if settings.decision_log is None:
        return EngineLog(None, settings.num_paths)
    header = DecisionHeader(kind="engine", settings=settings.model_dump())
    return EngineLog(DecisionWriter.create(Path(settings.decision_log), header), settings.num_paths)

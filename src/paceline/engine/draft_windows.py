"""Reconfiguration in a running engine: how far is drafted ahead of each response, from measured D, V and acceptance?

Owns the acceptance of the model drafts, of each running response and of all. The decision is SpecActor's algorithm 2
(planning/reconfigure.py), taken every `reconfigure_steps` steps and when the batch has changed; the draft worker is
told how many undecided tokens it may draft. Called by the fast loop.

Differs: everyone is planned for, as no placement stands behind `draft_window`, with which the first responses begin.
Later ones begin with what the last plan would give to a response of mean acceptance. Coupled, a
response has at most w undecided draft tokens, so nothing is drafted while these are verified; whether a step waits for
them is decided as for all others (planning/wait.py). As a step may wait for a refill, and takes what there is of one,
a refill costs a response of a batch no more than one alone (docs/decisions/0035-live-windows.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafting.worker_link import WorkerLink
from paceline.engine.loop_log import EngineLog
from paceline.planning.draft_ahead import most_ahead
from paceline.planning.latency import StepTimeModel, largest_known_tokens, predict_s
from paceline.planning.reconfigure import is_due, reconfigure, replan
from paceline.planning.window import StepTimes
from paceline.types import Float64Array, Int32Array, Int64Array

PRIOR_TOKENS = 16.0
"""What the mean of all responses counts in the estimate of one."""

LEAST_TOLD = 32
"""Draft tokens that have been judged before a worker's first plan: the next one may be a thousand steps away."""

_KEPT = 0.5
"""What is known of a response's drafts counts so much less from plan to plan: a drafter that was given up is tried
again, and one that has lost its touch is noticed."""

_KEPT_OF_ALL = 0.8
"""The same for the mean of all responses, those that have ended among them: in a tail one alone is no mean."""


@dataclass(slots=True)
class _Drafts:
    """Of one response: decayed numbers of tokens."""

    accepted: float = 0.0
    drafted: float = 0.0
    is_coupled: bool = False

    def add(self, accepted: int, drafted: int) -> None:
        self.accepted += accepted
        self.drafted += drafted

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.drafted *= kept


class DraftWindows:
    """One per draft worker of an engine."""

    def __init__(self, link: WorkerLink, source: int, every: int, max_window: int, log: EngineLog) -> None:
        """source: the worker's, in the draft trees. every: steps from plan to plan. max_window: longest window that is
        planned, tokens."""
        self._link, self._source, self._every, self._log = link, source, every, log
        self._windows = np.arange(max_window + 1)
        self._drafts: dict[int, _Drafts] = {}
        self._all = _Drafts()
        self._num_told = 0  # draft tokens that were judged since the worker came
        self._num_steps = 0
        self._planned_batch = 0
        self._num_idle = 0  # plans in a row that found nothing worth drafting
        self._begins_coupled = False  # responses, before they are planned for
        self.num_changes = 0
        """Changes between coupled and decoupled."""

    def learn(self, responses: Int64Array, told: Int32Array, right: Int32Array) -> None:
        """What a step has decided about the worker's own drafts (`DraftTrees.judge`). [num_responses] each"""
        num_told = int(told.sum())
        self._num_told += num_told
        self._all.add(int(right.sum()), num_told)
        for row in np.flatnonzero(told).tolist():
            self._of(int(responses[row])).add(int(right[row]), int(told[row]))

    def advance(self, responses: Int64Array, step_time: StepTimeModel, draft_s: float) -> bool:
        """A step begins: plan anew where it is time; returns whether it was.

        The first plan waits until enough drafts have been judged.

        responses: that draft in it. draft_s: D, seconds per draft token of all of them; 0 while it is not known.
        """
        self._num_steps += 1
        count = len(responses)
        is_known = self._planned_batch or self._num_told >= LEAST_TOLD
        if not (draft_s and is_known and is_due(self._num_steps, count, self._planned_batch, self._every)):
            return False
        self._num_steps, self._planned_batch = 0, count
        names = responses.tolist()
        acceptance, mean = self._estimate(names)
        # what was never verified is taken for no dearer: without drafts so long the budget would never find out
        sizes = np.minimum(count * (self._windows + 1), max(largest_known_tokens(step_time), count))
        times = StepTimes(1, draft_s, predict_s(step_time, sizes))
        plan = replan(acceptance, times, self._num_idle)
        self._log.write_windows(acceptance, times, self._num_idle, plan, self._source)
        self._num_idle = 0 if plan.windows.any() and not plan.is_trial else self._num_idle + 1
        self._link.allow(names, most_ahead(plan.windows, plan.is_coupled).tolist())
        first = plan if plan.is_trial else reconfigure([mean], times, everyone=True)
        self._link.begin_with(int(most_ahead(first.windows, first.is_coupled)[0]))
        self._begins_coupled = bool(first.is_coupled[0])
        for response, is_coupled in zip(names, plan.is_coupled.tolist(), strict=True):
            one = self._of(response)
            self.num_changes += one.is_coupled != is_coupled
            one.is_coupled = is_coupled
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the last plan found nothing worth drafting, if it gave the worker a trial or not."""
        return self._num_idle > 0

    def _of(self, response: int) -> _Drafts:
        return self._drafts.setdefault(response, _Drafts(is_coupled=self._begins_coupled))

    def _estimate(self, names: list[int]) -> tuple[Float64Array, float]:
        """Acceptance rate of each response, drawn to the mean of all [num_requests], and that mean."""
        found = [self._drafts.get(name) or _Drafts() for name in names]
        accepted = np.array([one.accepted for one in found])
        drafted = np.array([one.drafted for one in found])
        mean = (self._all.accepted + 1.0) / (self._all.drafted + 2.0)
        for one in self._drafts.values():
            one.fade(_KEPT)
        self._all.fade(_KEPT_OF_ALL)
        return np.asarray((accepted + PRIOR_TOKENS * mean) / (drafted + PRIOR_TOKENS)), mean

    def close(self, response: int) -> None:
        """A response has ended."""
        self._drafts.pop(response, None)

    def clear(self) -> None:
        """All responses have ended, as the policy has changed: their mean is still a guess for the next ones."""
        self._drafts.clear()
        self._num_idle = 0
        if not self._link.first_ahead:
            self._begin_anew()

    def leave(self) -> bool:
        """The worker is not there: whoever comes next is slower, or faster. Returns whether that undoes a plan."""
        was_planned = bool(self._planned_batch)
        self._num_told = self._num_steps = self._num_idle = 0
        if was_planned:
            self._begin_anew()
        return was_planned

    def _begin_anew(self) -> None:
        self._planned_batch, self._begins_coupled = 0, False
        self._link.begin_anew()

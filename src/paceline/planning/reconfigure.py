"""Reconfiguration: which window and mode does each request that drafts badly go on with? (SpecActor algorithm 2)

Owns one decision per worker, taken every 1000 decoding iterations or so. Invariant: requests at or above the mean
acceptance keep the window of the placement, unless everyone is asked. Coupled means the placement's own drafter and
verifier without drafting ahead (SpecActor 4.1), so both modes are judged by the same D and V. Called by the simulator
and by engines with a draft worker (engine/draft_windows.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.planning.window import Mode, Rules, StepTimes, best_window, checked_acceptance
from paceline.types import Float64Array, Int32Array, Int64Array

LEAST_STEPS = 16
"""Steps between two plans at least, however the batch changes."""

TRIAL_WINDOW = 1
"""Of everyone, decoupled, in a trial of a drafter that does not pay."""

LONGEST_REST = 8
"""Plans from trial to trial at most; the first follow each other after 1, 2 and 4."""

_CHANGE = 0.25
"""A batch that has changed by this share of what it was is planned for anew."""

_TABLE_RATES = np.linspace(0.0, 1.0, 257)
_Plans: TypeAlias = tuple[Int32Array, NDArray[np.bool_], Float64Array]
"""The last three fields of a `Reconfiguration`."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """New draft plans, for the requests below the mean acceptance only."""

    requests: Int64Array  # [num_changed] indices into the acceptance rates, ascending
    windows: Int32Array  # [num_changed] draft tokens; 0: this request decodes without drafts
    is_coupled: NDArray[np.bool_]  # [num_changed]
    tokens_per_s: Float64Array  # [num_changed] expected rate of each
    is_trial: bool = False
    """Nothing is worth drafting, as far as is known; it is drafted to be measured."""


class PlanTable:
    """Lines 3 to 5 of algorithm 2 worked out once, for acceptance rates in steps of 1/256: a caller that reconfigures
    often at the same step times only looks up. The rates that it is asked for are rounded.
    """

    def __init__(self, times: StepTimes, rules: Rules = Rules.PROTOCOL) -> None:
        """times, rules and errors as in `reconfigure`."""
        self._plans = _best_plans(_TABLE_RATES, times, rules)

    def look_up(self, rates: Float64Array) -> _Plans:
        """Windows, modes and expected rates for acceptance rates [num_rates]."""
        places = np.rint(rates * (len(_TABLE_RATES) - 1)).astype(np.int64)
        windows, is_coupled, tokens_per_s = self._plans
        return windows[places], is_coupled[places], tokens_per_s[places]


def is_due(num_steps: int, batch: int, planned_batch: int, every: int) -> bool:
    """Whether to plan again, `num_steps` decode iterations after the plan for `planned_batch` requests.

    every: iterations from plan to plan while the batch stays what it was.
    """
    if num_steps < min(LEAST_STEPS, every):
        return False
    return num_steps >= every or abs(batch - planned_batch) >= _CHANGE * planned_batch


def reconfigure(
    acceptance: ArrayLike,
    times: StepTimes | PlanTable,
    rules: Rules = Rules.PROTOCOL,
    *,
    everyone: bool = False,
) -> Reconfiguration:
    """Best window and mode of every request whose acceptance rate [num_requests] is below the mean of all.

    everyone: of all requests, as where no placement stands behind the window that the others would keep; a request
    alone is never below the mean.

    times: D(b) and V_w(b) of the placement for windows 0 .. max_window (`window.profiled_times`). The paper takes
    b = 1, a request alone; a batch prices the verifier's rounds as they are while others share them. Or a table, which
    has rules of its own.

    Ties go to coupled, which drafts nothing in vain, then to the smaller window. Raises EngineError for rates outside
    [0, 1], ConfigError for a max_window below 1. Differs: no drafts (coupled, window 0) competes too; the paper leaves
    SelectBetter's ties open.
    """
    rates = checked_acceptance(acceptance)
    below = np.arange(rates.size) if everyone or not rates.size else np.flatnonzero(rates < rates.mean())
    plans = (
        times.look_up(rates[below])
        if isinstance(times, PlanTable)
        else _best_plans(rates[below], times, rules)
    )
    return Reconfiguration(below, *plans)


def replan(acceptance: ArrayLike, times: StepTimes, num_idle: int) -> Reconfiguration:
    """Everyone's window and mode in a running engine, as `reconfigure`, and now and then a trial where these are all 0.

    What is not drafted is not measured, so a drafter that was slow on a busy machine, or wrong under an older policy,
    would never come back. num_idle: plans before this one, in a row, that found nothing worth drafting.
    """
    plan = reconfigure(acceptance, times, everyone=True)
    if plan.windows.any() or not is_trial(num_idle):
        return plan
    windows = np.full_like(plan.windows, TRIAL_WINDOW)
    return replace(plan, windows=windows, is_coupled=np.zeros_like(plan.is_coupled), is_trial=True)


def is_trial(num_idle: int) -> bool:
    """Whether to draft all the same, after so many plans in a row that found nothing worth drafting."""
    return num_idle > 0 and num_idle % min(1 << (num_idle.bit_length() - 1), LONGEST_REST) == 0


def _best_plans(rates: Float64Array, times: StepTimes, rules: Rules) -> _Plans:
    """Lines 3 to 5 of algorithm 2 for each rate."""
    coupled = best_window(rates, times, Mode.COUPLED, rules)
    decoupled = best_window(rates, times, Mode.DECOUPLED, rules)
    is_coupled = coupled.tokens_per_s >= decoupled.tokens_per_s
    return (
        np.where(is_coupled, coupled.window, decoupled.window),
        is_coupled,
        np.where(is_coupled, coupled.tokens_per_s, decoupled.tokens_per_s),
    )

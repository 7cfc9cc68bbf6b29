"""The draft ladder: how much faster is decoding with each drafter, at which acceptance rate? (SpecActor 4.2)

Owns the ladder and the choices read off it: the drafter a rollout begins with, and the rank that racing hands drafters
out by. Invariant: every rung stands for the drafter's best window at that acceptance rate.

Differs: the paper measures each rung by running the drafter and accepting tokens at random; here a rung follows from
the profiled latencies and the acceptance model (`window.py`), so a ladder costs microseconds and can be drawn for any
batch. With `Mode.COUPLED` a drafter that is not worth its time has window 0 and speed-up 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError
from paceline.planning.latency_profile import LatencyModel, VerifyLatency
from paceline.planning.window import (
    BestWindow,
    Mode,
    Rules,
    best_window,
    checked_acceptance,
    profiled_times,
)
from paceline.types import Float64Array, Int32Array

ACCEPTANCE_POINTS = np.linspace(0.0, 1.0, 101)
"""Where a ladder is drawn unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """Where the ladder stands."""

    batch: int
    """b, requests drafted for and verified together."""
    max_window: int
    """Longest draft window, tokens."""
    mode: Mode = Mode.COUPLED
    rules: Rules = Rules.PROTOCOL


@dataclass(frozen=True, slots=True)
class Ladder:
    """Speed-up of every drafter over plain decoding as a function of its acceptance rate."""

    drafters: tuple[str, ...]
    acceptance: Float64Array  # [num_points] ascending
    speedup: Float64Array  # [num_drafters, num_points] 1 = as fast as plain decoding
    window: Int32Array  # [num_drafters, num_points] the window that gives it, draft tokens


@dataclass(frozen=True, slots=True)
class Rung:
    """One drafter at one acceptance rate."""

    drafter: str
    speedup: float
    """Over plain decoding."""
    window: int
    """Draft tokens; 0: draft nothing."""


def build_ladder(
    drafters: Mapping[str, LatencyModel],
    verify: VerifyLatency,
    settings: LadderSettings,
    acceptance: ArrayLike = ACCEPTANCE_POINTS,
) -> Ladder:
    """The ladder of `drafters` (D by name) before one verifier, at acceptance rates [num_points] ascending.

    Raises EngineError for rates outside [0, 1]; ConfigError without drafters, or for a batch or max_window below 1.
    """
    if not drafters:
        raise ConfigError("a ladder of 0 drafters offers no choice: name at least 1, or turn speculation off")
    p = checked_acceptance(acceptance)
    rungs = [_rungs(draft, verify, settings, p) for draft in drafters.values()]
    return Ladder(
        tuple(drafters),
        p,
        np.array([rung.tokens_per_s for rung in rungs]),
        np.array([rung.window for rung in rungs], dtype=np.int32),
    )


def rank_drafters(ladder: Ladder, acceptance: Mapping[str, float]) -> tuple[Rung, ...]:
    """Every drafter at its own (historical) acceptance rate, the fastest first; ties in the ladder's order.

    Between two points the speed-up is interpolated and the window is that of the nearer point, the lower of two.
    Raises ConfigError for a drafter of the ladder without an acceptance rate, EngineError for one outside [0, 1].
    """
    missing = [name for name in ladder.drafters if name not in acceptance]
    if missing:
        raise ConfigError(
            f"no historical acceptance rate of drafter {missing[0]!r}, only of {sorted(acceptance)}: profile it, "
            "or build the ladder without it"
        )
    rungs = [_rung(ladder, at, acceptance[name]) for at, name in enumerate(ladder.drafters)]
    return tuple(sorted(rungs, key=lambda rung: -rung.speedup))


def choose_first(ladder: Ladder, acceptance: Mapping[str, float]) -> Rung:
    """The drafter to begin a rollout with: the top of `rank_drafters` (SpecActor v2, figure 11 b). Raises as it."""
    return rank_drafters(ladder, acceptance)[0]


def _rung(ladder: Ladder, at: int, acceptance: float) -> Rung:
    rate = float(checked_acceptance(acceptance))
    nearest = int(np.abs(ladder.acceptance - rate).argmin())
    speedup = float(np.interp(rate, ladder.acceptance, ladder.speedup[at]))
    return Rung(ladder.drafters[at], speedup, int(ladder.window[at, nearest]))


def _rungs(
    draft: LatencyModel, verify: VerifyLatency, settings: LadderSettings, acceptance: Float64Array
) -> BestWindow:
    """`best_window` with the rate as a multiple of plain decoding's, 1 / V_0(b)."""
    times = profiled_times(draft, verify, settings.batch, settings.max_window)
    best = best_window(acceptance, times, settings.mode, settings.rules)
    return BestWindow(best.window, best.tokens_per_s * times.verify_s[0])

"""How greedily a drafter throws the shared dice: argmax(beta log q + G), beta learned online per drafter.

beta = 1 is the coupling of two distributions by one noise, beta = infinity the greedy draft; a drafter that
is less sure than it should be wants a beta between. Whatever was drafted, a drafter reports what each beta of
the grid would have proposed at the first position, and the target's token there scores all of them at once:
full information, no exploration. Invariant: the decision moves only on evidence that paired counts bear out
(see `update_sharpness`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline import _step
from paceline.errors import EngineError
from paceline.types import Float64Array, Int32Array

SHARPNESS_GRID: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, math.inf)
"""The betas of `DraftBatch.probes`, ascending."""
MEMORY_TOKENS = 4000.0
"""Scored tokens after which an observation counts 1/e."""
SWITCH_SIGMAS = 1.0
"""Lead, in standard deviations of the paired difference, that another beta needs over the present one."""


@dataclass(frozen=True, slots=True)
class SharpnessState:
    """Decayed paired hits. `beta` is the decision."""

    wins: Float64Array  # [num_sharpness, num_sharpness] times that row hit the target and column did not
    chosen: int
    """Index into SHARPNESS_GRID."""

    @classmethod
    def initial(cls) -> SharpnessState:
        """No evidence: a tie, which the smallest beta (the coupling) wins."""
        size = len(SHARPNESS_GRID)
        return cls(wins=np.zeros((size, size)), chosen=0)

    @property
    def beta(self) -> float:
        """The sharpness to draft with now."""
        return SHARPNESS_GRID[self.chosen]


def update_sharpness(state: SharpnessState, probes: Int32Array, targets: Int32Array) -> SharpnessState:
    """The state after one engine step.

    probes: [num_requests, num_sharpness] first draft token of every beta, -1 where there was no proposal.
    targets: [num_requests] the target's token at that position, -1 where it is unknown.

    Hysteresis: the beta with the most hits (ties: the smaller) replaces the present one only if it leads by
    more than SWITCH_SIGMAS standard deviations of the paired difference, sqrt(wins + losses) (McNemar's
    test), so betas that propose the same tokens never take turns.
    """
    if probes.shape[1] != len(SHARPNESS_GRID):
        raise EngineError(
            f"{probes.shape[1]} sharpness probes per request, expected {len(SHARPNESS_GRID)}: "
            "the drafter must use SHARPNESS_GRID"
        )
    more, count = _step.count_wins(probes, targets)
    if not count:
        return state
    wins = state.wins * math.exp(-count / MEMORY_TOKENS)
    if not more.any():  # nothing that tells one beta from another
        return SharpnessState(wins, state.chosen)
    wins += more
    return SharpnessState(wins, _choose(wins, state.chosen))


def _choose(wins: Float64Array, present: int) -> int:
    # hits_i - hits_j = wins_ij - wins_ji, so the lead over one beta orders them all; argmax takes the first.
    lead = wins[:, present] - wins[present, :]
    best = int(lead.argmax())
    noise = math.sqrt(wins[best, present] + wins[present, best])
    return best if lead[best] > SWITCH_SIGMAS * noise else present

"""Learning beta from full information."""

import math

import numpy as np
import pytest

from paceline.errors import EngineError
from paceline.planning.sharpness import SHARPNESS_GRID, SharpnessState, update_sharpness

SIZE = len(SHARPNESS_GRID)


def simulate(state: SharpnessState, rates: list[float], steps: int, seed: int = 0) -> SharpnessState:
    """Feeds probes that hit the target with the given rate per beta, by one uniform draw (nested hits)."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        luck = rng.random((8, 1))
        probes = np.where(luck < np.array(rates), 7, 3).astype(np.int32)
        state = update_sharpness(state, probes, np.full(8, 7, dtype=np.int32))
    return state


def test_without_evidence_the_coupling_stands() -> None:
    assert SharpnessState.initial().beta == 1.0


def test_equal_betas_keep_the_smaller() -> None:
    assert simulate(SharpnessState.initial(), [0.7] * SIZE, 200).beta == 1.0


@pytest.mark.parametrize("best", range(SIZE))
def test_the_best_beta_is_found(best: int) -> None:
    rates = [0.70 + 0.04 * (i == best) for i in range(SIZE)]
    assert simulate(SharpnessState.initial(), rates, 300).beta == SHARPNESS_GRID[best]


def test_the_decision_follows_a_change() -> None:
    state = simulate(SharpnessState.initial(), [0.6, 0.62, 0.65, 0.7, 0.75], 500)
    assert state.beta == math.inf
    assert simulate(state, [0.75, 0.7, 0.65, 0.62, 0.6], 2000).beta == 1.0


def test_a_lead_within_the_noise_does_not_switch() -> None:
    state = SharpnessState.initial()
    targets = np.array([5], dtype=np.int32)
    greedy_hit = np.array([[4, 4, 4, 4, 5]], dtype=np.int32)
    assert update_sharpness(state, greedy_hit, targets).beta == 1.0
    twice = update_sharpness(update_sharpness(state, greedy_hit, targets), greedy_hit, targets)
    assert twice.beta == math.inf


def test_missing_proposals_and_targets_teach_nothing() -> None:
    none = np.full((3, SIZE), -1, dtype=np.int32)
    unknown = np.full(3, -1, dtype=np.int32)
    state = update_sharpness(SharpnessState.initial(), none, unknown)
    assert state.chosen == 0
    assert not state.wins.any()


def test_another_grid_is_refused() -> None:
    with pytest.raises(EngineError, match="SHARPNESS_GRID"):
        update_sharpness(
            SharpnessState.initial(), np.zeros((2, 3), dtype=np.int32), np.zeros(2, dtype=np.int32)
        )

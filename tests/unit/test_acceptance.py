"""The acceptance table: prior, posterior, decay, and what a verified draft tells."""

import numpy as np
import pytest

from paceline.errors import EngineError
from paceline.planning.acceptance import AcceptanceTable, estimate, judge, update_acceptance


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_without_evidence_the_prior_stands() -> None:
    prior = np.array([0.1, 0.5, 0.9], dtype=np.float32)
    result = estimate(AcceptanceTable.initial(prior))
    np.testing.assert_allclose(result, prior, rtol=1e-6)
    assert result.dtype == np.float32


def test_posterior_mean() -> None:
    table = AcceptanceTable.initial([0.5, 0.5], prior_strength=4.0)
    table = update_acceptance(table, int32(0, 0, 0, 0), np.array([True, True, True, False]))
    np.testing.assert_allclose(estimate(table), [(3 + 2) / (4 + 4), 0.5], rtol=1e-6)


def test_counts_may_come_pooled() -> None:
    table = AcceptanceTable.initial([0.5, 0.5], prior_strength=4.0)
    pooled = update_acceptance(table, int32(1), np.array([3.0]), np.array([4.0]))
    np.testing.assert_allclose(estimate(pooled), [0.5, (3 + 2) / (4 + 4)], rtol=1e-6)


def test_it_learns_the_truth_and_follows_a_change() -> None:
    rng = np.random.default_rng(0)
    table = AcceptanceTable.initial(np.full(4, 0.5), half_life_steps=200)
    for truth in (np.array([0.2, 0.5, 0.8, 0.95]), np.array([0.9, 0.5, 0.3, 0.1])):
        for _ in range(2000):
            cells = rng.integers(0, 4, size=20).astype(np.int32)
            table = update_acceptance(table, cells, rng.random(20) < truth[cells])
        np.testing.assert_allclose(estimate(table), truth, atol=0.06)


def test_a_cell_that_is_no_longer_verified_returns_to_its_prior() -> None:
    table = AcceptanceTable.initial([0.7, 0.5], half_life_steps=10)
    table = update_acceptance(table, np.zeros(100, dtype=np.int32), np.zeros(100, dtype=bool))
    assert estimate(table)[0] < 0.1
    for _ in range(200):
        table = update_acceptance(table, int32(1), np.array([True]))
    assert estimate(table)[0] == pytest.approx(0.7, abs=0.01)


def test_only_positions_up_to_the_first_rejection_are_told() -> None:
    told, right = judge(4, int32(4, 3, 0, 2), int32(1, 3, 0, 0))
    assert told.sum(axis=1).tolist() == [2, 3, 0, 1]
    assert right[told].tolist() == [True, False, True, True, True, False]


def test_estimates_are_conditional_so_path_probabilities_are_calibrated() -> None:
    rng = np.random.default_rng(1)
    truth = np.array([0.9, 0.6, 0.8])
    table = AcceptanceTable.initial(np.full(3, 0.5))
    for _ in range(3000):
        num_accepted = np.cumprod(rng.random((4, 3)) < truth, axis=1).sum(axis=1).astype(np.int32)
        told, right = judge(3, int32(3, 3, 3, 3), num_accepted)
        table = update_acceptance(table, np.nonzero(told)[1].astype(np.int32), right[told])
    np.testing.assert_allclose(np.cumprod(estimate(table)), np.cumprod(truth), atol=0.03)


def test_bad_input_is_refused() -> None:
    table = AcceptanceTable.initial([0.5, 0.5])
    with pytest.raises(EngineError, match="do not fit a table of 2"):
        update_acceptance(table, int32(2), np.array([True]))
    with pytest.raises(EngineError, match="do not fit a table of 2"):
        update_acceptance(table, int32(-1), np.array([True]))
    with pytest.raises(EngineError, match="from 0 to 1"):
        AcceptanceTable.initial([0.5, 1.5])
    with pytest.raises(EngineError, match="positive"):
        AcceptanceTable.initial([0.5], half_life_steps=0)

"""Algorithm 2: who is reconfigured, and to what."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import EngineError
from paceline.planning.latency_profile import AffineLatency
from paceline.planning.reconfigure import PlanTable, reconfigure
from paceline.planning.window import Mode, Rules, StepTimes, profiled_times, tokens_per_s

DRAFT, VERIFY = AffineLatency(0.002, 0.00002), AffineLatency(0.012, 0.0004)
MAX_WINDOW = 10


@pytest.mark.parametrize("rules", list(Rules))
@pytest.mark.parametrize("batch", [1, 64])
def test_every_request_below_the_mean_gets_the_best_of_both_modes(batch: int, rules: Rules) -> None:
    acceptance = np.random.default_rng(1).beta(3, 2, size=60)
    times = profiled_times(DRAFT, VERIFY, batch, MAX_WINDOW)
    new = reconfigure(acceptance, times, rules)
    assert new.requests.tolist() == np.flatnonzero(acceptance < acceptance.mean()).tolist()
    for request, window, is_coupled, rate in zip(
        new.requests, new.windows, new.is_coupled, new.tokens_per_s, strict=True
    ):
        rates = {
            (mode, w): float(
                tokens_per_s(
                    acceptance[request],
                    w,
                    StepTimes(batch, times.draft_s, times.verify_s[w]),
                    mode,
                    rules,
                )
            )
            for mode in Mode
            for w in range(int(mode is Mode.DECOUPLED or rules is Rules.PAPER), MAX_WINDOW + 1)
        }
        assert rate == pytest.approx(max(rates.values()))
        assert rate == pytest.approx(rates[Mode.COUPLED if is_coupled else Mode.DECOUPLED, int(window)])


def test_hopeless_drafts_are_given_up() -> None:
    times = profiled_times(DRAFT, VERIFY, 64, MAX_WINDOW)
    new = reconfigure([0.0, 0.9], times)
    assert (new.requests.tolist(), new.windows.tolist(), new.is_coupled.tolist()) == ([0], [0], [True])


def test_both_modes_are_chosen_where_they_are_better() -> None:
    cheap, dear = StepTimes(64, 0.0001, np.full(11, 0.02)), StepTimes(64, 0.008, np.full(11, 0.02))
    assert reconfigure([0.5, 1.0], cheap).is_coupled.tolist() == [True]
    assert reconfigure([0.9, 1.0], dear).is_coupled.tolist() == [False]


def test_equal_modes_are_coupled() -> None:
    """Half a token in 0.25 s, or one in 0.5 s."""
    new = reconfigure([0.0, 1.0], StepTimes(64, 0.25, np.full(5, 0.25)), Rules.PAPER)
    assert (new.windows.tolist(), new.is_coupled.tolist()) == ([1], [True])


def test_nobody_is_below_the_mean_of_equals() -> None:
    times = profiled_times(DRAFT, VERIFY, 1, MAX_WINDOW)
    assert reconfigure([0.5, 0.5, 0.5], times).requests.size == 0
    assert reconfigure([], times).windows.size == 0


def test_rates_that_are_none_are_refused() -> None:
    with pytest.raises(EngineError, match="not between 0 and 1"):
        reconfigure([0.5, float("nan")], profiled_times(DRAFT, VERIFY, 1, MAX_WINDOW))


@pytest.mark.parametrize("rules", list(Rules))
def test_a_table_decides_the_same(rules: Rules) -> None:
    times = profiled_times(DRAFT, VERIFY, 1, MAX_WINDOW)
    acceptance = np.random.default_rng(2).integers(0, 257, size=80) / 256
    by_table, by_times = (
        reconfigure(acceptance, PlanTable(times, rules)),
        reconfigure(acceptance, times, rules),
    )
    for field in ("requests", "windows", "is_coupled", "tokens_per_s"):
        assert getattr(by_table, field).tolist() == getattr(by_times, field).tolist()
    assert len(set(by_times.windows.tolist())) > 1
    rounded = reconfigure(acceptance + 0.001 * (acceptance < 1), PlanTable(times, rules))
    assert set(rounded.windows.tolist()) <= set(by_times.windows.tolist())

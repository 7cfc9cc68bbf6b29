"""The draft window: the closed forms against the sums they stand for and the protocol they model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, EngineError
from paceline.planning.latency_profile import AffineLatency
from paceline.planning.window import (
    Mode,
    Rules,
    StepTimes,
    best_window,
    coupled_tokens,
    decoupled_tokens,
    decoupled_tokens_of_paper,
    profiled_times,
    round_s,
    tokens_per_s,
)

ACCEPTANCE = st.floats(0.0, 1.0)
WINDOW = st.integers(1, 32)


def simulated_tokens_per_s(p: float, w: int, draft_s: float, verify_s: float, in_batch: bool) -> float:
    """The decoupled protocol, position by position: w D to draft a window, V to verify it, bonus token included."""
    misses = iter(np.flatnonzero(np.random.default_rng(7).random(100_000) >= p).tolist())
    slot_s = max(w * draft_s, verify_s)
    miss, decided, start, ready = next(misses), 0, 0, w * draft_s
    end = 0.0
    for after in misses:
        while True:
            begin = math.ceil(ready / slot_s - 1e-9) * slot_s if in_batch else ready
            end = begin + verify_s
            if miss <= start + w:
                break
            decided = start + w + 1
            start += w
            ready = max(begin + w * draft_s, end)
        decided = start = miss + 1
        ready = end + w * draft_s
        miss = after
    return decided / end


@pytest.mark.parametrize("p", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("w", [1, 2, 4, 12])
@pytest.mark.parametrize(("draft_s", "batch"), [(0.05, 64), (0.4, 64), (0.05, 1), (0.4, 1)])
def test_the_closed_form_is_what_the_decoupled_protocol_gives(
    p: float, w: int, draft_s: float, batch: int
) -> None:
    times = StepTimes(batch, draft_s, np.array(1.0))
    expected = simulated_tokens_per_s(p, w, draft_s, 1.0, batch > 1)
    assert float(tokens_per_s(p, w, times, Mode.DECOUPLED)) == pytest.approx(expected, rel=0.015)


def test_the_papers_mean_of_ratios_is_off_by_known_amounts() -> None:
    """Guards the numbers in docs/decisions/0003-decoupled-rounds.md."""
    p, w = np.linspace(0.0, 1.0, 1001)[:, None], np.arange(1, 129)
    ratio = decoupled_tokens_of_paper(p, w) / decoupled_tokens(p, w)
    assert ratio.max() == pytest.approx(1.29, abs=0.01)
    assert ratio.min() == pytest.approx(0.926, abs=0.002)
    assert (ratio[:, 0] <= 1.0).all()
    expected = simulated_tokens_per_s(0.9, 8, 0.125, 1.0, True)
    assert float(decoupled_tokens_of_paper(0.9, 8)) == pytest.approx(1.225 * expected, rel=0.02)


@given(ACCEPTANCE, WINDOW)
def test_tokens_are_the_sums_of_the_paper(p: float, w: int) -> None:
    a = np.arange(w + 1)
    share = np.append(p ** a[:w] * (1.0 - p), p**w)  # P(a, w): exactly a of w draft tokens are accepted
    assert share.sum() == pytest.approx(1.0)
    assert float(coupled_tokens(p, w)) == pytest.approx(float(share @ (a + 1)))
    paper = float(share[:w] @ (a[:w] + 1)) / 2 + w * share[w]
    assert float(decoupled_tokens_of_paper(p, w)) == pytest.approx(paper)


@given(ACCEPTANCE, WINDOW)
def test_certain_and_hopeless_drafts(p: float, w: int) -> None:
    assert float(decoupled_tokens(1.0, w)) == pytest.approx(w)
    assert float(coupled_tokens(1.0, w)) == pytest.approx(w + 1)
    assert float(decoupled_tokens(0.0, w)) == 0.5
    assert float(decoupled_tokens(0.0, w, 0.0)) == 1.0
    assert float(decoupled_tokens(p, w)) <= w + 1e-9


@given(st.floats(1e-12, 1e-6), WINDOW)
def test_nearly_certain_drafts_lose_no_digits(miss: float, w: int) -> None:
    assert float(coupled_tokens(1.0 - miss, w)) == pytest.approx(w + 1, rel=1e-4)


def test_a_round_overlaps_draft_and_verification_only_decoupled() -> None:
    times = StepTimes(8, 0.25, np.array([1.0, 1.5]))
    assert round_s([2, 8], times, Mode.COUPLED).tolist() == [1.5, 3.5]
    assert round_s([2, 8], times, Mode.DECOUPLED).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rules", list(Rules))
@pytest.mark.parametrize("mode", list(Mode))
def test_the_best_window_beats_every_other(mode: Mode, rules: Rules) -> None:
    times = profiled_times(AffineLatency(0.001, 1e-5), AffineLatency(0.02, 2e-4), 16, 24)
    acceptance = np.linspace(0.0, 1.0, 21)
    best = best_window(acceptance, times, mode, rules)
    first = 0 if mode is Mode.COUPLED and rules is Rules.PROTOCOL else 1
    for at, p in enumerate(acceptance):
        rates = {
            w: float(tokens_per_s(p, w, StepTimes(16, times.draft_s, times.verify_s[w]), mode, rules))
            for w in range(first, 25)
        }
        assert best.tokens_per_s[at] == pytest.approx(max(rates.values()))
        assert best.window[at] == max(rates, key=lambda w: (round(rates[w], 9), -w))


def test_a_drafter_slower_than_the_target_is_not_asked() -> None:
    times = profiled_times(AffineLatency(0.05, 0.0), AffineLatency(0.02, 0.0), 4, 8)
    assert int(best_window(0.6, times, Mode.COUPLED).window) == 0
    assert int(best_window(0.6, times, Mode.COUPLED, Rules.PAPER).window) == 1


def test_equal_windows_the_smaller_wins() -> None:
    free_draft = StepTimes(4, 0.0, np.ones(9))
    assert int(best_window(0.0, free_draft, Mode.DECOUPLED).window) == 1
    assert int(best_window(0.0, free_draft, Mode.COUPLED).window) == 0


def test_windows_grow_with_acceptance() -> None:
    times = profiled_times(AffineLatency(0.001, 0.0), AffineLatency(0.02, 2e-4), 32, 32)
    windows = best_window(np.linspace(0.0, 0.99, 100), times, Mode.COUPLED).window
    assert (np.diff(windows) >= 0).all()
    assert windows[0] == 0
    assert windows[-1] > 8


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_acceptance_rates_out_of_range_are_refused(p: float) -> None:
    with pytest.raises(EngineError, match="not between 0 and 1"):
        best_window([0.5, p], StepTimes(1, 0.1, np.ones(4)), Mode.COUPLED)


def test_empty_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        best_window(0.5, StepTimes(1, 0.1, np.ones(1)), Mode.COUPLED)
    with pytest.raises(ConfigError, match="at least 1"):
        profiled_times(AffineLatency(0.1, 0.0), AffineLatency(0.1, 0.0), 0, 4)

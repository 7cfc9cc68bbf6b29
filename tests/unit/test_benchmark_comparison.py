"""The speed benchmark's figures: ratios, bounds, and what has to be reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from timed_rollouts import decode_step, plain_rollout

from budget import check_rows  # isort: skip
from bounds import DraftPrice, clairvoyant_steps, count_hits, fit_clock, steps_s, tail_steps_s, wasted_s  # isort: skip
from clock import StepClock  # isort: skip
from comparison import Bound, add_bound, add_rival, check_bars, summarise  # isort: skip
from plain_time import PlainTime  # isort: skip
from rollouts import Timed  # isort: skip

LENGTHS = [20, 40, 60, 100]


def faster(run: Timed, factor: float, *, accepted: int = 1) -> Timed:
    """The same tokens in less time."""
    steps = [length // accepted for length in run.lengths]
    return replace(run, ends_s=[end / factor for end in run.ends_s], num_steps=steps)


def test_plain_time_of_other_lengths() -> None:
    reference = PlainTime([plain_rollout(LENGTHS), plain_rollout([30, 30, 80])])
    other = plain_rollout([10, 50, 90])
    all_s, tail_s = reference.seconds(other)
    assert all_s == pytest.approx(other.wall_s, rel=0.02)
    assert tail_s == pytest.approx(other.tail_s, rel=0.05)


def test_the_headline_compares_identical_tokens() -> None:
    forced = plain_rollout(LENGTHS)
    off, drafted = faster(forced, 0.95), faster(forced, 2.0, accepted=4)
    row = summarise("paceline", [[drafted]] * 2, PlainTime([forced]), [[forced]] * 2, [[off]] * 2)
    assert row["ratio"] == pytest.approx(2.0)
    assert row["over_off"] == pytest.approx(2.0 / 0.95)
    assert row["normalised"] == pytest.approx(2.0, rel=0.02)
    assert row["tail_ratio"] == pytest.approx(2.0)
    assert row["acceptance_length"] == pytest.approx(4.0)
    assert (row["nats_per_token"], row["mean_length"]) == (pytest.approx(0.1), 55.0)
    assert row["equal"] is True


def test_ranges_are_those_of_the_repetitions() -> None:
    forced = plain_rollout(LENGTHS)
    runs = [[faster(forced, factor)] for factor in (1.5, 2.0, 3.0)]
    row = summarise("paceline", runs, PlainTime([forced]), [[forced]] * 3, None)
    assert row["ratio"] == pytest.approx(2.0)
    assert row["ratio_range"] == pytest.approx([1.5, 3.0])


def test_other_tokens_are_told() -> None:
    forced = plain_rollout(LENGTHS)
    wrong = replace(forced, ids=[*forced.ids[:-1], (7,) * 100])
    assert summarise("paceline", [[wrong]], PlainTime([forced]), [[forced]], [[forced]])["equal"] is False


def test_a_rival_has_no_identical_tokens() -> None:
    forced = plain_rollout(LENGTHS)
    rival = faster(plain_rollout([25, 35, 70, 120]), 1.6)
    row = summarise("draft_model k=5", [[rival]], PlainTime([forced]), None, None)
    assert "ratio" not in row
    assert "equal" not in row
    assert row["normalised"] == pytest.approx(1.6, rel=0.02)


def test_one_response_has_no_tail() -> None:
    forced = plain_rollout([50])
    assert summarise("paceline", [[forced]], PlainTime([forced]), [[forced]], None)["tail_ratio"] is None


def test_the_best_rival_is_the_measure() -> None:
    rows: list[dict[str, Any]] = [
        {"system": "draft_model k=3", "normalised": 1.2},
        {"system": "draft_model k=5", "normalised": 1.5},
        {"system": "plain", "normalised": 1.0},
        {"system": "paceline", "normalised": 1.8},
    ]
    add_rival(rows, ["draft_model k=3", "draft_model k=5"])
    assert rows[3]["best_rival"] == "draft_model k=5"
    assert rows[3]["over_best_rival"] == pytest.approx(1.2)
    assert "over_best_rival" not in rows[2]


def test_plain_vllm_is_the_measure_where_its_speculation_loses() -> None:
    rows = [{"system": "ngram", "normalised": 0.84}, {"system": "paceline", "normalised": 1.22}]
    add_rival(rows, ["ngram"])
    assert rows[1]["best_rival"] == "ngram"
    assert rows[1]["over_best_rival"] == pytest.approx(1.22)


# --- bounds


def test_waste_is_drafting_and_what_was_rejected() -> None:
    plain = plain_rollout(LENGTHS)
    few = [decode_step(2, 100, 0.022 + 0.0005 * n, drafts=n, gained=2 + n) for n in range(8)]
    clock = fit_clock([plain, replace(plain, steps=few * 4)])
    step = decode_step(2, 100, 0.0255, drafts=6, gained=4, drafting_s=0.003)
    run = replace(plain, steps=[step, step], ends_s=[0.0, 0.03])
    wasted, wasted_tail = wasted_s(run, clock)
    each = 0.003 + clock.step_s(2, 8, 100) - clock.step_s(2, 4, 100)
    assert each > 0.003
    assert wasted == pytest.approx(2 * each)
    assert wasted_tail == pytest.approx(each)


def test_without_waste_and_clairvoyant_shares() -> None:
    forced = plain_rollout(LENGTHS)
    row: dict[str, Any] = {}
    add_bound(row, Bound(forced.wall_s / 4, forced.tail_s / 5), [[forced]])
    assert row["without_waste"] == pytest.approx(4.0)
    assert row["without_waste_tail"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("truth", "drafted", "hits"), [((1, 2, 3), [1, 2, 9], 2), ((), [1], 0), ((1,), [1, 2], 1), ((4,), [5], 0)]
)
def test_hits_are_the_leading_tokens(truth: tuple[int, ...], drafted: list[int], hits: int) -> None:
    assert count_hits(truth, np.array(drafted)) == hits


def test_clairvoyant_verifies_what_will_be_accepted() -> None:
    run = plain_rollout([9, 4])

    def drafts(rows: Any, at: Any) -> Any:
        """Two tokens are right, then one is wrong."""
        return np.array(
            [
                [run.ids[r][min(a + i, len(run.ids[r]) - 1)] if i < 2 else -1 for i in range(3)]
                for r, a in zip(rows, at, strict=True)
            ]
        )

    steps = clairvoyant_steps(drafts, run)
    # Of 9 tokens one comes from prefill; 3 + 3 + 2 follow, the last never drafted. Of 4: 3 in one step.
    assert [step[:2] for step in steps] == [(2, 6), (1, 3), (1, 2)]
    assert steps[0][2] == 2 * 4


def test_the_clairvoyant_tail_is_where_the_last_responses_run_alone() -> None:
    """Of eight responses the tail begins when seven have ended."""
    run, clock = plain_rollout([9, 4, 4, 4, 4, 4, 4, 4]), StepClock(np.array([1.0, 0.1, 0, 0, 0, 0, 0]))
    steps = [(8, 16, 64), (2, 4, 20), (1, 3, 12), (1, 2, 15)]
    assert tail_steps_s(run, clock, steps) == pytest.approx(1.3 + 1.2)
    assert tail_steps_s(plain_rollout([9]), clock, steps[2:]) == 0.0


def test_the_drafter_has_its_price() -> None:
    """Read off the steps in which it drafts: 2 ms and half a millisecond a token."""
    plain = plain_rollout(LENGTHS)
    drafted = [
        decode_step(2, 100, 0.03, drafts=n, gained=2, drafting_s=0.002 + 0.0005 * n) for n in (1, 4, 9, 16)
    ]
    price = DraftPrice.fit([replace(plain, steps=[*plain.steps, *drafted])])
    assert (price.step_s, price.token_s) == (pytest.approx(0.002), pytest.approx(0.0005))
    assert price.total_s([(2, 6, 100), (1, 1, 50), (1, 3, 50)]) == pytest.approx(2 * 0.002 + 6 * 0.0005)
    assert DraftPrice.fit([plain]).total_s([(2, 6, 100)]) == 0.0


def test_the_bound_takes_no_slow_decoding_for_prefill() -> None:
    run = plain_rollout(LENGTHS)
    prefill_s = sum(step.step_s for step in run.steps if not step.is_decode)
    clock, steps = fit_clock([run]), [step[:3] for step in run.steps if step.is_decode]
    slow = [step._replace(step_s=2 * step.step_s) if step.is_decode else step for step in run.steps]
    assert steps_s(run, clock, steps) == pytest.approx(sum(step.step_s for step in run.steps), rel=0.02)
    assert steps_s(replace(run, steps=slow), clock, steps) == steps_s(run, clock, steps) > prefill_s


# --- bars


def bars_of(case: str, pair: str = "countdown", **row: Any) -> dict[str, bool]:
    return {bar["bar"]: bar["met"] for bar in check_bars(pair, case, [{"system": "paceline", **row}])}


def test_bars_of_the_first_pair() -> None:
    assert bars_of("1x1", over_best_rival=1.31) == {"over the best rival": True}
    assert bars_of("2x4", over_best_rival=1.19) == {"over the best rival": False}
    assert bars_of("8x16", over_best_rival=1.05, share_of_clairvoyant=0.89, tail_ratio=2.6) == {
        "over the best rival": True,
        "share of the clairvoyant policy": False,
        "tail over plain, as many tokens": True,
    }


def test_the_second_pair_goes_a_third_of_the_way() -> None:
    # Rival 1.5, Paceline 1.8, clairvoyant 2.4: exactly a third.
    row = {"ratio": 1.8, "over_best_rival": 1.2, "share_of_clairvoyant": 0.75}
    (bar,) = check_bars("prose", "8x16", [{"system": "paceline", **row}])
    assert bar["reached"] == pytest.approx(1 / 3)
    assert bars_of("8x16", "prose", **{**row, "share_of_clairvoyant": 0.7}) == {bar["bar"]: False}


def test_a_bar_without_its_figures_is_left_out() -> None:
    assert check_bars("countdown", "8x16", [{"system": "plain"}]) == []


def test_no_batch_may_be_slower_than_plain() -> None:
    rows = [
        {"policy": "plain", "batch": 8, "ratio": 1.0},
        {"policy": "marginal", "batch": 8, "ratio": 1.3},
        {"policy": "fixed", "batch": 64, "ratio": 0.7},
        {"policy": "marginal", "batch": 64, "ratio": 0.99},
    ]
    assert [(row["batch"], row["met"]) for row in check_rows(rows)] == [(8, True), (64, False)]

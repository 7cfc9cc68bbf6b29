"""The draft ladder: its rungs, and the choices read off it."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError, EngineError
from paceline.planning.ladder import Ladder, LadderSettings, Rung, build_ladder, choose_first, rank_drafters
from paceline.planning.latency_profile import AffineLatency, LatencyModel
from paceline.planning.window import Mode

VERIFY = AffineLatency(0.030, 0.0001)
DRAFTERS: dict[str, LatencyModel] = {
    "ngram": AffineLatency(0.00001, 0.0),
    "0.5B": AffineLatency(0.002, 0.00001),
    "1.5B": AffineLatency(0.005, 0.00002),
}
SETTINGS = LadderSettings(batch=32, max_window=16)


def ladder() -> Ladder:
    return build_ladder(DRAFTERS, VERIFY, SETTINGS)


def test_a_rung_is_the_gain_over_plain_decoding() -> None:
    built = build_ladder({"0.5B": DRAFTERS["0.5B"]}, VERIFY, LadderSettings(batch=32, max_window=1), [0.75])
    plain_s, draft_s, verify_s = 0.0332, 0.00232, 0.0364
    assert built.speedup[0, 0] == pytest.approx(1.75 / (draft_s + verify_s) * plain_s)
    assert built.window[0, 0] == 1


def test_speed_rises_with_acceptance_and_falls_with_the_cost_of_drafting() -> None:
    built = ladder()
    assert built.speedup.shape == built.window.shape == (3, 101)
    assert (np.diff(built.speedup, axis=1) >= -1e-12).all()
    assert (np.diff(built.speedup, axis=0) <= 1e-12).all()
    assert built.speedup[:, 0] == pytest.approx([1.0, 1.0, 1.0])
    assert (built.window[:, 0] == 0).all()
    assert built.speedup[0, -1] > 5.0


def test_the_first_choice_weighs_acceptance_against_cost() -> None:
    assert choose_first(ladder(), {"ngram": 0.2, "0.5B": 0.8, "1.5B": 0.85}).drafter == "0.5B"
    assert choose_first(ladder(), {"ngram": 0.8, "0.5B": 0.8, "1.5B": 0.85}).drafter == "ngram"
    assert choose_first(ladder(), {"ngram": 0.2, "0.5B": 0.5, "1.5B": 0.95}).drafter == "1.5B"


def test_the_rank_is_by_speed_at_each_drafters_own_rate() -> None:
    rungs = rank_drafters(ladder(), {"ngram": 0.3, "0.5B": 0.7, "1.5B": 0.8})
    assert {rung.drafter for rung in rungs} == set(DRAFTERS)
    speedups = [rung.speedup for rung in rungs]
    assert speedups == sorted(speedups, reverse=True)
    built = ladder()
    at = list(DRAFTERS).index(rungs[0].drafter)
    point = {"ngram": 30, "0.5B": 70, "1.5B": 80}[rungs[0].drafter]
    assert rungs[0] == Rung(
        rungs[0].drafter, pytest.approx(built.speedup[at, point]), built.window[at, point]
    )


def test_between_points_the_speed_is_interpolated() -> None:
    built = build_ladder(DRAFTERS, VERIFY, SETTINGS, [0.5, 0.7])
    rate = dict.fromkeys(DRAFTERS, 0.55)
    rung = next(rung for rung in rank_drafters(built, rate) if rung.drafter == "ngram")
    assert rung.speedup == pytest.approx(0.75 * built.speedup[0, 0] + 0.25 * built.speedup[0, 1])
    assert rung.window == built.window[0, 0]


def test_equal_drafters_stand_in_the_ladders_order() -> None:
    twins = build_ladder({"b": DRAFTERS["0.5B"], "a": DRAFTERS["0.5B"]}, VERIFY, SETTINGS)
    assert [rung.drafter for rung in rank_drafters(twins, {"a": 0.5, "b": 0.5})] == ["b", "a"]


def test_a_decoupled_ladder_hides_the_time_of_drafting() -> None:
    settings = LadderSettings(batch=32, max_window=8, mode=Mode.DECOUPLED)
    decoupled = build_ladder(DRAFTERS, VERIFY, settings, [0.95])
    coupled = build_ladder(DRAFTERS, VERIFY, LadderSettings(batch=32, max_window=8), [0.95])
    assert decoupled.speedup[2, 0] > coupled.speedup[2, 0]


def test_incomplete_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'1\.5B'"):
        rank_drafters(ladder(), {"ngram": 0.3, "0.5B": 0.7})
    with pytest.raises(EngineError, match="not between 0 and 1"):
        choose_first(ladder(), dict.fromkeys(DRAFTERS, 1.5))
    with pytest.raises(ConfigError, match="0 drafters"):
        build_ladder({}, VERIFY, SETTINGS)
    with pytest.raises(ConfigError, match="at least 1"):
        build_ladder(DRAFTERS, VERIFY, LadderSettings(batch=0, max_window=8))

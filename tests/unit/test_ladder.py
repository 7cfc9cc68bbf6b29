"""The draft ladder: its rungs, the choices read off it, and what is remembered of acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, RecordError
from paceline.planning.ladder import choose_first, known_draftings, observe, rank_drafters, rate_of
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried, read_ladder, write_ladder

LADDER = Ladder(
    batch=8,
    rates=(0.3, 0.5, 0.9),
    drafters=(Rungs("tiny", (0.9, 1.1, 1.9)), Rungs("small", (0.8, 1.2, 3.0)), Rungs("big", (0.5, 0.7, 1.4))),
)


def test_between_and_beyond_the_measured_rates() -> None:
    at = rank_drafters(LADDER, dict.fromkeys(("tiny", "small", "big"), 0.7))
    assert [(rung.drafter, rung.speedup) for rung in at] == [
        ("small", pytest.approx(2.1)),
        ("tiny", pytest.approx(1.5)),
        ("big", pytest.approx(1.05)),
    ]
    ends = rank_drafters(LADDER, {"tiny": 0.0, "small": 1.0, "big": 0.3})
    assert {rung.drafter: rung.speedup for rung in ends} == {"tiny": 0.9, "small": 3.0, "big": 0.5}


def test_equal_drafters_stand_in_the_ladders_order() -> None:
    twins = Ladder(1, (0.5,), (Rungs("b", (1.0,)), Rungs("a", (1.0,))))
    assert [rung.drafter for rung in rank_drafters(twins, {"a": 0.5, "b": 0.5})] == ["b", "a"]


def test_a_drafter_without_a_rate_is_named() -> None:
    with pytest.raises(ConfigError, match="'small'"):
        rank_drafters(LADDER, {"tiny": 0.5})


def run_steps(rates: dict[str, float], num_steps: int, begin: str = "tiny") -> list[str]:
    """Which drafter each step begins with, where each is right so often."""
    tried: dict[str, Tried] = {}
    used = [begin]
    for _ in range(num_steps):
        tried = observe(tried, used[-1], round(1000 * rates[used[-1]]), 1000)
        used.append(choose_first(LADDER, tried).drafter)
    return used


def test_an_unknown_drafter_is_tried_while_it_could_be_the_best() -> None:
    used = run_steps({"tiny": 0.6, "small": 0.4, "big": 0.9}, 20)
    assert used[:3] == ["tiny", "small", "big"], "small could be 3.0, big 1.4 times as fast, and tiny is 1.3"
    assert run_steps({"tiny": 0.9, "small": 0.4, "big": 0.9}, 20)[2:] == ["tiny"] * 19, "big cannot be faster"
    assert set(run_steps({"tiny": 0.6, "small": 0.9, "big": 0.9}, 20)[1:]) == {"small"}


def test_what_is_not_used_is_tried_again_some_day_and_seldom() -> None:
    used = run_steps({"tiny": 0.6, "small": 0.4, "big": 0.1}, 300)
    trials = [step for step, name in enumerate(used) if name == "small"]
    assert 3 <= len(trials) <= 15
    assert used.count("tiny") > 270


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_rates_are_shares_and_recent_steps_count_most(steps: list[tuple[str, int, int]]) -> None:
    tried: dict[str, Tried] = {}
    for name, right, wrong in steps:
        tried = observe(tried, name, right, right + wrong)
        assert all(0.0 < rate_of(one) <= 1.0 for one in tried.values())
    assert rate_of(Tried()) == 1.0
    late = observe(observe({}, "a", 0, 100), "a", 100, 100)
    early = observe(observe({}, "a", 100, 100), "a", 0, 100)
    assert rate_of(late["a"]) > rate_of(early["a"])


def test_the_file_comes_back_and_another_version_is_refused(tmp_path: Path) -> None:
    file = LadderFile(ladder=LADDER, tried={"tiny": Tried(3.5, 7.0)})
    write_ladder(file, tmp_path / "ladder.json")
    assert read_ladder(tmp_path / "ladder.json") == file
    (tmp_path / "old.json").write_text('{"version": 0}')
    with pytest.raises(RecordError, match="version 0"):
        read_ladder(tmp_path / "old.json")


def test_what_a_helper_would_take_follows_its_batch() -> None:
    """Measured for 8 responses and for one: a draft token of the last straggler costs less than one of a batch."""
    rungs = (Rungs("a", (1.0,), 0.015, 0.001), Rungs("b", (1.0,), 0.015), Rungs("c", (1.0,)))
    tried = {name: Tried(3.0, 4.0) for name in "abc"}
    known = LadderFile(ladder=Ladder(8, (0.5,), rungs), tried=tried)
    measured, flat = known_draftings(known, ("b", "a", "c"))
    assert [measured.seconds(batch) for batch in (1, 8, 15)] == pytest.approx([0.001, 0.015, 0.029])
    assert [flat.seconds(batch) for batch in (1, 8)] == [0.015, 0.015], "a ladder of before"
    assert [(one.drafter, one.acceptance) for one in (measured, flat)] == [(1, 0.75), (0, 0.75)]
    assert known_draftings(LadderFile(ladder=None), ("a",)) == ()
    lone = Ladder(1, (0.5,), (Rungs("a", (1.0,), 0.002, 0.002),))
    assert known_draftings(LadderFile(ladder=lone, tried=tried), ("a",))[0].seconds(1) == 0.002

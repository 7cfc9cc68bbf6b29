"""Where simulated and measured times agree because two errors cancel, the row says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rollouts import Timed
from simulated_live import Observer, compare, tokens_per_round
from steps import Step

from paceline.types import DraftGrowth


def test_drafting_is_no_part_of_the_steps_that_are_fitted() -> None:
    heard: list[Any] = []
    loop = SimpleNamespace(receive=heard.append)
    observer = Observer(loop)
    drafts = SimpleNamespace(growth=DraftGrowth(num_levels=4, num_rows=8), total_s=0.25)
    loop.receive(drafts)
    steps = [Step(2, 10, 300, 7, True, 0.25, 1.0), Step(2, 90, 0, 2, False, 0.0, 3.0)]
    observer.note([Timed([1.0], steps, [(1,)], [1], [(5,)], [1], 0.0)])
    assert observer.steps == [(10, 300, 0.75)]
    assert observer.drafting == [(2.0, 0.0625)]
    assert heard == [drafts]


def test_the_measured_acceptance_length_counts_each_request_s_steps() -> None:
    runs = [
        Timed([1.0, 2.0], [], [(1,), (1,)], [1, 2], ids, steps, 0.0)
        for ids, steps in (([(5,) * 6, (5,) * 4], [2, 3]), ([(5,) * 9, (5,)], [4, 1]))
    ]
    assert tokens_per_round(runs) == 20 / 10


def test_the_time_s_error_is_that_of_the_rounds_and_of_each_round() -> None:
    row = compare(58.0, 57.0, 5.3, 3.9)
    assert (1 + row["rounds_error"]) * (1 + row["round_error"]) == pytest.approx(1 + row["error"])
    assert row["rounds_error"] == pytest.approx(5.3 / 3.9 - 1)
    assert row["round_error"] < 0


@pytest.mark.parametrize(
    ("simulated_s", "simulated_length", "cancels"),
    [(57.0, 3.9, True), (57.0, 5.3, False), (80.0, 5.0, False), (45.0, 5.5, False)],
)
def test_errors_cancel_if_the_time_is_nearer_than_both(
    simulated_s: float, simulated_length: float, cancels: bool
) -> None:
    assert compare(58.0, simulated_s, 5.3, simulated_length)["cancels"] is cancels

"""The demo over several seeds: what is read from each run, mean and standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from recorded_run import SimulatedRun

from paceline.record import Comparison, Evaluation
from paceline.record.reader import RecordReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from demo import average, read_run


def test_a_run_s_row_is_what_its_record_tells(tmp_path: Path) -> None:
    folder = SimulatedRun(num_steps=6, num_responses=8, group_size=4).build(tmp_path)
    with RecordReader(folder) as record:
        events = list(record)
    evaluations = [event for event in events if isinstance(event, Evaluation)]
    compared = [event for event in events if isinstance(event, Comparison)]
    row = read_run(3, folder)
    assert row["case"] == "seed 3"
    assert (row["before"], row["after"]) == (evaluations[0].solve_rate, evaluations[-1].solve_rate)
    assert row["gain"] == row["after"] - row["before"]
    ratios = sorted(one.plain_s / one.accelerated_s for one in compared)
    assert ratios[0] <= row["speedup"] <= ratios[-1]
    assert row["tokens"] == sum(one.tokens for one in compared) > 0


def run(gain: float) -> dict[str, Any]:
    numbers = {"before": 0.6, "after": 0.6 + gain, "gain": gain, "speedup": 1.2, "problems": 256}
    return {"case": "seed", **numbers, "tokens": 100, "diverged_tokens": 0}


def test_the_mean_has_a_standard_error_from_two_seeds_on() -> None:
    row = average([run(0.05), run(0.07), run(0.09)])
    assert row["gain"] == pytest.approx(0.07)
    assert row["gain_error"] == pytest.approx(0.02 / 3**0.5)
    assert (row["tokens"], row["case"]) == (300, "mean")
    assert average([run(0.05)])["gain_error"] is None

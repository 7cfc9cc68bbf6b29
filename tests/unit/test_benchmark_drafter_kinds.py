"""What a row of the benchmark of drafter kinds says of the rollouts behind it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import drafter_kinds

from paceline.types import DraftGrowth


def run(wall_s: float, ids: list[int], num_steps: int, rows: int = 0, seconds: float = 0.0) -> Any:
    timed = SimpleNamespace(wall_s=wall_s, num_tokens=len(ids), ids=[tuple(ids)], num_steps=[num_steps])
    return timed, DraftGrowth(1, rows, seconds)


def test_ratios_are_of_a_repetitions_rollouts_together() -> None:
    ids = list(range(100))
    runs = {
        "plain": [[run(8.0, ids, 100), run(2.0, ids, 100)], [run(10.0, ids, 100), run(2.0, ids, 100)]],
        "suffix": [[run(4.0, ids, 80), run(1.0, ids, 80)], [run(5.0, ids, 80), run(1.0, ids, 80)]],
        "eagle": [[run(3.0, ids, 50, 60, 0.3), run(1.0, ids, 50, 40, 0.1)]] * 2,
    }
    row = drafter_kinds.row_of(1, "eagle", runs)
    assert (row["over_plain"], row["over_suffix"], row["over_suffix_range"]) == (2.75, 1.375, [1.25, 1.5])
    assert (row["acceptance_length"], row["tokens_per_s"], row["equal"]) == (2.0, 50.0, True)
    assert row["ms_per_token"] == pytest.approx(4.0)
    assert row["share"] == pytest.approx(0.1)
    assert drafter_kinds.row_of(1, "suffix", runs)["ms_per_token"] is None


def test_other_tokens_are_seen() -> None:
    runs = {"plain": [[run(1.0, [1, 2], 2)]], "suffix": [[run(1.0, [1, 3], 2)]]}
    assert not drafter_kinds.row_of(1, "suffix", runs)["equal"]


def test_parameters_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, tmp_path / "head/model.safetensors")
    assert drafter_kinds.count_parameters({"suffix": "", "head": str(tmp_path / "head")}) == {"head": 17}

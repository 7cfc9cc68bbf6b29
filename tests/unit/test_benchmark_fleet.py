"""The variants of the fleet's benchmark take turns, and each ratio is to the variant that it is named after."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fleet


def run(wall_s: float) -> fleet.Run:
    return fleet.Run(wall_s, wall_s / 2, wall_s / 4, [(1, 2, 3)], 1.0, 0)


def test_the_oracle_takes_turns_but_is_never_the_first() -> None:
    cases = list(fleet.VARIANTS)
    orders = [fleet.order_of(cases, repetition) for repetition in range(len(cases))]
    assert all(sorted(order) == sorted(cases) for order in orders)
    assert [order.index("oracle") for order in orders] == [5, 4, 3, 2, 1, 1]
    assert {order[0] for order in orders} == set(cases) - {"oracle"}
    assert fleet.order_of(["oracle"], 1) == ["oracle"]


def test_ratios_are_to_group_and_to_the_oracle_wherever_they_stand() -> None:
    row = fleet.row_of("even", {"even": [run(2.0)], "oracle": [run(1.0)], "group": [run(4.0)]}, "group")
    assert (row["ratio"], row["over_oracle"], row["mean_ratio"], row["tail_ratio"]) == (2.0, 0.5, 0.5, 0.5)
    assert row["equal"]


@pytest.mark.parametrize("name", ["ratio", "ratio_range", "over_oracle", "mean_ratio", "tail_ratio"])
def test_there_is_no_ratio_to_a_variant_that_was_not_run(name: str) -> None:
    assert fleet.row_of("even", {"even": [run(2.0)], "context": [run(4.0)]}, "group")[name] is None

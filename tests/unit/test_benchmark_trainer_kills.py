"""The rows of killed trainers, and the bars that they have to meet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import trainer_kills


def kill(leads: bool, lost_s: float, broken: bool = False, fallen: bool = False) -> dict[str, object]:
    return {"leads": leads, "lost_s": lost_s, "broken": broken, "fallen": fallen}


def test_only_leaders_lose_anything() -> None:
    row = trainer_kills.summarise("at any moment", [kill(True, 1.0), kill(False, 0.0), kill(True, 3.0)], 500)
    assert (row["kills"], row["leaders"], row["lost_s_median"], row["lost_s_most"]) == (3, 2, 3.0, 3.0)


@pytest.mark.parametrize(
    ("moments", "writes", "met"),
    [
        ([kill(True, 2.0)] * 40, [kill(True, 2.0)] * 10, [True, True, True, True]),
        ([kill(True, 2.0)] * 41, [kill(True, 2.0)] * 9, [True, False, True, True]),
        ([kill(True, 2.0)] * 39, [kill(True, 2.0)] * 10, [False, True, True, True]),
        ([kill(True, 2.0, broken=True)] * 40, [kill(True, 2.0)] * 10, [True, True, False, True]),
        ([kill(True, 2.0)] * 40, [kill(True, 11.0, fallen=True)] * 10, [True, True, False, False]),
    ],
)
def test_each_bar_can_be_missed(
    moments: list[dict[str, object]], writes: list[dict[str, object]], met: list[bool]
) -> None:
    rows = [trainer_kills.summarise(what, kills, 1) for what, kills in (("a", moments), ("b", writes))]
    assert [bar["met"] for bar in trainer_kills.check_rows(rows)] == met

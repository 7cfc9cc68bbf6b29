"""The rivals' tables are valid settings, and the fastest on other prompts is the one that is measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import BudgetSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import budget


@pytest.mark.parametrize("policy", budget.CANDIDATES)
def test_every_candidate_is_a_setting_of_its_own(policy: str) -> None:
    made = [BudgetSettings(policy=policy, **table) for table in budget.CANDIDATES[policy]]
    assert len({one.model_dump_json() for one in made}) == len(made)
    assert len(made) > 1 or policy in ("off", "marginal")


class Timed(budget.Policies):
    """Candidates take what `seconds` says."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.tried: list[int] = []

    def run(self, policy: str, table: dict[str, Any], requests: list[Any]) -> dict[str, Any]:
        self.tried.append(table["fixed_tokens"])
        return {"tokens_per_s": 10 / self.seconds[table["fixed_tokens"]], "ids": [(1,) * 10]}


def test_the_fastest_candidate_is_taken() -> None:
    timed = Timed({2: 4.0, 3: 3.0, 5: 2.0, 8: 1.0, 12: 2.0, 16: 5.0})
    assert timed.tune("fixed", []) == {"fixed_tokens": 8}
    assert timed.tried == [2, 3, 5, 8, 12, 16, 16, 12, 8, 5, 3, 2]
    assert timed.tune("marginal", []) == {}


def test_a_row_says_its_table_and_compares_tokens_with_suffix_drafts() -> None:
    def result(rate: float, *ids: tuple[int, ...]) -> dict[str, Any]:
        return {"tokens_per_s": rate, "acceptance_length": 2.0, "ids": list(ids)}

    found = {
        "plain": [result(10, (9,)), result(20, (9,))],
        budget.SUFFIX: [result(15, (1,)), result(15, (2,))],
        "fixed": [result(30, (1,)), result(20, (2,))],
        "bandit": [result(30, (1,)), result(20, (3,))],
    }
    fixed = budget.summarise("fixed", 4, {"fixed_tokens": 8}, found)
    assert (fixed["ratio"], fixed["equal"], fixed["table"]) == (2.0, True, "fixed_tokens=8")
    assert not budget.summarise("bandit", 4, {}, found)["equal"]
    assert "equal" not in budget.summarise("plain", 4, None, found)

"""What preparing corrections is worth, in simulated time (tests/builders/branch_race.py)."""

from __future__ import annotations

import pytest
from branch_race import BranchRace

CASES = {
    "sure": (0.8, 0.8, 1.0),
    "half": (0.7, 0.7, 1.0),
    "mixed": (0.45, 0.97, 0.65),
    "forks": (0.4, 0.95, 0.5),
}
"""Acceptance of unlikely and likely tokens, and the share of these."""


def speed_up(case: str, draft_s: float) -> tuple[float, int]:
    """Tokens per second with branches over those without, and corrections that were there."""
    speed, hits = [], 0
    for has_branches in (False, True):
        races = [BranchRace(*CASES[case], 0.7, draft_s, has_branches, seed=seed) for seed in range(2)]
        speed.append(sum(race.run(400) for race in races))
        hits = sum(race.num_hits for race in races)
    return speed[1] / speed[0], hits


@pytest.mark.parametrize("draft_s", [0.1, 0.2])
@pytest.mark.parametrize("case", list(CASES))
def test_nowhere_slower_than_the_chain_and_faster_where_the_drafter_knows_its_forks(
    case: str, draft_s: float
) -> None:
    ratio, hits = speed_up(case, draft_s)
    assert ratio > 0.95
    if case in {"mixed", "forks"}:
        assert ratio > 1.02
        assert hits > 100

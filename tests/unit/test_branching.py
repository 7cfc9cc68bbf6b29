"""Which branches of a model's drafts are drafted, against all of them tried one by one."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.planning.branching import Branches, choose_branches
from paceline.types import Float32Array

FREE = np.zeros(1, np.float32)
NEVER = np.full(1, np.inf, np.float32)


def chains(seed: int, num_requests: int = 5, depth: int = 6) -> tuple[Float32Array, np.ndarray, Float32Array]:
    """(acceptance, lengths, what runners-up are worth)"""
    random = np.random.default_rng(seed)
    acceptance = random.uniform(0.2, 1.0, (num_requests, depth)).astype(np.float32)
    rivals = ((1.0 - acceptance) * random.uniform(0.0, 1.0, acceptance.shape)).astype(np.float32)
    return acceptance, random.integers(0, depth + 1, num_requests).astype(np.int32), rivals


def by_trial(acceptance: Float32Array, rivals: Float32Array, level: int, floor: float) -> tuple[float, int]:
    """(accepted tokens beyond the price, tokens) of one branch, whose tokens are all worth their places."""
    chance = float(np.prod(acceptance[:level], dtype=np.float64)) * float(rivals[level])
    gain, length = -floor * (level + 1), 0
    for factor in [1.0, *acceptance[level + 1 :].tolist()]:
        chance *= factor
        if chance < floor:
            break
        gain, length = gain + chance - floor, length + 1
    return gain, length


def flat(rounds: list[Branches]) -> list[tuple[int, int, int]]:
    """(request, level, length) in the order in which they are drafted."""
    return [
        row
        for branches in rounds
        for row in zip(
            branches.requests.tolist(), branches.levels.tolist(), branches.lengths.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("most", [1, 3])
def test_the_best_of_each_request_that_are_worth_their_places(floor: float, most: int) -> None:
    for seed in range(20):
        acceptance, lengths, rivals = chains(seed)
        expected = set()
        for request, length in enumerate(lengths.tolist()):
            tried = [
                (*by_trial(acceptance[request, :length], rivals[request], level, floor), level)
                for level in range(length)
            ]
            best = sorted(tried, key=lambda found: -found[0])[:most]
            expected |= {(request, level, tokens) for gain, tokens, level in best if gain > 0.0}
        found = flat(choose_branches(acceptance, lengths, rivals, most, floor, FREE))
        assert set(found) == expected
        assert len(found) == len(expected)
        for request in range(len(lengths)):
            levels = [level for owner, level, _ in found if owner == request]
            assert levels == sorted(levels, reverse=True), "what a branch leaves of the chain serves the next"


def test_no_branch_where_a_place_costs_more_than_it_brings() -> None:
    acceptance, lengths, rivals = chains(1)
    assert choose_branches(acceptance, lengths, rivals, 3, 0.9, FREE) == []
    assert choose_branches(acceptance, lengths, rivals, 0, 0.0, FREE) == []
    assert choose_branches(acceptance, 0 * lengths, rivals, 3, 0.0, FREE) == []
    assert choose_branches(acceptance, lengths, 0 * rivals, 3, 0.0, FREE) == []
    assert (
        choose_branches(np.empty((0, 4), np.float32), lengths[:0], np.empty((0, 4), np.float32), 3, 0.0, FREE)
        == []
    )


def test_where_drafting_does_not_pay_branches_are_the_runners_up_alone() -> None:
    acceptance, lengths, rivals = chains(2)
    found = flat(choose_branches(acceptance, lengths, rivals, 1, 0.0, NEVER))
    assert len(found) == (lengths > 0).sum()
    assert {length for _, _, length in found} == {1}
    acceptance = np.full((2, 4), 0.9, np.float32)
    rivals = np.full((2, 4), 0.05, np.float32)
    costs = np.array(
        [0.0, 0.04, 0.08], np.float32
    )  # a level for both pays while it brings 0.08: 0.09, 0.081, 0.073
    full = np.full(2, 4, np.int32)
    assert flat(choose_branches(acceptance, full, rivals, 1, 0.0, costs)) == [(0, 0, 3), (1, 0, 3)]


def test_a_branch_that_is_cut_short_has_to_be_worth_its_places_still() -> None:
    """With three tokens of 0.3 each it would be; the runner-up alone is not worth two places of 0.16."""
    acceptance, rivals = np.ones((1, 3), np.float32), np.full((1, 3), 0.3, np.float32)
    length = np.array([3], np.int32)
    assert flat(choose_branches(acceptance, length, rivals, 1, 0.16, FREE)) == [(0, 0, 3)]
    assert choose_branches(acceptance, length, rivals, 1, 0.16, NEVER) == []

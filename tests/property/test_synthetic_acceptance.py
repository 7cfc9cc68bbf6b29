"""A played drafter has exactly the acceptance rate that was asked for, whatever was accepted before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.synthetic import Play, play
from paceline.noise import uniform
from paceline.types import DraftQuery

KNOWN = {key: np.random.default_rng(key).integers(0, 9, 4000).astype(np.int32) for key in (3, 2**64 - 1)}


def query(keys: list[int], positions: list[int]) -> DraftQuery:
    count = len(keys)
    return DraftQuery(
        np.zeros(count, np.int64),
        np.arange(count),
        np.array(keys, np.uint64),
        np.array(positions, np.int64),
        np.ones(count, np.float32),
        np.full(count, 8, np.int32),
    )


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.8, 0.95, 1.0]), st.integers(0, 2**32), st.integers(1, 8))
def test_the_rate_played_is_the_rate_asked_for(rate: float, seed: int, width: int) -> None:
    keys = list(KNOWN)
    wanted = Play(KNOWN, rate, seed)
    told, right, behind_right = 0, 0, [0, 0]
    for position in range(0, 4000 - width, width):
        made = play(np.full((2, width), -5, np.int32), query(keys, [position, position]), wanted)
        truth = np.stack([KNOWN[key][position : position + width] for key in keys])
        same = made == truth
        told, right = told + same.size, right + int(same.sum())
        behind_right[0] += int(same[:, :-1].sum())
        behind_right[1] += int((same[:, 1:] & same[:, :-1]).sum())
        assert (made[~same] >= 0).all()
    error = 4.5 * np.sqrt(max(rate * (1 - rate), 1e-12) / told)
    assert right / told == pytest.approx(rate, abs=error + 1e-12)
    if behind_right[0] > 100:
        error = 4.5 * np.sqrt(max(rate * (1 - rate), 1e-12) / behind_right[0])
        assert behind_right[1] / behind_right[0] == pytest.approx(rate, abs=error + 1e-12)


@given(st.integers(0, 3990), st.integers(0, 9), st.floats(0.0, 1.0))
def test_what_is_drafted_again_is_the_same_again(position: int, later: int, rate: float) -> None:
    wanted = Play(KNOWN, rate)
    first = play(np.zeros((1, 10), np.int32), query([3], [position]), wanted)[0]
    again = play(np.zeros((1, 10), np.int32), query([3], [position + later]), wanted)[0]
    known = min(4000 - position, 10)
    assert first[later:known].tolist() == again[: max(known - later, 0)].tolist()


def test_a_higher_rate_is_right_wherever_a_lower_one_is() -> None:
    low, high = (
        play(np.zeros((1, 4000), np.int32), query([3], [0]), Play(KNOWN, rate))[0] == KNOWN[3]
        for rate in (0.4, 0.7)
    )
    assert (high | ~low).all()


def test_unknown_responses_and_what_follows_a_known_one_stay_the_drafters() -> None:
    for rate in (0.0, 1.0):
        made = play(np.full((2, 6), 7, np.int32), query([5, 3], [10, 3996]), Play(KNOWN, rate))
        assert made[0].tolist() == [7] * 6
        assert made[1, 4:].tolist() == [7, 7]
        assert ((made[1, :4] == KNOWN[3][3996:]) == bool(rate)).all()


def test_seeds_keys_and_positions_draw_alike_nowhere() -> None:
    keys, positions = np.arange(200, dtype=np.uint64)[:, None], np.arange(200)
    drawn = np.stack([uniform(seed, keys, positions) for seed in range(3)])
    assert len(np.unique(drawn)) == drawn.size
    assert abs(drawn.mean() - 0.5) < 4 / np.sqrt(12 * drawn.size)
    assert ((drawn >= 0.0) & (drawn < 1.0)).all()

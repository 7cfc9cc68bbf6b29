"""What a draft worker drafts next."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.draft_ahead import choose_depth, choose_leaves, most_ahead, window_room
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time


def level_time(base_s: float, row_s: float) -> StepTimeModel:
    model = StepTimeModel.initial()
    for rows in (1, 2, 4, 8):
        for _ in range(2):
            model = update_measured_time(model, rows, base_s + row_s * rows)
    return model


def test_after_a_window_there_is_room_for_another() -> None:
    assert most_ahead([3, 3, 0], [False, True, True]).tolist() == [6, 3, 0]
    assert [window_room(6, ahead) for ahead in (0, 3, 5, 6, 9)] == [6, 3, 1, 0, 0]


@given(
    st.lists(st.tuples(st.floats(0.05, 1.0), st.integers(1, 50), st.booleans()), max_size=6),
    st.floats(0.0, 2.0),
    st.floats(-0.001, 0.02),
)
def test_the_leaves_with_the_best_rate_are_chosen_and_branches_only_in_time(
    leaves: list[tuple[float, int, bool]], row_cost: float, left_s: float
) -> None:
    """Against all subsets whose level ends before the verifier's step, and all without a branch."""
    model = level_time(0.001, 0.001 * row_cost)
    path, is_branch = np.array([p for p, _, _ in leaves]), np.array([b for _, _, b in leaves], np.bool_)
    rest = np.array([rest for _, rest, _ in leaves], np.int64)
    chosen = tuple(choose_leaves(path, rest, is_branch, model, left_s).tolist())

    def rate(rows: tuple[int, ...]) -> float:
        return float(path[list(rows)].sum() / predict_s(model, len(rows)))

    def is_allowed(rows: tuple[int, ...]) -> bool:
        return not is_branch[list(rows)].any() or predict_s(model, len(rows)) <= left_s

    subsets = (s for n in range(1, len(leaves) + 1) for s in itertools.combinations(range(len(leaves)), n))
    allowed = [subset for subset in subsets if is_allowed(subset)]
    assert len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(allowed)
    if chosen:
        assert is_allowed(chosen)
        assert rate(chosen) == pytest.approx(max(map(rate, allowed)))


def test_the_longer_rest_goes_first_among_equals() -> None:
    path, rest, model = np.array([0.5, 1.0, 1.0]), np.array([90, 5, 50]), level_time(0.001, 0.0)
    chosen = choose_leaves(path, rest, np.zeros(3, np.bool_), model, 0.0)
    assert chosen.tolist() == [2, 1, 0]


@pytest.mark.parametrize(("level_s", "depth"), [(0.0001, 20), (0.0009, 3), (0.004, 1)])
def test_a_call_takes_about_as_long_as_it_should(level_s: float, depth: int) -> None:
    assert choose_depth(1, level_time(level_s, 0.0)) == depth


def test_a_call_with_branches_ends_before_the_verifiers_step() -> None:
    model = level_time(0.0003, 0.0)
    assert [choose_depth(2, model, left_s) for left_s in (0.1, 0.00125, 0.0004)] == [7, 4, 1]

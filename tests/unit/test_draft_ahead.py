"""What a draft worker drafts next."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.draft_ahead import choose_depth, choose_responses, most_ahead, window_room
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


@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.integers(1, 50)), max_size=6), st.floats(0.0, 2.0))
def test_the_responses_with_the_best_rate_are_chosen(pairs: list[tuple[float, int]], row_cost: float) -> None:
    model = level_time(0.001, 0.001 * row_cost)
    path = np.array([p for p, _ in pairs])
    chosen = choose_responses(path, np.array([rest for _, rest in pairs]), model)

    def rate(rows: tuple[int, ...]) -> float:
        return float(path[list(rows)].sum() / predict_s(model, len(rows)))

    subsets = [s for n in range(1, len(pairs) + 1) for s in itertools.combinations(range(len(pairs)), n)]
    assert len(set(chosen.tolist())) == len(chosen)
    if pairs:
        assert rate(tuple(chosen.tolist())) == pytest.approx(max(map(rate, subsets)))


def test_the_longer_rest_goes_first_among_equals() -> None:
    chosen = choose_responses(np.array([0.5, 1.0, 1.0]), np.array([90, 5, 50]), level_time(0.001, 0.0))
    assert chosen.tolist() == [2, 1, 0]


@pytest.mark.parametrize(("level_s", "depth"), [(0.0001, 20), (0.0009, 3), (0.004, 1)])
def test_a_call_takes_about_as_long_as_it_should(level_s: float, depth: int) -> None:
    assert choose_depth(1, level_time(level_s, 0.0)) == depth

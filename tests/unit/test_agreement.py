"""Two candidates become one draft."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.agreement import EDGES, LEVELS, NUM_CELLS, merge, prior_calibration
from paceline.types import DraftBatch

PRIOR = prior_calibration()


def draft(tokens: list[list[int]], acceptance: float, width: int = 4) -> DraftBatch:
    table = np.zeros((len(tokens), width), dtype=np.int32)
    for row, values in enumerate(tokens):
        table[row, : len(values)] = values
    return DraftBatch(
        table,
        np.array([len(values) for values in tokens], dtype=np.int32),
        np.full(table.shape, acceptance, dtype=np.float32),
        np.full(table.shape, int(100 * acceptance), dtype=np.int32),
        np.zeros((len(tokens), 1), dtype=np.int32),
    )


def test_agreed_tokens_are_surer_than_either_estimate() -> None:
    made = merge(draft([[5, 6, 7]], 0.8), draft([[5, 6, 9]], 0.8), PRIOR)
    assert made.agreed.tolist() == [2]
    assert (made.batch.acceptance[0, :2] > 0.9).all()
    assert made.batch.acceptance[0, 2] == np.float32(0.8)


def test_the_more_promising_drafter_goes_on_alone() -> None:
    longer = merge(draft([[5, 6]], 0.8), draft([[5, 6, 9, 4]], 0.8), PRIOR)
    assert longer.from_model.tolist() == [True]
    assert longer.batch.tokens[0].tolist() == [5, 6, 9, 4]
    surer = merge(draft([[5, 6, 7]], 0.9), draft([[5, 6, 9]], 0.6), PRIOR)
    assert surer.from_model.tolist() == [False]
    assert surer.batch.tokens[0, :3].tolist() == [5, 6, 7]
    tied = merge(draft([[5, 6, 7]], 0.8), draft([[5, 6, 7]], 0.8), PRIOR)
    assert tied.from_model.tolist() == [False]


def test_candidates_of_different_width_fit() -> None:
    made = merge(draft([[1, 2]], 0.5, width=2), draft([[1, 2, 3, 4, 5, 6]], 0.9, width=6), PRIOR)
    assert made.batch.num_tokens.tolist() == [6]
    assert made.both_cells.shape == made.batch.tokens.shape == (1, 6)


def test_nothing_from_either_is_nothing() -> None:
    made = merge(draft([[], [3]], 0.5), draft([[], []], 0.9), PRIOR)
    assert made.batch.num_tokens.tolist() == [0, 1]
    assert made.agreed.tolist() == [0, 0]


def test_the_prior_grows_with_both_estimates() -> None:
    table = PRIOR.reshape(LEVELS, LEVELS)
    assert PRIOR.shape == (NUM_CELLS,)
    assert (np.diff(table, axis=0) > 0).all()
    assert (np.diff(table, axis=1) > 0).all()
    assert np.all((PRIOR > 0) & (PRIOR < 1))
    assert len(EDGES) + 1 == LEVELS


tokens = st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=3, max_size=3)


@given(tokens, tokens, st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_a_merged_draft_is_one_of_the_candidates(
    one: list[list[int]], other: list[list[int]], p: float, q: float
) -> None:
    made = merge(draft(one, p), draft(other, q), PRIOR)
    for row in range(3):
        source = other[row] if made.from_model[row] else one[row]
        assert made.batch.tokens[row, : made.batch.num_tokens[row]].tolist() == source
        same = 0
        while same < min(len(one[row]), len(other[row])) and one[row][same] == other[row][same]:
            same += 1
        assert made.agreed[row] == same

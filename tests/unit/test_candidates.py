"""Two candidates become one draft."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.candidates import choose
from paceline.types import DraftBatch


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


def test_the_more_promising_draft_is_taken() -> None:
    longer = choose(draft([[5, 6]], 0.8), draft([[5, 6, 9, 4]], 0.8))
    assert longer.from_model.tolist() == [True]
    assert longer.batch.tokens[0].tolist() == [5, 6, 9, 4]
    surer = choose(draft([[5, 6, 7]], 0.9), draft([[5, 6, 9]], 0.6))
    assert surer.from_model.tolist() == [False]
    assert surer.batch.tokens[0, :3].tolist() == [5, 6, 7]
    tied = choose(draft([[5, 6, 7]], 0.8), draft([[5, 6, 7]], 0.8))
    assert tied.from_model.tolist() == [False]


def test_candidates_of_different_width_fit() -> None:
    made = choose(draft([[1, 2]], 0.5, width=2), draft([[1, 2, 3, 4, 5, 6]], 0.9, width=6))
    assert made.batch.num_tokens.tolist() == [6]
    assert made.batch.cells.shape == made.batch.tokens.shape == (1, 6)


def test_nothing_from_either_is_nothing() -> None:
    made = choose(draft([[], [3]], 0.5), draft([[], []], 0.9))
    assert made.batch.num_tokens.tolist() == [0, 1]


tokens = st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=3, max_size=3)


@given(tokens, tokens, st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_each_draft_is_the_candidate_with_more_expected_tokens(
    one: list[list[int]], other: list[list[int]], p: float, q: float
) -> None:
    free, model = draft(one, p), draft(other, q)
    made = choose(free, model)
    for row in range(3):
        source = (other, q) if made.from_model[row] else (one, p)
        length = made.batch.num_tokens[row]
        assert made.batch.tokens[row, :length].tolist() == source[0][row]
        assert (made.batch.cells[row, :length] == int(100 * source[1])).all()
    promised = made.batch.path_probability.sum(axis=1)
    best = np.maximum(free.path_probability.sum(axis=1), model.path_probability.sum(axis=1))
    assert promised.tolist() == best.tolist()

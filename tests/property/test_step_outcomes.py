"""What a step's tokens say about its drafts, counted natively: the same as numpy says, word for word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline import _step
from paceline.errors import EngineError
from paceline.planning.acceptance import count_outcomes, judge, pool_outcomes

TOKENS = st.integers(0, 3)
NUM_CELLS = 4


def tables(rows: int, columns: int, values: st.SearchStrategy[Any], dtype: Any = np.int32) -> Any:
    return arrays.arrays(dtype, (rows, columns), elements=values)


def rows_of(count: int, most: int) -> Any:
    return arrays.arrays(np.int32, count, elements=st.integers(0, most))


@given(lists=st.lists(st.lists(TOKENS, max_size=5), max_size=6), data=st.data())
def test_lists_become_tables_and_rows(lists: list[list[int]], data: st.DataObject) -> None:
    table = _step.table_of(lists)
    assert (table.dtype, table.shape) == (np.int32, (len(lists), max([1, *map(len, lists)])))
    assert [row[row >= 0].tolist() for row in table] == lists
    assert all((row[len(tokens) :] == -1).all() for row, tokens in zip(table, lists, strict=True))
    counts = np.array(data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists))), np.bool_)
    offsets, tokens = _step.joined(lists, counts)
    kept = [one for one, counted in zip(lists, counts, strict=True) if counted]
    assert (offsets.dtype, tokens.dtype) == (np.int32, np.int32)
    assert np.diff(offsets).tolist() == list(map(len, kept))
    assert tokens.tolist() == [token for one in kept for token in one]


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(1, 6), most=st.integers(1, 6))
def test_drafts_match_up_to_the_first_other_token(
    data: st.DataObject, rows: int, width: int, most: int
) -> None:
    drafts = data.draw(tables(rows, width, TOKENS))
    decided = data.draw(tables(rows, most, st.integers(-1, 3)))
    lengths = data.draw(rows_of(rows, width))
    common = min(width, most)
    same = (drafts[:, :common] == decided[:, :common]) & (np.arange(common) < lengths[:, None])
    expected = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    assert _step.leading_matches(drafts, lengths, decided).tolist() == expected.tolist()
    strided = np.repeat(drafts, 2, axis=1)[:, ::2]
    assert _step.leading_matches(strided, lengths, decided).tolist() == expected.tolist()


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(1, 6))
def test_outcomes_are_those_that_are_told(data: st.DataObject, rows: int, width: int) -> None:
    cells = data.draw(tables(rows, width, st.integers(0, NUM_CELLS - 1)))
    seen = data.draw(rows_of(rows, width))
    right = np.minimum(data.draw(rows_of(rows, width)), seen)
    told, is_right = judge(width, seen, right)
    expected = pool_outcomes(cells[told], is_right[told], NUM_CELLS)
    made = count_outcomes(cells, seen, right, NUM_CELLS)
    assert made.accepted.tolist() == expected.accepted.tolist()
    assert made.verified.tolist() == expected.verified.tolist()
    both = made.and_also(expected)
    assert both.verified.sum() == 2 * told.sum()


@given(data=st.data(), rows=st.integers(0, 6), columns=st.integers(1, 5))
def test_wins_are_counted_where_the_target_is_known(data: st.DataObject, rows: int, columns: int) -> None:
    proposals = data.draw(tables(rows, columns, st.integers(-1, 3)))
    targets = data.draw(arrays.arrays(np.int32, rows, elements=st.integers(-1, 3)))
    hits = ((proposals == targets[:, None]) & (targets[:, None] >= 0)).astype(np.float64)
    wins, num_known = _step.count_wins(proposals, targets)
    assert wins.tolist() == (hits.T @ (1.0 - hits)).tolist()
    assert num_known == np.count_nonzero(targets >= 0)


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(1, 6))
def test_path_probabilities_are_products(data: st.DataObject, rows: int, width: int) -> None:
    acceptance = data.draw(tables(rows, width, st.floats(0, 1, width=32), np.float32))
    num_tokens = data.draw(rows_of(rows, width + 2))
    inside = np.arange(width) < num_tokens[:, None]
    expected = np.cumprod(np.where(inside, acceptance, 0.0), axis=1, dtype=np.float32)
    assert _step.path_probability(num_tokens, acceptance).tolist() == expected.tolist()


def test_what_does_not_fit_is_refused() -> None:
    two, three = np.zeros(2, np.int32), np.zeros((3, 4), np.int32)
    with pytest.raises(ValueError, match="as many lengths"):
        _step.leading_matches(three, two, three)
    with pytest.raises(ValueError, match="one flag per list"):
        _step.joined([[1]], np.zeros(2, np.bool_))
    with pytest.raises(ValueError, match="one token of the target"):
        _step.count_wins(three, two)
    with pytest.raises(ValueError, match="one number of tokens"):
        _step.path_probability(two, three.astype(np.float32))
    with pytest.raises(EngineError, match="a cell is none of the table's: 2 cells"):
        count_outcomes(np.full((1, 1), 2, np.int32), np.ones(1, np.int32), np.ones(1, np.int32), 2)
    with pytest.raises(EngineError, match="as many numbers of tokens"):
        count_outcomes(three, two, two, 2)


@given(st.integers(0, 1 << 32), st.integers(1, 8), st.integers(0, 6))
def test_what_lies_behind(seed: int, rows: int, width: int) -> None:
    random = np.random.default_rng(seed)
    values = random.random((rows, width)).astype(np.float32)
    ahead = random.integers(0, 9, rows).astype(np.int32)
    rest = _step.behind(values, ahead)
    expected = [row[skipped:] for row, skipped in zip(values.tolist(), ahead.tolist(), strict=True)]
    assert rest.shape == (rows, max(1, *map(len, expected)))
    assert rest.tolist() == [row + [0.0] * (rest.shape[1] - len(row)) for row in expected]


def test_what_lies_behind_wants_fitting_numbers() -> None:
    values = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="one number"):
        _step.behind(values, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="negative"):
        _step.behind(values, np.array([0, -1], np.int32))

"""Model drafts that the budget decides about unseen: what they are taken to be worth, alone and behind suffix trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.left_drafts import LeftDrafts

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8)


def taught(steps: list[tuple[list[int], list[int]]]) -> LeftDrafts:
    made = LeftDrafts()
    for seen, right in steps:
        made.learn(np.array(seen, np.int32), np.array(right, np.int32))
    return made


def test_a_coin_stands_for_a_place_that_nothing_is_known_of() -> None:
    assert LeftDrafts().path_probability(3).tolist() == [0.5, 0.25, 0.125]


def test_each_place_is_judged_where_all_before_it_were_right() -> None:
    made = taught([([3, 3, 3, 1], [3, 1, 0, 1])] * 300)
    expected = np.cumprod([3 / 4, 1 / 2, 1.0])  # the fourth was seen at one place alone
    assert made.path_probability(3) == pytest.approx(expected, abs=0.01)


@given(ROWS)
def test_what_is_learned_is_what_counting_says(rows: list[tuple[int, int]]) -> None:
    seen, right = zip(*((seen, min(right, seen)) for seen, right in rows), strict=True)
    path = taught([(list(seen), list(right))]).path_probability(6)
    product = 1.0
    for place in range(6):
        told = [r for s, r in zip(seen, right, strict=True) if s > place and r >= place]
        product *= (1.0 + sum(r > place for r in told)) / (2.0 + len(told))
        assert path[place] == pytest.approx(product, rel=1e-5)


def test_old_steps_fade() -> None:
    made = taught([([1] * 8, [1] * 8)] * 200)
    assert made.path_probability(1)[0] > 0.98
    made.learn(*[np.zeros(0, np.int32)] * 2)  # a step without drafts counts too
    for _ in range(200):
        made.learn(np.ones(8, np.int32), np.zeros(8, np.int32))
    assert made.path_probability(1)[0] < 0.05


def test_the_trees_go_before_where_that_is_better() -> None:
    made = taught([([2] * 8, [1] * 8)] * 300)  # the first token always, the second never
    free = np.array([[0.3, 0.3, 0.3], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    goes_on = np.array([0.4, 0.9, 0.0], np.float32)
    found = made.mix(free, goes_on, np.array([2, 2, 2]))
    assert found.takes_free.tolist() == [True, False, False]
    assert found.path[0] == pytest.approx([0.3 + 0.6, 0.3, 0.3], abs=0.02)
    assert found.path[1] == pytest.approx([1.0, 0.0, 0.0], abs=0.02)


@given(st.integers(0, 1 << 32), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_a_mixture_is_a_path_and_no_worse_than_either(seed: int, rows: int, width: int, depth: int) -> None:
    random = np.random.default_rng(seed)
    goes_on = random.random(rows).astype(np.float32)
    free = (goes_on[:, None] * np.cumprod(random.random((rows, width)), axis=1)).astype(np.float32)
    num_left = random.integers(0, depth + 1, rows).astype(np.int32)
    made = taught([([5] * 4, random.integers(0, 6, 4).tolist())])
    found = made.mix(free, goes_on, num_left)
    assert (found.path <= 1.0).all()
    assert (np.diff(found.path, axis=1) <= 1e-6).all()
    alone = np.where(np.arange(depth) < num_left[:, None], made.path_probability(depth), 0.0)
    assert (found.path.sum(axis=1) >= alone.sum(axis=1) - 1e-5).all()
    assert (found.path.sum(axis=1) >= free.sum(axis=1) - 1e-5)[found.takes_free].all()
    assert not found.takes_free[free.sum(axis=1) == 0].any()


def test_another_drafter_begins_anew() -> None:
    made = taught([([1], [1])] * 50)
    made.depth = 7
    made.forget()
    assert made.depth == 1
    assert made.path_probability(1).tolist() == [0.5]

"""Alternatives of drafts whose acceptance alone is known, against all sets of paths and against coin throws."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import EngineError
from paceline.planning.window import coupled_tokens
from paceline.sim.alternatives import choose_alternatives, second_choice, tree_tokens


def best_by_trial(p: float, w: int, q: float, token: float, path: float) -> float:
    """Gain less price of the paths that are worth it, every length of every level tried."""
    total = 0.0
    for level in range(1, w + 1):
        values = []
        for length in range(1, w - level + 2):
            gain = p ** (level - 1) * (1 - p) * q * sum(p**k for k in range(length))
            values.append(gain - token * (level + length) - path)
        total += max(*values, 0.0)
    return total


@settings(max_examples=200)
@given(
    st.floats(0.05, 0.95),
    st.integers(1, 12),
    st.floats(0.05, 0.9),
    st.floats(1e-4, 0.2),
    st.sampled_from([0.0, 0.01]),
)
def test_what_is_taken_is_what_pays(p: float, w: int, q: float, token: float, path: float) -> None:
    found = choose_alternatives(np.array([p]), np.array([w]), np.array([q]), token, np.array([path]))
    net = found.gained[0] - token * found.num_tokens[0] - path * found.num_paths[0]
    assert net == pytest.approx(best_by_trial(p, w, q, token, path), abs=1e-9)
    assert found.num_drafted[0] <= found.num_tokens[0]


def test_free_alternatives_at_every_level_yield_the_sum() -> None:
    p, w, q = 0.8, 10, 0.45
    found = choose_alternatives(np.array([p]), np.array([w]), np.array([q]), 0.0, np.zeros(1))
    levels = np.arange(1, w + 1)
    expected = q * float((p ** (levels - 1) * (1 - p ** (w - levels + 1))).sum())
    assert found.gained[0] == pytest.approx(expected)
    assert found.num_paths[0] == w
    assert found.num_tokens[0] == w * (w + 1)
    assert found.num_drafted[0] == w * (w + 1) // 2


def test_gain_is_what_coin_throws_give() -> None:
    """The draft goes on while tokens are right; where it fails, the second choice may be right and goes on alone."""
    p, w, q = 0.7, 6, 0.4
    rng = np.random.default_rng(0)
    accepted = []
    for _ in range(40_000):
        right = rng.random(w) < p
        ends = int(right.argmin()) if not right.all() else w
        if ends < w and rng.random() < q:
            more = rng.random(w - ends - 1) < p
            ends += 1 + (int(more.argmin()) if not more.all() else len(more))
        accepted.append(1 + ends)
    found = choose_alternatives(np.array([p]), np.array([w]), np.array([q]), 0.0, np.zeros(1))
    assert float(coupled_tokens(p, w)) + found.gained[0] == pytest.approx(np.mean(accepted), rel=0.01)


def test_a_tree_yields_no_more_than_its_level_says() -> None:
    """Second choices at the levels of the first path alone: less than a tree with second choices everywhere."""
    line, tree = 0.82, 0.9
    q = second_choice(line, tree)
    found = choose_alternatives(np.array([line]), np.array([10]), np.array([q]), 0.0, np.zeros(1))
    assert float(coupled_tokens(line, 10)) + found.gained[0] < float(coupled_tokens(tree, 10))
    assert found.gained[0] > 1.0


def test_higher_prices_take_less() -> None:
    p, w, q = np.array([0.5, 0.8, 0.95]), np.array([3, 8, 12]), np.array([0.3, 0.5, 0.0])
    sizes = [
        choose_alternatives(p, w, q, price, np.zeros(3)).num_tokens.sum() for price in (0.0, 0.005, 0.02, 1.0)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_nothing_drafted_has_no_alternatives() -> None:
    found = choose_alternatives(np.array([0.5]), np.zeros(1), np.array([0.5]), 0.0, np.zeros(1))
    assert found.gained.tolist() == [0.0]


@pytest.mark.parametrize(("level", "tree"), [(0.9, 0.8), (1.0, 1.0), (0.5, 1.2)])
def test_levels_that_cannot_be(level: float, tree: float) -> None:
    with pytest.raises(EngineError, match="tree level"):
        second_choice(level, tree)


def test_a_tree_without_second_choices_is_a_line() -> None:
    p = np.array([0.3, 0.8])
    assert tree_tokens(p, 0.0, 64, 7) == pytest.approx(coupled_tokens(p, 7))
    assert tree_tokens(p, 0.0, 4, 7) == pytest.approx(coupled_tokens(p, 4))


def test_trees_against_all_trees() -> None:
    """The likeliest nodes are closed under parents, so no other set of as many yields more."""
    p, q, depth = 0.6, 0.5, 3
    chances = [p, *((1 - p) * (1 - q) ** k * q for k in range(7))]
    paths = [np.prod(c) for d in range(1, depth + 1) for c in product(chances, repeat=d)]
    for nodes in (1, 5, 20):
        best = 1.0 + sum(sorted(paths, reverse=True)[:nodes])
        assert tree_tokens(np.array([p]), q, nodes, depth)[0] == pytest.approx(best)


def test_trees_meet_what_tlt_measured() -> None:
    """Figure 13: acceptance lengths of depths 8, 10 and 12 with 16, 32, 48 and 64 tokens to verify."""
    measured = {8: (6.34, 7.01, 7.24, 7.39), 10: (6.80, 7.63, 7.97, 8.21), 12: (7.02, 8.05, 8.49, 8.76)}
    for depth, lengths in measured.items():
        ours = [float(tree_tokens(np.array([0.89]), 0.55, n, depth)[0]) for n in (16, 32, 48, 64)]
        assert ours == pytest.approx(lengths, rel=0.045)

"""CUDA graphs are captured for the sizes that steps will have: against exhaustive search, and TLT's table 5."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import BudgetSettings
from paceline.planning.captures import (
    GRAPH_BYTES,
    LARGEST,
    captures_for,
    choose_captures,
    step_shapes,
)

SIZES = st.sets(st.integers(1, 40), min_size=1, max_size=8)


def worst_padding(sizes: set[int], captures: tuple[int, ...]) -> float:
    """Largest ratio of a capture to a size that it serves; infinite where a size has none."""
    return max(min((c / size for c in captures if c >= size), default=float("inf")) for size in sizes)


@given(SIZES, st.integers(1, 8))
def test_no_other_choice_pads_less_or_needs_fewer_graphs(sizes: set[int], max_graphs: int) -> None:
    chosen = choose_captures(sizes, max_graphs)
    padding = worst_padding(sizes, chosen)
    assert set(chosen) <= sizes
    assert len(chosen) <= max_graphs
    assert list(chosen) == sorted(chosen)
    others = [c for n in range(1, max_graphs + 1) for c in combinations(sorted(sizes), n)]
    assert padding == min(worst_padding(sizes, other) for other in others)
    assert len(chosen) == min(len(other) for other in others if worst_padding(sizes, other) == padding)


@given(st.sets(st.integers(1, 512), min_size=1), st.integers(1, 30))
def test_more_memory_never_pads_more(sizes: set[int], max_graphs: int) -> None:
    few, many = choose_captures(sizes, max_graphs), choose_captures(sizes, max_graphs + 1)
    assert worst_padding(sizes, many) <= worst_padding(sizes, few)


@given(
    st.sampled_from(["marginal", "bandit", "thresholds", "fixed", "off"]),
    st.integers(1, 40),
    st.integers(1, 600),
    st.integers(1, 16 << 30),
)
def test_every_step_of_a_policy_is_served_within_the_memory(
    policy: str, longest: int, most: int, memory_bytes: int
) -> None:
    budget = BudgetSettings.model_validate({"policy": policy})
    captures = captures_for(budget, longest, most, memory_bytes)
    assert len(captures) * GRAPH_BYTES <= max(memory_bytes, GRAPH_BYTES)
    sizes = {
        b * q for b, q in step_shapes(budget, longest, range(1, min(most, LARGEST) + 1)) if b * q <= LARGEST
    }
    assert captures[-1] == max(sizes)
    assert sizes >= set(captures)


def test_sizes_that_strategies_share_are_captured_once() -> None:
    budget = BudgetSettings(
        policy="bandit", bandit_strategies=((7, 1, 7), (1, 1, 1), (0, 1, 0)), bandit_batch_sizes=(1, 4, 8)
    )
    shapes = step_shapes(budget, 16, (1, 4, 8))
    assert shapes == [(1, 1), (1, 8), (4, 1), (4, 2), (8, 1)]
    assert choose_captures([batch * tokens for batch, tokens in shapes], 9) == (1, 4, 8)


def test_nothing_is_captured_for_no_steps() -> None:
    assert choose_captures([], 4) == ()


def test_graph_counts_fit_the_papers_memory() -> None:
    """TLT's table 5: 7.81 GB for one strategy, 30.39 GB for four naively, 10.69 GB bucketed.

    The strategies are not published. Fitted, not predicted: batch sizes 1 to 32, a group of its own for each of the
    four numbers of tokens to verify, two different settings of the drafter, and GRAPH_BYTES.
    """
    strategies = ((8, 1, 8), (8, 1, 6), (4, 1, 4), (4, 1, 2))
    batches = range(1, 33)
    budget = BudgetSettings(policy="bandit", bandit_strategies=strategies, bandit_batch_sizes=(1, 8, 16, 24))
    one, naive = 2 * len(batches), 2 * len(batches) * len(strategies)
    verified = [shape for shape in step_shapes(budget, 8, batches) if shape[1] > 1]
    bucketed = len(verified) + len({depth for depth, *_ in strategies}) * len(batches)
    assert one * GRAPH_BYTES == pytest.approx(7.81e9, rel=0.01)
    assert naive * GRAPH_BYTES == pytest.approx(30.39e9, rel=0.15)
    assert bucketed * GRAPH_BYTES == pytest.approx(10.69e9, rel=0.15)
    assert naive / bucketed == pytest.approx(30.39 / 10.69, rel=0.15)

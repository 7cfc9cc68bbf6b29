"""Which step sizes are captured as CUDA graphs? (TLT 5.1, bucketed capture)

A graph is captured for a number of tokens and serves every smaller step, padded. TLT captures for each bucket of batch
sizes only the tokens to verify that are used in it, target and drafter apart, and once where strategies agree. Here the
budget's policy says which sizes steps can have; steps of different shapes that have as many tokens share a graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from paceline.config import BudgetSettings

GRAPH_BYTES = 122_000_000
"""Memory of one graph. Fitted to TLT's table 5 (Llama-3-8B, TP=4): 7.81 GB for one strategy, were 32 batch sizes
captured for target and drafter each. Four strategies take 3.9 times that: graphs count, whatever their size."""
GRAPHS_PER_SIZE = 2
"""vLLM captures each size for steps with prefill, piecewise, and again for decoding, in full. Where full graphs serve
only requests of equally many tokens, sizes that are rounded to the same multiple share one, and there are fewer."""
LARGEST = 512
"""Tokens of the largest captured step, as vLLM's default: larger ones take long enough to hide their launches."""


def step_shapes(
    budget: BudgetSettings, max_draft_tokens: int, batch_sizes: Iterable[int]
) -> list[tuple[int, int]]:
    """(requests, tokens of each) of all steps that the policy aims at, for these batch sizes.

    max_draft_tokens: longest draft that can be proposed.
    """
    return [
        (batch, 1 + drafts)
        for batch in batch_sizes
        for drafts in sorted({0, *(min(n, max_draft_tokens) for n in _draft_lengths(budget, batch))})
    ]


def _draft_lengths(budget: BudgetSettings, batch: int) -> Iterable[int]:
    """Draft tokens of a request that a step over `batch` requests can aim at; none is always possible."""
    if budget.policy == "off":
        return ()
    if budget.policy == "fixed":
        return (budget.fixed_tokens,)
    if budget.policy == "thresholds":
        return (min(budget.threshold_request_tokens, budget.threshold_batch_tokens // batch),)
    if budget.policy == "bandit":
        levels = sorted({verified for *_, verified in budget.bandit_strategies}, reverse=True)
        level = levels[max(bisect_right(budget.bandit_batch_sizes, batch) - 1, 0)]
        return {min(d * k, level) for d, k, verified in budget.bandit_strategies if verified == level}
    return range(1, budget.max_draft_tokens + 1)  # marginal: any


def choose_captures(sizes: Iterable[int], max_graphs: int) -> tuple[int, ...]:
    """Step sizes to capture, ascending, at most `max_graphs`, so that the worst relative padding is the least possible.

    sizes: tokens of the steps that will be; each is served by the smallest capture that is not smaller. Empty without
    any. Among choices with the same worst padding the one with the fewest graphs.
    """
    wanted = sorted(set(sizes))
    if not wanted:
        return ()
    ratios = sorted({large / small for i, small in enumerate(wanted) for large in wanted[i:]})
    return _cover(
        wanted, ratios[bisect_left(ratios, True, key=lambda r: len(_cover(wanted, r)) <= max_graphs)]
    )


def _cover(wanted: Sequence[int], ratio: float) -> tuple[int, ...]:
    """Fewest captures such that none is more than `ratio` times a size that it serves: from the top, each as far down
    as it goes. wanted: ascending."""
    captures = []
    end = len(wanted)
    while end:
        captures.append(wanted[end - 1])
        end = bisect_left(wanted, True, hi=end, key=lambda size: captures[-1] / size <= ratio)
    return tuple(reversed(captures))


def captures_for(
    budget: BudgetSettings, max_draft_tokens: int, max_requests: int, memory_bytes: int
) -> tuple[int, ...]:
    """Step sizes to capture for a policy, as many as the memory holds by GRAPH_BYTES, one at least."""
    shapes = step_shapes(budget, max_draft_tokens, range(1, min(max_requests, LARGEST) + 1))
    sizes = {batch * tokens for batch, tokens in shapes if batch * tokens <= LARGEST}
    return choose_captures(sizes, max(memory_bytes // (GRAPHS_PER_SIZE * GRAPH_BYTES), 1))

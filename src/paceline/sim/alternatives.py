"""Alternatives and trees of drafts of which only the acceptance is known: what do they yield, and which are worth it?

For plans and simulated rollouts; the running engine chooses among the drafter's own candidates (`paths.py`). A draft
has w tokens, each accepted with probability p if those before it were. At level j (1 .. w) the drafter's second choice
is right with probability q where the first is not. The path that begins with it shares j - 1 tokens with the draft and
goes on for m tokens, j - 1 + m <= w: as alternatives of different levels never come true together, each gains

    p^(j-1) (1-p) q (1 + p + .. + p^(m-1))    for j + m tokens of the step and one more reading of the context

with row expansion, which verifies the shared tokens and the token before the draft once more (docs/multipath.md). With
a price for a token and for a reading, m is as large as its last token is worth the price, and a path is taken if it
gains more than it costs. Invariant: a higher price never takes more tokens.

A tree (`tree_tokens`; TLT 5.2, EAGLE) has such choices at every node, the k-th right with p, (1-p) q, (1-p) (1-q) q, ..
and verifies its n likeliest nodes, each once, behind a tree mask that our engine has not. With p = 0.89 and q = 0.55 it
meets the acceptance lengths of TLT's figure 13 (depths 8 to 12, 16 to 64 nodes) within 1.5 % on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from paceline.errors import EngineError
from paceline.types import Float64Array, Int64Array

_MAX_CHOICES = 8
"""Children of a node at most (topK of TLT's table 4)."""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What is verified beside the drafts; arrays are [num_requests]."""

    gained: Float64Array
    """Expected accepted tokens beyond the draft's."""
    num_paths: Int64Array
    num_tokens: Int64Array
    """Tokens of the step, those verified once more included."""
    num_drafted: Int64Array
    """Of them, tokens that the drafter had to draft."""


def second_choice(level: float, tree_level: float) -> float:
    """q of a drafter whose draft tokens are accepted with `level`, and one of its two best with `tree_level`.

    Raises EngineError for a tree that is accepted less than its best path.
    """
    if not 0.0 <= level <= tree_level <= 1.0 or level == 1.0:
        raise EngineError(
            f"a tree level of {tree_level} over a level of {level}: both are probabilities, the tree's the higher one"
        )
    return (tree_level - level) / (1.0 - level)


def choose_alternatives(
    acceptance: Float64Array,
    windows: Float64Array | Int64Array,
    second: Float64Array,
    token_price: float,
    path_price: Float64Array,
) -> Alternatives:
    """The alternatives whose expected tokens exceed their price; levels of one request are judged one by one.

    acceptance, windows, second (q): [num_requests], acceptance inside (0, 1). token_price: accepted tokens that one
    more token of the step must bring. path_price: the same for one more reading of a request's context.
    """
    level = np.arange(1, int(windows.max(initial=0)) + 1)
    p, w = acceptance[:, None], np.asarray(windows)[:, None]
    first = p ** (level - 1) * (1.0 - p) * second[:, None]  # gain of the path's first token
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.log(token_price / first) / np.log(p) if token_price > 0.0 else np.full(first.shape, np.inf)
        longest = np.minimum(1.0 + np.floor(worth), w - level + 1)
    longest = np.where((first > token_price) & (level <= w), longest, 0.0)
    gain = first * (1.0 - p**longest) / (1.0 - p)
    taken = (longest > 0) & (gain > token_price * (level + longest) + path_price[:, None])
    return Alternatives(
        gained=np.where(taken, gain, 0.0).sum(axis=1),
        num_paths=taken.sum(axis=1),
        num_tokens=np.where(taken, level + longest, 0.0).sum(axis=1).astype(np.int64),
        num_drafted=np.where(taken, longest, 0.0).sum(axis=1).astype(np.int64),
    )


def tree_tokens(acceptance: Float64Array, second: float, num_nodes: int, max_depth: int) -> Float64Array:
    """Tokens per step, bonus token included, of a tree's likeliest nodes; straight between hundredths of p."""
    known = np.array(_tree_table(second, num_nodes, max_depth))
    return np.asarray(np.interp(acceptance, np.linspace(0.0, 1.0, len(known)), known))


@lru_cache(maxsize=256)
def _tree_table(second: float, num_nodes: int, max_depth: int) -> tuple[float, ...]:
    """Tokens per step at p = 0, 0.01, .. 1."""
    return tuple(_likeliest_nodes(p / 100.0, second, num_nodes, max_depth) for p in range(101))


def _likeliest_nodes(p: float, second: float, num_nodes: int, max_depth: int) -> float:
    """1 + path probabilities, the likeliest node first: its first child and its next sibling may follow it."""
    chances = [p, *((1.0 - p) * (1.0 - second) ** rank * second for rank in range(_MAX_CHOICES - 1))]
    chances.sort(reverse=True)
    total = 1.0
    heap = [(-chances[0], 1, 1.0, 0)]  # (-path probability, depth, the parent's, rank among its children)
    for _ in range(num_nodes):
        if not heap:
            break
        path, depth, parent, rank = heappop(heap)
        total -= path
        if rank + 1 < _MAX_CHOICES:
            heappush(heap, (-parent * chances[rank + 1], depth, parent, rank + 1))
        if depth < max_depth:
            heappush(heap, (path * chances[0], depth + 1, -path, 0))
    return total

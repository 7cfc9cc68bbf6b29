"""Alternatives of drafts of which only the acceptance is known: which are worth their tokens, and what do they yield?

For plans and simulated rollouts; the running engine chooses among the drafter's own candidates (`paths.py`). A draft
has w tokens, each accepted with probability p if those before it were. At level j (1 .. w) the drafter's second choice
is right with probability q where the first is not. The path that begins with it shares j - 1 tokens with the draft and
goes on for m tokens, j - 1 + m <= w: as alternatives of different levels never come true together, each gains

    p^(j-1) (1-p) q (1 + p + .. + p^(m-1))    for j + m tokens of the step and one more reading of the context

with row expansion, which verifies the shared tokens and the token before the draft once more (docs/multipath.md). With
a price for a token and for a reading, m is as large as its last token is worth the price, and a path is taken if it
gains more than it costs. Invariant: a higher price never takes more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.errors import EngineError
from paceline.types import Float64Array, Int64Array


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
    """q of a drafter whose draft tokens are accepted with `level`, and with `tree_level` if every level has a tree.

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

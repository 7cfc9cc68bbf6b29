"""What does a draft worker draft next: behind which chains and branches, how far ahead, how many tokens at a time?

The relaxed window (SpecActor 4.1): after w draft tokens that the target has not decided yet, up to w more. Of the 2w
tokens ahead the first may be the one that is rejected, so a rejection wastes at most 2w - 1 drafted behind it. Coupled,
nothing is drafted while w tokens are verified, so it wastes at most w - 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.planning.latency import StepTimeModel, predict_one_s, predict_s
from paceline.types import Float64Array, Int32Array, Int64Array

BoolArray = NDArray[np.bool_]

CALL_S = 0.002
"""A drafting call takes about so long: short, so that a rejection is heard soon; not so short that telling the engine
of its tokens would cost more than drafting them."""


def most_ahead(window: ArrayLike, is_coupled: ArrayLike) -> Int32Array:
    """Undecided tokens that may be drafted for a response with a window of w: 2w, or w where it is coupled."""
    w = np.asarray(window, dtype=np.int32)
    return np.where(is_coupled, w, 2 * w).astype(np.int32)


def window_room(most: int, num_ahead: int) -> int:
    """Tokens that may still be drafted for a response with `num_ahead` undecided ones, of `most_ahead`."""
    return max(most - num_ahead, 0)


def choose_leaves(
    probability: Float64Array,
    rest_tokens: Int64Array,
    is_branch: BoolArray,
    level_time: StepTimeModel,
    left_s: float,
) -> Int64Array:
    """Where the next tokens are drafted: behind which chains and branches, most urgent first.

    probability: that everything drafted up to there is accepted, so that the next token is of use.
    rest_tokens: that the response may still grow by. is_branch: prepares a correction. [num_leaves] each
    level_time: seconds of one drafted token behind m leaves. left_s: until the verifier's step ends, at the earliest.

    A draft token is expected to bring `probability` accepted ones, so short look-aheads go first, and among equals
    the longer rest, then the earlier row. A leaf takes part if that raises the expected accepted tokens per second
    of drafting; the others have their turn when these have filled their windows.

    Branches are drafted while the verifier works, as many as it leaves time for: where a level would not end before
    the step, chains are drafted alone, so that a correction that was not prepared does not wait for one that was.
    """
    order = np.lexsort((-rest_tokens, -probability))
    chains = order[~is_branch[order]]
    level_s = predict_s(level_time, np.arange(1, len(order) + 1))
    in_time = order[: int((level_s <= left_s).sum())]
    best, best_rate = chains[:0], 0.0
    for leaves in (chains, in_time):
        rate = np.cumsum(probability[leaves]) / level_s[: len(leaves)]
        if len(leaves) and rate.max() > best_rate:
            best, best_rate = leaves[: int(rate.argmax()) + 1], float(rate.max())
    return np.asarray(best, dtype=np.int64)


def choose_depth(num_leaves: int, level_time: StepTimeModel, left_s: float = math.inf) -> int:
    """Tokens per leaf and drafting call: as many as `CALL_S`, and the step where there are branches, have time for."""
    level_s = predict_one_s(level_time, num_leaves)
    depth = math.ceil(CALL_S / level_s)
    return max(depth if depth * level_s <= left_s else math.floor(left_s / level_s), 1)

"""What does a draft worker draft next: for which responses, how far ahead, how many tokens at a time?

The relaxed window (SpecActor 4.1): after w draft tokens that the target has not decided yet, up to w more. Of the 2w
tokens ahead the first may be the one that is rejected, so a rejection wastes at most 2w - 1 drafted behind it. Coupled,
nothing is drafted while w tokens are verified, so it wastes at most w - 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from paceline.planning.latency import StepTimeModel, predict_s
from paceline.types import Float64Array, Int32Array, Int64Array

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


def choose_responses(
    path_probability: Float64Array, rest_tokens: Int64Array, level_time: StepTimeModel
) -> Int64Array:
    """Which responses the next tokens are drafted for, most urgent first.

    path_probability: that everything drafted ahead for a response is accepted, so that the next token is of use.
    rest_tokens: that it may still grow by. level_time: seconds of one drafted token of m responses. [num_responses]

    A draft token is expected to bring `path_probability` accepted ones, so short look-aheads go first, and among equals
    the longer rest, then the earlier row. A response takes part if that raises the expected accepted tokens per second
    of drafting; the others have their turn when these have filled their windows.
    """
    order = np.lexsort((-rest_tokens, -path_probability))
    if len(order) <= 1:
        return np.asarray(order, dtype=np.int64)
    rate = np.cumsum(path_probability[order]) / predict_s(level_time, np.arange(1, len(order) + 1))
    return np.asarray(order[: int(rate.argmax()) + 1], dtype=np.int64)


def choose_depth(num_responses: int, level_time: StepTimeModel) -> int:
    """Tokens per response and drafting call: as many as `CALL_S` has time for."""
    return max(math.ceil(CALL_S / float(predict_s(level_time, num_responses))), 1)

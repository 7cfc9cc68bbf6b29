"""A model drafter's tokens that are left on the device, where steps overlap: the budget decides about them unseen.

A step is made while the one before is under way, and what the model drafts behind that one is there only when it is
over. So the budget goes by what the drafter's tokens were worth lately, place by place. Suffix trees draft through the
step under way: where theirs go on with what it has decided the device verifies them, else the model's, unless the
model's are expected to be better in any case.

A part of the fast loop. Knows nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.types import Float32Array, Int32Array

KEPT = 0.98
"""Of decayed sums, from step to step."""
_PRIOR = 1.0, 2.0
"""Right ones of so many tokens of each place, before there are any."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a step can expect of both drafters."""

    path: Float32Array  # [num_requests, any] probability that so many tokens behind the decided ones are accepted
    num_left: Int32Array  # [num_requests] the model's tokens
    takes_free: NDArray[np.bool_]  # [num_requests] whether the trees' tokens are verified where they go on


class LeftDrafts:
    """One per engine."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another model drafts, or one with other weights."""
        self.depth = 1
        """Tokens of the drafts to come."""
        self._right = self._told = np.empty(0)  # [deepest so far] decayed sums

    def path_probability(self, depth: int) -> Float32Array:
        """Probability that all of the first 1, 2, .. `depth` tokens are accepted. [depth]"""
        right, told = np.full(depth, _PRIOR[0]), np.full(depth, _PRIOR[1])
        known = min(depth, len(self._told))
        right[:known] += self._right[:known]
        told[:known] += self._told[:known]
        return np.cumprod(right / told).astype(np.float32)

    def learn(self, num_seen: Int32Array, num_right: Int32Array) -> None:
        """Of each draft, tokens that the target has said something about, and how many were right from the first on.
        [num_requests] each
        """
        width = int(num_seen.max(initial=0))
        places = np.arange(width)
        told = (places < np.minimum(num_seen, num_right + 1)[:, None]).sum(axis=0)
        right = (places < num_right[:, None]).sum(axis=0)
        self._right, self._told = _decayed(self._right, right), _decayed(self._told, told)

    def mix(self, free: Float32Array, goes_on: Float32Array, num_left: Int32Array) -> Mixture:
        """What verifying both would bring.

        Args:
            free: probability that the trees' draft goes on behind what is being decided, and so many of its tokens are
                accepted. [num_requests, any]
            goes_on: that it goes on at all. [num_requests]
            num_left: the model's tokens. [num_requests]
        """
        depth = int(num_left.max(initial=0))
        width = max(free.shape[1], depth)
        model = np.zeros((len(free), width), np.float32)
        model[:, :depth] = self.path_probability(depth)
        model[np.arange(width) >= num_left[:, None]] = 0.0
        both = (1.0 - goes_on)[:, None] * model
        both[:, : free.shape[1]] += free
        takes_free = both.sum(axis=1) > model.sum(axis=1)
        path = np.minimum(np.where(takes_free[:, None], both, model), np.float32(1.0))
        return Mixture(path.astype(np.float32), num_left, takes_free)


def _decayed(before: NDArray[np.floating], news: NDArray[np.integer]) -> NDArray[np.float64]:
    total = np.zeros(max(len(before), len(news)))
    total[: len(before)] = KEPT * before
    total[: len(news)] += news
    return total

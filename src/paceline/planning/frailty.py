"""How much harder than usual is this response to draft for?

Acceptance is calibrated over all responses of a step (acceptance.py), but a response that has lost its way, or writes
what no drafter has seen, is rejected again and again where the table promises 0.97. As in survival analysis: a draft
token of estimated acceptance a has the hazard h = -log a of being rejected; a response multiplies all its hazards by a
factor of its own, its *frailty* f, so a token's acceptance becomes a ** f. With a gamma prior of mean 1, the posterior
mean after R rejections under a summed hazard H is

    f = (R + PRIOR) / (H + PRIOR)

Both sums decay, as a response has easy and hard passages. Above 1 drafts get shorter, below 1 longer. Differs from
SpecActor 4.1 (algorithm 2), which watches one acceptance rate per request: the certainty about each token stays.
"""

from __future__ import annotations

import numpy as np

from paceline.types import Float32Array, Int32Array, Int64Array

PRIOR = 0.5
"""Rejections, and hazard, that the prior counts for."""

MEMORY = 0.9
"""What one verified draft counts for a step later."""

LOWEST, HIGHEST = 0.3, 20.0
"""Bounds of a frailty."""

_SUREST = np.float32(0.999)
_LEAST_SURE = np.float32(0.01)
_NOTHING = (0.0, 0.0)


class Frailties:
    """Frailty of every open response. O(1) per response and step; one thread."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def open(self, response: int) -> None:
        """A response begins. What a step tells of responses that are not open, as after an abort, is passed over."""
        self._sums[response] = _NOTHING

    def of(self, responses: Int64Array) -> Float32Array:
        """Frailty of each response, 1 while nothing of it was verified. [num_requests] float32"""
        sums = self._sums
        values = [_frailty(*sums.get(response, _NOTHING)) for response in responses.tolist()]
        return np.array(values, dtype=np.float32)

    def snapshot(self) -> dict[int, float]:
        """Frailty of every open response."""
        return {response: _frailty(*pair) for response, pair in self._sums.items()}

    def learn(
        self, responses: Int64Array, acceptance: Float32Array, verified: Int32Array, accepted: Int32Array
    ) -> None:
        """Count a step.

        acceptance: estimates of the drafted tokens, frailty left out. [num_requests, max_draft_tokens]
        verified, accepted: draft tokens of each request that the target saw, and accepted. [num_requests]
        """
        told = np.arange(acceptance.shape[1]) < np.minimum(verified, accepted + 1)[:, None]
        hazards = -np.log(np.clip(acceptance, _LEAST_SURE, _SUREST))
        summed = np.where(told, hazards, np.float32(0.0)).sum(axis=1).tolist()
        rejected = (accepted < verified).tolist()
        for at in np.flatnonzero(verified).tolist():
            response = int(responses[at])
            if response in self._sums:
                rejections, hazard = self._sums[response]
                self._sums[response] = rejections * MEMORY + rejected[at], hazard * MEMORY + summed[at]

    def close(self, response: int) -> None:
        """A response has ended."""
        self._sums.pop(response, None)

    def forget(self) -> None:
        """Drop what was learned; open responses stay open."""
        self._sums = dict.fromkeys(self._sums, _NOTHING)


def _frailty(rejections: float, hazard: float) -> float:
    return min(max((rejections + PRIOR) / (hazard + PRIOR), LOWEST), HIGHEST)

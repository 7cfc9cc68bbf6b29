"""Synthetic acceptance: a model drafter played with any acceptance rate, where the right tokens are known.

Owns the play. The drafter really drafts, so that its cost is real; then each of its tokens is replaced, by the right
one with the wanted probability and else by a wrong one (SpecActor 4.2). The right tokens are those of an earlier run of
the same keys. Whether a token is right follows from seed, key and position alone: what is drafted again is the same
again, as it is with a drafter. So the rate is the probability that a token is accepted, whatever was accepted before.
Called by engine/rungs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.noise import uniform
from paceline.types import DraftGrowth, DraftQuery, Float32Array, Int32Array, ModelBatch

if TYPE_CHECKING:
    from paceline.drafting.model import ModelDrafter


@dataclass(frozen=True, slots=True)
class Play:
    """What is played."""

    known: Mapping[int, Int32Array]
    """All tokens of a response, prompt included, by its key."""
    rate: float
    """Acceptance rate, 0 to 1."""
    seed: int = 0


def play(tokens: Int32Array, query: DraftQuery, wanted: Play) -> Int32Array:
    """What is drafted in place of `tokens`, [num_requests, max_draft_tokens], for the rows of `query`.

    Behind a known response's end, and for unknown keys, the drafter's own tokens stay.
    """
    right, places = tokens.copy(), np.arange(tokens.shape[1])
    num_known = np.zeros(len(tokens), np.int64)
    for row, (key, position) in enumerate(zip(query.keys.tolist(), query.positions.tolist(), strict=True)):
        if key in wanted.known:
            known = wanted.known[key][position : position + len(places)]
            num_known[row] = len(known)
            right[row, : len(known)] = known
    chance = uniform(wanted.seed, query.keys[:, None], query.positions[:, None] + places)
    is_wrong = (places < num_known[:, None]) & (chance >= wanted.rate)
    return np.where(is_wrong, np.where(right > 0, right - 1, 1), right).astype(np.int32)


class PlayedDrafter:
    """A model drafter whose tokens are right as often as wanted, and which is as sure of them."""

    def __init__(self, drafter: ModelDrafter, wanted: Play) -> None:
        self._drafter, self._wanted = drafter, wanted

    def draft(
        self,
        contexts: Sequence[Int32Array],
        query: DraftQuery,
        depth: int,
        *,
        calibration: Float32Array,
        **options: Any,
    ) -> tuple[ModelBatch, DraftGrowth]:
        """As `ModelDrafter.draft`; every cell is calibrated to the wanted rate."""
        rates = np.full_like(calibration, self._wanted.rate)
        batch, growth = self._drafter.draft(contexts, query, depth, calibration=rates, **options)
        return replace(batch, tokens=play(batch.tokens, query, self._wanted)), growth

    def forget(self, responses: Iterable[int]) -> None:
        """As `ModelDrafter.forget`."""
        self._drafter.forget(responses)

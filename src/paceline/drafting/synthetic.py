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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.types import (
    DraftGrowth,
    DraftQuery,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    ModelBatch,
)

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


def draw(seed: int, keys: NDArray[np.uint64], positions: Int64Array) -> Float64Array:
    """A number in [0, 1) for each key and position, which broadcast: splitmix64 of all three."""
    state = np.asarray(keys, np.uint64) + np.uint64((seed * 0xD1342543DE82EF95) % 2**64)
    for step in (np.zeros_like(positions), np.asarray(positions) + 1):
        state = _mix(state + np.asarray(step).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return np.asarray((state >> np.uint64(11)) * 2.0**-53)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def play(tokens: Int32Array, query: DraftQuery, wanted: Play) -> Int32Array:
    """What is drafted in place of `tokens`, [num_requests, max_draft_tokens], for the rows of `query`.

    Behind a known response's end, and for unknown keys, the drafter's own tokens stay.
    """
    played = tokens.copy()
    width = tokens.shape[1]
    for row, (key, position) in enumerate(zip(query.keys.tolist(), query.positions.tolist(), strict=True)):
        right = wanted.known.get(key, tokens[:0, 0])[position : position + width]
        places = np.arange(position, position + len(right))
        is_right = draw(wanted.seed, np.array(key, np.uint64), places) < wanted.rate
        played[row, : len(right)] = np.where(is_right, right, np.where(right > 0, right - 1, 1))
    return played


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
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        level_costs: Float32Array | None = None,
    ) -> tuple[ModelBatch, DraftGrowth]:
        """As `ModelDrafter.draft`; every cell is calibrated to the wanted rate."""
        batch, growth = self._drafter.draft(
            contexts,
            query,
            depth,
            sharpness=sharpness,
            sharpness_grid=sharpness_grid,
            calibration=np.full_like(calibration, self._wanted.rate),
            floor=floor,
            level_costs=level_costs,
        )
        return replace(batch, tokens=play(batch.tokens, query, self._wanted)), growth

    def forget(self, responses: Iterable[int]) -> None:
        """As `ModelDrafter.forget`."""
        self._drafter.forget(responses)

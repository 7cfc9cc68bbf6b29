"""Drafters for tests: wrong on purpose, or right as often as asked."""

from __future__ import annotations

import numpy as np

from paceline.drafting.drafter import Forgetful
from paceline.types import DraftBatch, DraftPaths, DraftQuery, Float32Array


class ScriptedDrafter(Forgetful):
    """Drafts the known continuation of each key, each token wrong with probability `1 - right`; ragged lengths.

    With `right=0` every draft is garbage: ids from `lowest` up to the vocabulary's end.
    """

    def __init__(
        self, known: dict[int, tuple[int, ...]], right: float, vocab: int, width: int = 8, lowest: int = 3
    ) -> None:
        self.known, self.right, self.vocab, self.width, self.lowest = known, right, vocab, width, lowest
        self.random = np.random.default_rng(0)

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        count, width = len(query.groups), self.width
        tokens = self.random.integers(self.lowest, self.vocab, (count, width)).astype(np.int32)
        for row, (key, position) in enumerate(
            zip(query.keys.tolist(), query.positions.tolist(), strict=True)
        ):
            future = self.known.get(key, ())[position : position + width]
            right = self.random.random(len(future)) < self.right
            tokens[row, : len(future)] = np.where(right, future, tokens[row, : len(future)])
        lengths = np.minimum(self.random.integers(0, width + 1, count), query.max_tokens).astype(np.int32)
        return DraftBatch(
            tokens=tokens,
            num_tokens=lengths,
            acceptance=np.full((count, width), 0.95, dtype=np.float32),
            cells=np.zeros((count, width), dtype=np.int32),
            probes=np.full((count, len(sharpness_grid)), -1, dtype=np.int32),
        )


class ScriptedPaths(ScriptedDrafter):
    """Drafts several paths from the known continuation; a token of path p is right with probability `rights[p]`.

    What is drafted depends on key and position alone, so the first path is the one of `draft`.
    """

    def __init__(
        self,
        known: dict[int, tuple[int, ...]],
        rights: tuple[float, ...],
        vocab: int,
        width: int = 8,
        lowest: int = 3,
    ) -> None:
        super().__init__(known, rights[0], vocab, width, lowest)
        self.rights = rights

    def draft_paths(
        self, query: DraftQuery, *, num_paths: int, sharpness: float, calibration: Float32Array, floor: float
    ) -> DraftPaths:
        used = self.rights[:num_paths]
        shape = len(query.groups), len(used)
        tokens = np.empty((*shape, self.width), dtype=np.int32)
        lengths = np.empty(shape, dtype=np.int32)
        for row, (key, position) in enumerate(
            zip(query.keys.tolist(), query.positions.tolist(), strict=True)
        ):
            random = np.random.default_rng([key, position])
            future = self.known.get(key, ())[position : position + self.width]
            for path, right in enumerate(used):
                line = random.integers(self.lowest, self.vocab, self.width)
                line[: len(future)] = np.where(
                    random.random(len(future)) < right, future, line[: len(future)]
                )
                tokens[row, path] = line
                lengths[row, path] = min(random.integers(1, self.width + 1), query.max_tokens[row])
        acceptance = np.full(tokens.shape, 0.8, dtype=np.float32)
        return DraftPaths(tokens, lengths, acceptance, np.zeros_like(tokens))

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        first = self.draft_paths(
            query, num_paths=1, sharpness=sharpness, calibration=calibration, floor=floor
        )
        probes = np.full((len(query.groups), len(sharpness_grid)), -1, dtype=np.int32)
        return DraftBatch(
            first.tokens[:, 0], first.num_tokens[:, 0], first.acceptance[:, 0], first.cells[:, 0], probes
        )

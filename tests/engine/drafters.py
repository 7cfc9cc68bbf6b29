"""Drafters for tests: wrong on purpose, or right as often as asked."""

from __future__ import annotations

import numpy as np

from paceline.types import DraftBatch, DraftQuery, Float32Array, Int32Array, Int64Array


class ScriptedDrafter:
    """Drafts the known continuation of each key, each token wrong with probability `1 - right`; ragged lengths.

    With `right=0` every draft is garbage.
    """

    def __init__(self, known: dict[int, tuple[int, ...]], right: float, vocab: int, width: int = 8) -> None:
        self.known, self.right, self.vocab, self.width = known, right, vocab, width
        self.random = np.random.default_rng(0)

    def open_group(self, group: int, prompt: Int32Array) -> None: ...

    def append(self, group: int, response: int, tokens: Int32Array) -> None: ...

    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None: ...

    def close_response(self, group: int, response: int) -> None: ...

    def clear(self) -> None: ...

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
        tokens = self.random.integers(3, self.vocab, (count, width)).astype(np.int32)
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

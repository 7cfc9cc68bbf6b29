"""Sums over a growing axis in bounded memory: equal bins whose width doubles when the axis outgrows them."""

from __future__ import annotations

import math

import numpy as np

from paceline.types import Float64Array


class Bins:
    """`capacity` bins from 0 upwards, each holding the sum of several columns.

    A value beyond the last bin doubles the width (neighbours are merged) until it fits, so that between half
    and all of the bins are in use once the axis has grown.
    """

    def __init__(self, num_columns: int, *, width: float, capacity: int) -> None:
        """`width` > 0 is the finest resolution; `capacity` is even."""
        self.width = width
        self.sums: Float64Array = np.zeros((capacity, num_columns))  # [capacity, num_columns]
        self.num_used = 0

    def add(self, at: float, *amounts: float) -> None:
        """Add `amounts` (one per column) to the bin of `at`; below 0 counts as 0."""
        row = self._row(at)
        self.sums[row] += amounts

    def spread(self, begin: float, end: float, *amounts: float) -> None:
        """Add `amounts` evenly over [begin, end)."""
        if end <= begin:
            self.add(begin, *amounts)
            return
        begin, end = max(begin, 0.0), max(end, 0.0)
        last = self._row(end)
        first = self._row(begin)
        edges = np.arange(first, last + 2) * self.width
        overlap = np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin)
        share = np.clip(overlap, 0.0, None)
        total = share.sum()
        if total > 0:
            self.sums[first : last + 1] += np.outer(share / total, amounts)

    def used(self) -> Float64Array:
        """The bins up to the last one touched. [num_used, num_columns]"""
        used: Float64Array = self.sums[: self.num_used]
        return used

    def centres(self) -> Float64Array:
        """The middle of each used bin. [num_used]"""
        centres: Float64Array = (np.arange(self.num_used, dtype=np.float64) + 0.5) * np.float64(self.width)
        return centres

    def _row(self, at: float) -> int:
        row = max(0, math.floor(at / self.width))
        while row >= len(self.sums):
            half = len(self.sums) // 2
            self.sums[:half] = self.sums[0::2] + self.sums[1::2]
            self.sums[half:] = 0.0
            self.width *= 2
            self.num_used = (self.num_used + 1) // 2
            row = max(0, math.floor(at / self.width))
        self.num_used = max(self.num_used, row + 1)
        return row


def coarsen(values: Float64Array, num_bins: int) -> Float64Array:
    """Sum neighbouring rows so that at most `num_bins` are left; the last may hold fewer. [rows, columns]"""
    factor = max(1, math.ceil(len(values) / num_bins))
    padding = -len(values) % factor
    padded = np.concatenate([values, np.zeros((padding, *values.shape[1:]))])
    summed: Float64Array = padded.reshape(-1, factor, *values.shape[1:]).sum(axis=1)
    return summed

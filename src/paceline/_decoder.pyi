from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.types import Float32Array, Int32Array, Int64Array, UInt64Array

def has_octet_dot() -> bool: ...

Layer = tuple[
    Float32Array, Float32Array | None, Float32Array, Float32Array | None, Float32Array, Float32Array
]

class Head:
    def __init__(
        self,
        fused: Float32Array,
        layer: Layer,
        cos: Float32Array,
        sin: Float32Array,
        eps: float,
        scaling: float,
        num_kv_heads: int,
        max_requests: int,
        storage: str,
    ) -> None: ...
    def fuse(self, x: Float32Array, num_threads: int, made: Float32Array) -> None: ...
    def run(
        self,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        x: Float32Array,
        num_threads: int,
        hidden: Float32Array,
    ) -> None: ...
    def copy_row(self, source: int, target: int, known: int, count: int) -> None: ...

class Decoder:
    def __init__(
        self,
        embedding: Float32Array,
        head: Float32Array,
        norm: Float32Array,
        layers: Sequence[Layer],
        cos: Float32Array,
        sin: Float32Array,
        eps: float,
        scaling: float,
        num_kv_heads: int,
        max_requests: int,
        storage: str,
    ) -> None: ...
    def feed(
        self,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        ids: Int64Array,
        num_threads: int,
        logits: Float32Array,
    ) -> None: ...
    def copy_row(self, source: int, target: int, known: int, count: int) -> None: ...
    def grow(
        self,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        ids: Int64Array,
        keys: UInt64Array,
        temperatures: Float32Array,
        limits: Int64Array,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        confidence_edges: Float32Array,
        margin_edges: Float32Array,
        floor: float,
        level_costs: Float32Array | None,
        num_threads: int,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        cells: Int32Array,
        rivals: Int32Array,
        probes: Int32Array,
        failed: NDArray[np.bool_],
    ) -> None: ...

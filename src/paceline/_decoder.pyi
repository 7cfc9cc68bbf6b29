from collections.abc import Sequence

from paceline.types import Float32Array, Int64Array

class Decoder:
    def __init__(
        self,
        embedding: Float32Array,
        head: Float32Array,
        norm: Float32Array,
        layers: Sequence[
            tuple[
                Float32Array,
                Float32Array | None,
                Float32Array,
                Float32Array | None,
                Float32Array,
                Float32Array,
            ]
        ],
        cos: Float32Array,
        sin: Float32Array,
        eps: float,
        scaling: float,
        num_kv_heads: int,
    ) -> None: ...
    def decode(
        self,
        ids: Int64Array,
        rows: Int64Array,
        positions: Int64Array,
        last: Int64Array,
        keys: Sequence[Float32Array],
        values: Sequence[Float32Array],
        logits: Float32Array,
    ) -> None: ...

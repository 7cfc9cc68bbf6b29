from paceline.dice import UInt32Array
from paceline.types import Float32Array, Int64Array, UInt64Array

def sample(
    logits: Float32Array,
    keys: UInt64Array,
    positions: Int64Array,
    temperatures: Float32Array,
    out: Int64Array,
) -> int: ...
def propose(
    logits: Float32Array,
    keys: UInt64Array,
    positions: Int64Array,
    temperatures: Float32Array,
    sharpness: float,
    tokens: Int64Array,
    log_q: Float32Array,
    margins: Float32Array,
    rivals: Int64Array,
) -> int: ...
def gumbel(keys: UInt64Array, positions: Int64Array, tokens: UInt32Array, out: Float32Array) -> None: ...

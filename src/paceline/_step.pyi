from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.types import Float32Array, Float64Array, Int32Array, Int64Array

def table_of(lists: list[Sequence[int]]) -> Int32Array: ...
def joined(lists: list[list[int]], counts: NDArray[np.bool_]) -> tuple[Int32Array, Int32Array]: ...
def leading_matches(tokens: Int32Array, lengths: Int32Array, decided: Int32Array) -> Int32Array: ...
def behind(values: Float32Array, ahead: Int32Array) -> Float32Array: ...
def count_outcomes(
    cells: Int32Array, seen: Int32Array, right: Int32Array, num_cells: int
) -> tuple[Float64Array, Float64Array]: ...
def count_wins(proposals: Int32Array, targets: Int32Array) -> tuple[Float64Array, int]: ...
def path_probability(num_tokens: Int32Array, acceptance: Float32Array) -> Float32Array: ...
def standing(
    scheduled: Int64Array,
    num_drafts: Int64Array,
    first: Int64Array,
    winners: Int64Array,
    accepted: Int64Array,
    computed: Int32Array,
    tokens: Int32Array,
    requests: Int64Array,
    stands: NDArray[np.bool_],
) -> tuple[Int64Array, Int64Array, Int64Array, Int32Array, Int32Array]: ...

from paceline.types import Float32Array, Int32Array, Int64Array, UInt64Array

NUM_CELLS: int
MAX_DEPTH: int
PROBABILITY_EDGES: list[float]
MARGIN_EDGES: list[float]

class SuffixForest:
    def __init__(self, max_depth: int, shared_depth: int, max_bytes: int, num_threads: int) -> None: ...
    def open_group(self, group: int, prompt: Int32Array) -> None: ...
    def append(self, group: int, response: int, tokens: Int32Array) -> None: ...
    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None: ...
    def resync(self, group: int, response: int, tokens: Int32Array) -> None: ...
    def close_response(self, group: int, response: int) -> None: ...
    def drop_group(self, group: int) -> None: ...
    def clear(self) -> None: ...
    def draft(
        self,
        groups: Int64Array,
        responses: Int64Array,
        keys: UInt64Array,
        positions: Int64Array,
        temperatures: Float32Array,
        max_tokens: Int32Array,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        cells: Int32Array,
        probes: Int32Array,
        /,
    ) -> None: ...
    def draft_later(
        self,
        grown_groups: Int64Array,
        grown_responses: Int64Array,
        offsets: Int32Array,
        grown_tokens: Int32Array,
        groups: Int64Array,
        responses: Int64Array,
        keys: UInt64Array,
        positions: Int64Array,
        temperatures: Float32Array,
        max_tokens: Int32Array,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        cells: Int32Array,
        probes: Int32Array,
        path_tokens: Int32Array,
        path_num_tokens: Int32Array,
        path_acceptance: Float32Array,
        path_cells: Int32Array,
        /,
    ) -> None: ...
    def settle(self) -> None: ...
    def draft_paths(
        self,
        groups: Int64Array,
        responses: Int64Array,
        keys: UInt64Array,
        positions: Int64Array,
        temperatures: Float32Array,
        max_tokens: Int32Array,
        sharpness: float,
        calibration: Float32Array,
        floor: float,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        cells: Int32Array,
        /,
    ) -> None: ...
    def count(self, group: int, context: Int32Array) -> int: ...
    def count_shared(self, context: Int32Array) -> int: ...
    def escapes(self) -> list[float]: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...

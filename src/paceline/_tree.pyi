from paceline.types import Float32Array, Int32Array, Int64Array

class DraftTrees:
    def __init__(self, num_sources: int, max_nodes: int, max_trunk: int) -> None: ...
    def open(self, response: int, position: int) -> None: ...
    def close(self, response: int) -> None: ...
    def clear(self) -> None: ...
    def advance(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None: ...
    def add(
        self,
        source: int,
        responses: Int64Array,
        starts: Int64Array,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        anew: bool,
        /,
    ) -> None: ...
    def best(
        self,
        responses: Int64Array,
        positions: Int64Array,
        limits: Int32Array,
        tokens: Int32Array,
        num_tokens: Int32Array,
        acceptance: Float32Array,
        sources: Int32Array,
        /,
    ) -> None: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_responses(self) -> int: ...

PANEL: int
HAS_DOT: bool

def multiply(
    dot: bool, x: int, rows: int, inputs: int, packed: int, bias: int, outputs: int, y: int, threads: int
) -> None: ...
def serve_torch(library: str) -> None: ...

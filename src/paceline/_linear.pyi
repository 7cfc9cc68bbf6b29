PANEL: int

def multiply(
    x: int, rows: int, inputs: int, packed: int, bias: int, outputs: int, y: int, threads: int
) -> None: ...

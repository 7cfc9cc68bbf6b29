PANEL: int
HAS_DOT: bool

def serve_torch(library: str) -> None: ...

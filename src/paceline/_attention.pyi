IS_SUPPORTED: bool
PANEL_TOKENS: int
PANEL_SIZE: int

def serve_torch(library: str) -> None: ...

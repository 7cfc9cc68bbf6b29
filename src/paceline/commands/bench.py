def bench() -> None:
    """Soon."""

def doctor() -> None:
    """Soon."""

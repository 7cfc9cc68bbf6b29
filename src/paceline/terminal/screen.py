"""Where long work tells how it goes: no reader that goes away, and no full disk behind it, ends that work."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console


class Screen:
    """A text file, but what it does not take is dropped. Everything else is the file's."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write it, or not. Returns its length."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits, or not."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def error_console(**options: Any) -> Console:
    """A console on standard error for long work. options: `Console`'s."""
    return Console(file=Screen(sys.stderr), **options)  # type: ignore[arg-type]

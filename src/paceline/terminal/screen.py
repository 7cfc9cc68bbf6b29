"""Where long work tells how it goes: no reader that goes away, and no full disk behind it, ends that work."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console


class Screen:
    """A text file that is given up where it fails: from then on it takes everything and keeps nothing.

    Its file descriptor leads to nowhere then, or what its buffer still holds would raise when it is flushed. Everything
    else is the file's.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write it at once, or not. Returns its length."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            self._give_up()
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def _give_up(self) -> None:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def error_console(**options: Any) -> Console:
    """A console on standard error for long work. options: `Console`'s."""
    return Console(file=Screen(sys.stderr), **options)  # type: ignore[arg-type]

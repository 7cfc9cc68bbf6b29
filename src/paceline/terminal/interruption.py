"""Ctrl-C, SIGTERM and a terminal that is closed: asked for at any time, obeyed where what has been done can be kept."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ANSWER = b"\nstopping as soon as the work in hand is kept; once more ends it at once\n"


class Interrupted(KeyboardInterrupt):
    """Raised by `Interruption.check`; not an Exception, so that no library swallows it."""


class Interruption:
    """Context manager that turns the first signal into a wish; a second one ends the process as usual.

    But for SIGHUP, of which a closed terminal sends several, and which stays ignored where it was (nohup). Enter it in
    the main thread.
    """

    def __init__(self, tell_fd: int = 2) -> None:
        """tell_fd: file descriptor that the answer to the signal goes to."""
        self.wanted = False
        self._tell_fd = tell_fd
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        if (hangup := signal.getsignal(signal.SIGHUP)) is not signal.SIG_IGN:
            self._before[signal.SIGHUP] = hangup
            signal.signal(signal.SIGHUP, self._note_hangup)
        return self

    def _note_hangup(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()
        with contextlib.suppress(OSError):  # nobody may be there any more to read it
            os.write(self._tell_fd, _ANSWER)  # a handler must not print: it may have interrupted a print

    def _restore(self) -> None:
        for number in SIGNALS:
            if (handler := self._before.pop(number, None)) is not None:
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.wanted:
            raise Interrupted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if (hangup := self._before.pop(signal.SIGHUP, None)) is not None:
            signal.signal(signal.SIGHUP, hangup)

"""A helping process beside this one, started again when it dies: a draft server, a draft worker.

A process that cannot be, or that always dies at once, is gone without: it is a help, and nothing depends on it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.owned_folder import MACHINE, OwnedFolder, remove_leftovers

LOGGER = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket."""

LEAST_LIFE_S = 2.0
"""A process that ended sooner, and was not killed, failed to start."""

MAX_FAILED_STARTS = 5
"""So many in a row, and it is given up."""


SOCKETS = "paceline-sockets-"
"""What names of their folders begin with."""


def make_socket_folder(name: str) -> OwnedFolder | None:
    """A new folder for a socket of this name: in the first place for temporary files whose path a socket can have.

    What killed processes have left there is removed.
    """
    for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        sample = os.path.join(base, f"{SOCKETS}{MACHINE}-12345678", name)
        if len(os.fsencode(sample)) <= MAX_PATH_BYTES and os.access(base, os.W_OK):
            remove_leftovers(Path(base), SOCKETS)
            with suppress(OSError):  # no room, or a file system without locks
                return OwnedFolder(Path(base), SOCKETS)
    return None


class ChildProcess:
    """Keeps a Python module running in a process of its own. Close it."""

    def __init__(
        self,
        what: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        least_life_s: float = LEAST_LIFE_S,
        has_worked: Callable[[int], bool] | None = None,
    ) -> None:
        """what: its name in warnings. environment: beside that of this process. least_life_s: see `LEAST_LIFE_S`.
        has_worked: whether it has done anything since a time, nanoseconds of `time.time_ns`: one that ended before, and
        was not killed, failed to start however long it lived, as one may that is stopped for most of its life.
        """
        self._what, self._least_life_s, self._has_worked = what, least_life_s, has_worked
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self.num_starts = 0
        self._num_failed = 0
        self._ended_s: float | None = None
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the present one."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the present one has."""
        return self._process.poll() is not None

    def core_s(self) -> float | None:
        """Processor time that the present one has used, seconds; None where it has ended."""
        import psutil

        if self.has_ended:
            return None
        try:
            used = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return None
        return float(used.user + used.system)

    def check(self) -> None:
        """Start it again if it has ended: at once, but with growing pauses, and in the end not, where it fails to."""
        if not self.has_ended or self._num_failed == MAX_FAILED_STARTS:
            return
        now_s = time.monotonic()
        if self._ended_s is None:
            self._ended_s = now_s
            self._num_failed = self._num_failed + 1 if self._has_failed(now_s) else 0
            if self._num_failed == MAX_FAILED_STARTS:
                LOGGER.warning(
                    "the %s ended %d times before it had done anything: going on without",
                    self._what,
                    self._num_failed,
                )
                return
        if now_s - self._ended_s >= (2.0 ** (self._num_failed - 2) if self._num_failed else 0.0):
            try:
                self._process = self._start()
            except OSError as error:  # no memory, or no room for a process: it is a help
                LOGGER.warning("the %s cannot be started again: %s", self._what, error.strerror)
                self._num_failed, self._ended_s = min(self._num_failed + 1, MAX_FAILED_STARTS), now_s

    def _has_failed(self, now_s: float) -> bool:
        """Whether the present one, which has ended, failed to start."""
        if self._process.returncode == -signal.SIGKILL:
            return False
        is_early = now_s - self._started_s < self._least_life_s
        return is_early or (self._has_worked is not None and not self._has_worked(self._started_ns))

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, stopped or not; `check` starts another."""
        self._process.kill()

    def close(self) -> None:
        """End it for good."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        self._started_s, self._started_ns, self._ended_s = time.monotonic(), time.time_ns(), None
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=self._environment)

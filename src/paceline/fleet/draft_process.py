"""The fleet's own draft server: a process beside the driver, started again when it dies.

A server that cannot be, or that always dies at once, is gone without: it is a help, and nothing waits for it. Run as a
module it is that process. It ends with its parent, so that a killed driver leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOGGER = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket."""

LEAST_LIFE_S = 2.0
"""A server that ended sooner, and was not killed, failed to start."""

MAX_FAILED_STARTS = 5
"""So many in a row, and it is given up."""


def start_draft_process() -> DraftProcess | None:
    """The server, in the first folder for temporary files whose path a socket can have; None without one."""
    for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        sample = os.path.join(base, "paceline-12345678", "drafts")
        if len(os.fsencode(sample)) <= MAX_PATH_BYTES and os.access(base, os.W_OK):
            return DraftProcess(Path(tempfile.mkdtemp(prefix="paceline-", dir=base)))
    LOGGER.warning("no draft server: no folder for its socket; each worker drafts from its own responses")
    return None


class DraftProcess:
    """Keeps a draft server alive at one address. Close it."""

    def __init__(self, folder: Path) -> None:
        """folder: for its socket; removed in the end."""
        self._folder = folder
        self.address = f"ipc://{self._folder / 'drafts'}"
        """The same after every start: clients find it again by themselves."""
        self.num_starts = 0
        self._num_failed = 0
        self._ended_s: float | None = None
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the present server."""
        return self._process.pid

    def check(self) -> None:
        """Start it again if it has ended: at once, but with growing pauses, and in the end not, where it fails to."""
        if self._process.poll() is None or self._num_failed == MAX_FAILED_STARTS:
            return
        now_s = time.monotonic()
        if self._ended_s is None:
            self._ended_s = now_s
            is_killed = self._process.returncode == -signal.SIGKILL
            has_failed = now_s - self._started_s < LEAST_LIFE_S and not is_killed
            self._num_failed = self._num_failed + 1 if has_failed else 0
            if self._num_failed == MAX_FAILED_STARTS:
                LOGGER.warning("the draft server ended %d times at once: going on without", self._num_failed)
                return
        if now_s - self._ended_s >= (2.0 ** (self._num_failed - 2) if self._num_failed else 0.0):
            self._process = self._start()

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        self._started_s, self._ended_s = time.monotonic(), None
        command = [sys.executable, "-m", "paceline.fleet.draft_process", self.address, str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def main(address: str, parent: int) -> None:
    """Serve until the parent is gone. Ctrl-C is the parent's business."""
    from paceline.drafting.server import DraftServer

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = DraftServer(address, secret=None)
    while os.getppid() == parent:
        server.serve(forever=False)
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

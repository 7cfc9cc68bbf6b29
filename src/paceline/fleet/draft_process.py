"""The fleet's own draft server: a process beside the driver, started again when it dies.

Run as a module it is that process. It ends with its parent, so that a killed driver leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class DraftProcess:
    """Keeps a draft server alive at one address. Close it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.address = f"ipc://{self._folder / 'drafts'}"
        """The same after every start: clients find it again by themselves."""
        self.num_starts = 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the present server."""
        return self._process.pid

    def check(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._process = self._start()

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
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

"""The fleet's own draft server: a process beside the driver, started again when it dies (drafting/child_process.py).

Run as a module it is that process. It ends with its parent, so that a killed driver leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

from paceline.drafting.child_process import ChildProcess, make_socket_folder
from paceline.owned_folder import OwnedFolder

LOGGER = logging.getLogger(__name__)


def start_draft_process(secret_file: str | None = None) -> DraftProcess | None:
    """The server; None where there is no folder for its socket. secret_file: of the secret that its clients have."""
    folder = make_socket_folder("drafts")
    if folder is None:
        LOGGER.warning("no draft server: no folder for its socket; each worker drafts from its own responses")
        return None
    return DraftProcess(folder, secret_file)


class DraftProcess:
    """Keeps a draft server alive at one address. Close it."""

    def __init__(self, folder: OwnedFolder, secret_file: str | None = None) -> None:
        """folder: for its socket; removed in the end. secret_file: as for `start_draft_process`."""
        self._folder = folder
        self.address = f"ipc://{folder.path / 'drafts'}"
        """The same after every start: clients find it again by themselves."""
        module = "paceline.fleet.draft_process"
        self.child = ChildProcess("draft server", module, (self.address, str(os.getpid()), secret_file or ""))

    def close(self) -> None:
        """End the server."""
        self.child.close()
        self._folder.close()


def main(address: str, parent: int, secret_file: str) -> None:
    """Serve until the parent is gone. Ctrl-C is the parent's business."""
    from paceline.drafting.server import DraftServer
    from paceline.drafting.wire import read_secret

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server = DraftServer(address, secret=read_secret(secret_file or None))
    while os.getppid() == parent:
        server.serve(forever=False)
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

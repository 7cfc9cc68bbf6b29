"""Folders for what lives as long as a process: sockets, a pool in shared memory. What a killed one leaves is removed.

A folder is locked by its owner, so that others can tell when that has died. Another machine that shares the file system
cannot, so names tell the machine's, since it was started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


class OwnedFolder:
    """A new folder that is locked by this process as long as it lives. Close it.

    It gets the name that `remove_leftovers` looks for once it is locked: there is no moment at which it looks left.
    """

    def __init__(self, base: Path, prefix: str) -> None:
        """prefix: of its name. Raises OSError if there can be none below `base`."""
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}{MACHINE}-", dir=base))
        self._fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = hidden.rename(base / hidden.name[1:])
        except OSError:
            os.close(self._fd)
            hidden.rmdir()
            raise

    def close(self) -> None:
        """Remove the folder and what is in it; a second call does nothing."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_leftovers(base: Path, prefix: str) -> None:
    """Remove the folders with this prefix whose owner, on this machine, has died: nobody holds the lock."""
    for folder in base.glob(f"{prefix}{MACHINE}-*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone meanwhile
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)

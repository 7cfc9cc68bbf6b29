"""The one way in which Paceline writes a file that grows: the record, responses, progress journals, decision logs.

The rules, whoever writes what:
* One process writes a file; another one that opens it is refused. The lock ends with the process, however that ends.
* What `append` takes is in the file whole, or not at all: where the disk refuses, the part that it took is cut off
  again, nothing that was written before is touched, and RecordError names file and remedy. The next `append` may work.
* Where fsync fails, RecordError says how many of the last pieces the disk may not have; nothing is cut off.
* What `append` has written survives the end of the process at once, and of the machine after at most `sync_s` (fsync),
  `sync` or `close`; with `sync_s` None the machine's end may cost anything.
* A machine that goes down may leave a torn end. Whoever continues a file reads it to the last whole piece, which is a
  line, or a piece behind its length, and cuts off the rest (`cut`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import RecordError

SYNC_S = 5.0


def sync(path: Path) -> None:
    """Ask the disk to keep a file, or which names a folder has. Raises OSError where it refuses; some file systems
    cannot do that for a folder, and keep it all the same.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if not path.is_dir() or error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)


class AppendFile:
    """A file that this process alone appends to. Use `open` or `create`; close it."""

    def __init__(self, path: Path, fd: int, what: str, remedy: str, sync_s: float | None) -> None:
        self.path = path
        self.size = os.fstat(fd).st_size
        """Bytes of what is whole."""
        self.num_appended = 0
        """Pieces that this process has written."""
        self._fd = fd
        self._what, self._remedy = what, remedy
        self._sync_s = sync_s
        self._synced_s, self._num_synced = time.monotonic(), 0
        self._is_torn = False

    @classmethod
    def open(cls, path: Path, what: str, remedy: str, *, sync_s: float | None = SYNC_S) -> Self:
        """Open a file, or create it, its folder too.

        Args:
            what: the pieces by name, in plural, for errors.
            remedy: what to do when the disk is full, a sentence or two.
            sync_s: see above.

        Raises RecordError if the file cannot be opened, or if another process writes it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls._lock(path, os.O_CREAT, what, remedy, sync_s)
        except OSError as error:
            raise RecordError(f"cannot write to {path}: {error.strerror}; choose another place") from error

    @classmethod
    def create(cls, path: Path, what: str, remedy: str, *, sync_s: float | None = SYNC_S) -> Self:
        """Create a file that is not there yet. Raises OSError as `os.open` does, FileExistsError among them."""
        return cls._lock(path, os.O_CREAT | os.O_EXCL, what, remedy, sync_s)

    @classmethod
    def _lock(cls, path: Path, flags: int, what: str, remedy: str, sync_s: float | None) -> Self:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino != os.fstat(fd).st_ino:  # its writer has just put another one in its place
                raise BlockingIOError
        except BlockingIOError as error:
            os.close(fd)
            raise RecordError(
                f"{path} is being written by another process: wait for it, or choose another place"
            ) from error
        except OSError:
            os.close(fd)
            raise
        return cls(path, fd, what, remedy, sync_s)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._fd >= 0

    def append(self, piece: bytes) -> None:
        """Write one piece. Raises RecordError if the disk refuses it, and then nothing of it is in the file."""
        if not self.is_open:
            raise RecordError(f"{self.path} is closed: open it again to go on")
        rest = memoryview(piece)
        try:
            self._heal()
        except OSError as error:
            raise self._lost(error) from error
        try:
            while rest:
                self._is_torn = True
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._is_torn = len(rest) < len(piece)
            self._cut_torn_end()
            raise self._lost(error) from error
        self._is_torn = False
        self.size += len(piece)
        self.num_appended += 1
        if self._sync_s is not None and time.monotonic() - self._synced_s >= self._sync_s:
            self.sync()

    def rename(self, path: Path) -> None:
        """Put the file in the place of another one. Raises RecordError if that cannot be."""
        try:
            self.path.replace(path)
        except OSError as error:
            raise self._lost(error) from error
        self.path = path

    def cut(self, size: int) -> None:
        """Cut the file off behind so many bytes. Raises RecordError if the disk refuses."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._lost(error) from error
        self.size = size

    def sync(self) -> None:
        """Have the disk keep what was written. Raises RecordError if it does not: what is not on it by now may be lost
        whatever a later call says.
        """
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise RecordError(
                f"the disk does not keep what was written to {self.path}: {error.strerror}; of the {self.num_appended} "
                f"{self._what} that this process has written, the last {self.num_appended - self._num_synced} may be "
                f"missing or damaged. Look at the disk, and at the end of the file. {self._remedy}"
            ) from error
        self._synced_s, self._num_synced = time.monotonic(), self.num_appended

    def close(self) -> None:
        """Have the disk keep everything, and close; a second call does nothing."""
        if not self.is_open:
            return
        try:
            if self._sync_s is not None:
                self.sync()
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _heal(self) -> None:
        """Cut off a torn end that the disk has not let go before."""
        if self._is_torn:
            os.ftruncate(self._fd, self.size)
            self._is_torn = False

    def _cut_torn_end(self) -> None:
        try:
            self._heal()
        except OSError:  # it is cut off before the next piece, or by who continues the file
            return

    def _lost(self, error: OSError) -> RecordError:
        return RecordError(
            f"cannot write to {self.path}: {error.strerror}; the {self.num_appended} {self._what} that this process "
            f"has written before are whole. {self._remedy}"
        )


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, newlines included; a torn last one is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield line

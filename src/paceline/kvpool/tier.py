"""One tier of the KV pool: a directory of entries, bounded in bytes, used by several processes at once.

There is no server and no index: the directory is the index. Entries are files named by response; their modification
time is their urgency (pool.py). Invariants:

* An entry appears whole or not at all: it is written beside its place and renamed.
* The sum of all files stays within the limit: room is made and a new file takes its full length under `exclusive()`, a
  file lock that the kernel frees when a process dies.
* A file that is being written is locked by its writer; one that nobody has locked was left by a crash and is removed.
* The directory belongs to those who have it open: the first to open it and the last to close it empty it.

Every method but the constructor may raise OSError; pool.py turns that into a miss or an entry that is not saved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

ENTRY, PART = ".kv", ".part"
LOCK_WAIT_S = 2.0
"""Longest wait for the other processes' turn; an entry that cannot be saved by then is not saved."""

_LOCK_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Resident:
    """An entry as the directory shows it."""

    response: str
    num_bytes: int
    urgency: int


class Part:
    """A file that is being written."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._fd, name = tempfile.mkstemp(suffix=PART, dir=directory)
        self.path = Path(name)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, num_bytes)  # counts for the bound from now on
        except OSError:
            self.discard()
            raise

    def write(self, pieces: Sequence[memoryview | bytes], offset: int) -> int:
        """Write the pieces one after another from `offset`; returns the offset behind them."""
        wanted = sum(map(len, pieces))
        if os.pwritev(self._fd, pieces, offset) != wanted:
            raise OSError(errno.ENOSPC, "the entry was written in part only", str(self.path))
        return offset + wanted

    def settle(self, path: Path, urgency: int) -> None:
        """Put the file in its place."""
        os.utime(self._fd, ns=(urgency, urgency))
        self.path.replace(path)
        os.close(self._fd)
        self._fd = -1

    def discard(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


class Tier:
    """One directory, opened by one process. Raises ConfigError when the directory cannot be used."""

    def __init__(self, directory: Path, limit_bytes: int, *, is_memory: bool) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._is_memory = is_memory
        self._owner = os.getpid()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._users = os.open(directory / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._empty_if_alone()
            fcntl.flock(self._users, fcntl.LOCK_SH)
        except OSError as error:
            raise ConfigError(
                f"the KV pool cannot use {directory} ({error.strerror}): give a directory that this user can write "
                "to, on one machine, for this run alone"
            ) from error

    def _empty_if_alone(self) -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.clear()

    def close(self) -> None:
        """Leave the directory, emptying it if nobody else has it open; nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._empty_if_alone()
        os.close(self._users)
        os.close(self._lock)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the other processes from making room, placing and dropping. Raises TimeoutError, an OSError."""
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self.directory} was locked for {LOCK_WAIT_S} s") from None
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    # -- under exclusive()

    def take_stock(self) -> tuple[list[Resident], int]:
        """The entries, least urgent first, and the bytes of all files; leftovers of crashed writers are removed.

        Equal urgencies go by name.
        """
        residents, used = [], 0
        with os.scandir(self.directory) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    stem, suffix = os.path.splitext(file.name)
                    if suffix == PART and not _is_locked(file.path):
                        os.unlink(file.path)
                    elif suffix in (ENTRY, PART):
                        stat = file.stat()
                        used += stat.st_size
                        if suffix == ENTRY:
                            residents.append(Resident(stem, stat.st_size, stat.st_mtime_ns))
        residents.sort(key=lambda resident: (resident.urgency, resident.response))
        return residents, used

    def begin(self, num_bytes: int) -> Part:
        """A new file of this length. Room must have been made."""
        return Part(self.directory, num_bytes)

    def settle(self, part: Part, response: str, urgency: int) -> None:
        """Make a written file the response's entry, in place of an older one."""
        part.settle(self._path(response), urgency)

    # -- at any time

    def clear(self) -> None:
        """Remove all entries, and the leftovers of crashed writers."""
        with self.exclusive():
            for resident in self.take_stock()[0]:
                self.remove(resident.response)

    def read(self, response: str) -> memoryview | None:
        """The bytes of an entry, which stay readable when it is removed; None if there is none.

        From memory they are mapped. From disk they are read: an error of the disk is then an exception, not a signal.
        """
        try:
            fd = os.open(self._path(response), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(fd).st_size
            if self._is_memory and size:
                return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
            data = bytearray(size)
            done = 0
            while done < size and (got := os.preadv(fd, [memoryview(data)[done:]], done)):
                done += got
            return memoryview(data)[:done]
        finally:
            os.close(fd)

    def measure(self, response: str) -> int | None:
        """Bytes of an entry; None if there is none."""
        try:
            return self._path(response).stat().st_size
        except FileNotFoundError:
            return None

    def mark(self, response: str, urgency: int) -> None:
        """Change an entry's urgency, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(response), ns=(urgency, urgency))

    def remove(self, response: str) -> bool:
        """Remove an entry; returns whether there was one."""
        try:
            self._path(response).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, response: str) -> Path:
        return self.directory / f"{response}{ENTRY}"


def _is_locked(path: str) -> bool:
    """Whether a writer has a file locked; the lock that is taken to find out goes with the descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

"""One tier of the KV pool: a directory of entries, bounded in bytes, used by several processes at once.

There is no server and no index: the directory is the index. Entries are files named by response; their modification
time is their urgency (pool.py). The lock file counts bytes, so that the directory is listed only where there may be no
room, and after as many new files as it had entries. Invariants:

* An entry appears whole or not at all: it is written beside its place and renamed.
* The sum of all files stays within the limit: room is made and a new file takes its full length under `exclusive()`, a
  file lock that the kernel frees when a process dies.
* The lock file counts at least the bytes of all files: new ones are added as they begin, and only listing forgets those
  that are gone.
* A file that is being written is locked by its writer; one that nobody has locked was left by a crash and is removed.
* The directory belongs to those who have it open: the first to open it and the last to close it empty it.

Every method but the constructor may raise OSError; pool.py turns that into a miss or an entry that is not saved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError

ENTRY, PART = ".kv", ".part"
LOCK_WAIT_S = 2.0
"""Longest wait for the other processes' turn; an entry that cannot be saved by then is not saved."""

_LOCK_POLL_S = 0.0005
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Resident:
    """An entry as the directory shows it. One that was replaced or whose urgency changed is not equal."""

    response: str
    num_bytes: int
    urgency: int
    file: int
    """The file's number in its file system."""


class Part:
    """A file that is being written."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._fd, name = tempfile.mkstemp(suffix=PART, dir=directory)
        self.path = Path(name)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, num_bytes)  # counts for the bound from now on
        except OSError:
            self.close()
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

    def close(self) -> None:
        """Remove the file, unless it is in its place."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


class EntryFile:
    """An entry that was opened for reading, which stays readable when it is removed.

    It is copied, from memory too: what was checked stays as it was, whatever becomes of the file. In a mapping, damage
    between check and use would go unseen, and one that was cut short would be a signal that ends the process.
    """

    def __init__(self, path: Path, *, is_memory: bool) -> None:
        self.is_memory = is_memory
        """Whether it lies in shared memory."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.num_bytes = os.fstat(self._fd).st_size
        except OSError:
            self.close()
            raise

    def read(self, start: int, end: int) -> memoryview:
        """These bytes, or those of them that there are. They outlive the file."""
        end = min(end, self.num_bytes)
        data = np.empty(max(end - start, 0), np.uint8).data
        done = 0
        while done < len(data) and (got := os.preadv(self._fd, [data[done:]], start + done)):
            done += got
        return data[:done]

    def close(self) -> None:
        """Read nothing more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EntryFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Tier:
    """One directory, opened by one process. Raises ConfigError when the directory cannot be used."""

    def __init__(self, directory: Path, limit_bytes: int, *, is_memory: bool) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._is_memory = is_memory
        self._owner = os.getpid()
        self._lock = self._users = -1
        self._num_unlisted = 0  # files that may begin before the directory is listed again
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_size()
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._users = os.open(directory / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._empty_if_alone()
            _take(self._users, fcntl.LOCK_SH, directory / "users")
        except OSError as error:
            self._release()
            raise ConfigError(
                f"the KV pool cannot use {directory} ({error.strerror}): give a directory that this user can write "
                "to, on one machine, for this run alone"
            ) from error

    def _check_size(self) -> None:
        stats = os.statvfs(self.directory)
        size = stats.f_frsize * stats.f_blocks
        if 0 < size < self.limit_bytes:
            name = "memory_bytes" if self._is_memory else "disk_bytes"
            raise ConfigError(
                f"kv_pool.{name}={self.limit_bytes} is more than the file system of {self.directory} has, {size} "
                "bytes: lower it, or enlarge the file system (in a container, docker run --shm-size for /dev/shm)"
            )

    def _empty_if_alone(self) -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.clear()

    def _release(self) -> None:
        for fd in (self._users, self._lock):
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_UN)  # or a forked child would keep what it shares
                os.close(fd)
        self._users = self._lock = -1

    def close(self) -> None:
        """Leave the directory, emptying it if nobody else has it open; nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._empty_if_alone()
        self._release()

    def is_same_as(self, other: Tier) -> bool:
        """Whether both have one directory, under whatever names."""
        return os.path.samestat(os.stat(self.directory), os.stat(other.directory))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the other processes from making room and placing. Raises TimeoutError, an OSError."""
        _take(self._lock, fcntl.LOCK_EX, self.directory)
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
                            residents.append(_resident(stem, stat))
        residents.sort(key=lambda resident: (resident.urgency, resident.response))
        self._num_unlisted = len(residents)
        with contextlib.suppress(OSError):  # a full file system: what stands there is no less
            self._write_count(used)
        return residents, used

    def has_room(self, num_bytes: int, limit_bytes: int) -> bool:
        """Whether a new file stays within the limit by the count alone. If not, `take_stock` tells. Where there is room
        it looks at all entries once for as many new files.
        """
        return self._num_unlisted > 0 and self._read_count() + num_bytes <= limit_bytes

    def begin(self, num_bytes: int) -> Part:
        """A new file of this length. Room must have been made."""
        self._num_unlisted -= 1
        self._write_count(self._read_count() + num_bytes)
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

    def open_entry(self, response: str) -> EntryFile | None:
        """An entry to be read and closed; None if there is none."""
        try:
            return EntryFile(self._path(response), is_memory=self._is_memory)
        except FileNotFoundError:
            return None

    def find(self, response: str) -> Resident | None:
        """What the directory shows of an entry; None if there is none."""
        try:
            return _resident(response, self._path(response).stat())
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

    def _read_count(self) -> int:
        return int.from_bytes(os.pread(self._lock, _COUNT_BYTES, 0), "little")

    def _write_count(self, num_bytes: int) -> None:
        os.pwrite(self._lock, num_bytes.to_bytes(_COUNT_BYTES, "little"), 0)

    def _path(self, response: str) -> Path:
        return self.directory / f"{response}{ENTRY}"


def _resident(response: str, stat: os.stat_result) -> Resident:
    return Resident(response, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _take(fd: int, how: int, path: Path) -> None:
    """Lock a file. Raises TimeoutError after LOCK_WAIT_S."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                reason = f"locked by another process for {LOCK_WAIT_S} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(path)) from None
            time.sleep(_LOCK_POLL_S)


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

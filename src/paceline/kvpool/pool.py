"""The KV pool: entries of responses in shared memory, and on disk when memory is full (Seer 4.2, 5).

One `KvPool` per process that uses the pool, opened on the same directories: the engines' connectors save and load, the
controller drops what has ended and prefetches what is next. One thread at a time.

* A response has one entry, its newest. It is found again under the same policy version and layout only; what asks for
  it gets the keys and values of the leading tokens that are its own.
* Whatever goes wrong with an entry (missing, damaged, of another version, no room, disk full, lock not to be had) makes
  it a miss, or one that is not saved, and is counted. Nothing but `open` raises.
* When memory is full, the least urgent entries move to disk; when the disk is full, they are dropped. Urgency is a
  time: of the save, or of the prefetch; an entry that was loaded is the least urgent, since its response is running.

Differs from Seer: entries are pulled by the worker that needs them; `prefetch` brings them from disk to memory, not to
a worker.
"""

from __future__ import annotations

import contextlib
import errno
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from paceline.config import KvPoolSettings
from paceline.errors import ConfigError
from paceline.kvpool.entry import (
    Address,
    Header,
    Held,
    check_blocks,
    count_blocks,
    count_shared,
    measure_header,
    read_header,
    write_header,
)
from paceline.kvpool.tier import Part, Resident, Tier
from paceline.types import Int32Array, KvPoolCounters

BlockReader: TypeAlias = Callable[[int], Sequence[memoryview]]
"""The pieces of a block, which lie one after another in the entry, by the block's number within the response."""

LEAST_URGENT = 0
_COPY_BYTES = 1 << 22


class KvPool:
    """The store. `now_ns` gives the time by which urgencies are compared, the same clock in every process."""

    def __init__(
        self,
        directory: str | Path,
        memory_bytes: int,
        disk_directory: str | Path | None = None,
        disk_bytes: int = 0,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the pool, and empty it if nobody else has it open. Raises ConfigError for directories of no use."""
        self._memory = Tier(Path(directory), memory_bytes, is_memory=True)
        self._tiers = [self._memory]
        if disk_directory is not None:
            self._tiers.append(Tier(Path(disk_directory), disk_bytes, is_memory=False))
        self._now_ns = now_ns
        self._counters = KvPoolCounters()
        self._leave = weakref.finalize(self, _close_all, self._tiers)  # at the latest when the process ends

    @classmethod
    def open(cls, settings: KvPoolSettings) -> KvPool:
        """The pool of these settings. Raises ConfigError for another backend or directories of no use."""
        if settings.directory is None:
            raise ConfigError(
                f"kv_pool.backend={settings.backend!r} keeps its entries itself: only 'paceline' can be opened here"
            )
        return cls(settings.directory, settings.memory_bytes, settings.disk_directory, settings.disk_bytes)

    def close(self) -> None:
        """Leave the pool; the last one to leave empties it."""
        self._leave()

    def counters(self) -> KvPoolCounters:
        """What this process has done with the pool."""
        return self._counters

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self._counters, name) + count for name, count in more.items()}
        self._counters = replace(self._counters, **changed)

    # -- save and load

    def save(
        self, address: Address, tokens: Int32Array, block_tokens: int, block_bytes: int, read: BlockReader
    ) -> bool:
        """Save keys and values of `tokens`, which begin with the response's first prompt token.

        Args:
            tokens: at least one. [num_tokens]
            read: called with 0, 1, .. for blocks of block_tokens tokens and block_bytes bytes; again from 0 if the
                entry has to go to the other tier.

        Returns whether the entry is in the pool.
        """
        num_blocks = count_blocks(len(tokens), block_tokens)
        header_bytes = measure_header(len(tokens), num_blocks)

        def write(part: Part) -> None:
            offset, checksums = header_bytes, []
            for index in range(num_blocks):
                pieces = read(index)
                checksums.append(_chain_checksum(pieces))
                offset = part.write(pieces, offset)
            part.write([write_header(address, tokens, checksums, block_tokens, block_bytes)], 0)

        size = header_bytes + num_blocks * block_bytes
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                self._store(tier, address.response, size, self._now_ns(), write)
                self._forget_elsewhere(tier, address.response)
                self._count(saves=1, saved_bytes=size)
                return True
        self._count(failed_writes=1)
        return False

    def _forget_elsewhere(self, tier: Tier, response: str) -> None:
        for other in self._tiers:
            if other is not tier:
                with contextlib.suppress(OSError):
                    other.remove(response)

    def load(self, address: Address, tokens: Int32Array, skip_tokens: int = 0) -> Held | None:
        """Keys and values of the leading tokens of `tokens` that the response's entry has too, checked.

        Args:
            tokens: from the response's first prompt token on. [num_tokens]
            skip_tokens: what the caller has itself, whole blocks; only blocks behind it are read and checked.

        Returns None when there is nothing beyond skip_tokens.
        """
        data = self._read(address.response)
        if data is None:
            self._count(misses=1)
            return None
        header = read_header(data)
        if header is None:
            self._remove_damaged(address.response)
            return None
        shared = count_shared(header.tokens, tokens)
        if header.address != address or not shared:
            self._count(misses=1)
            return None
        return self._hold(header, data, shared, skip_tokens)

    def _hold(self, header: Header, data: memoryview, shared: int, skip_tokens: int) -> Held | None:
        response, first = header.address.response, skip_tokens // header.block_tokens
        end = count_blocks(shared, header.block_tokens)
        blocks = check_blocks(header, data, first, end)
        if blocks is None:
            self._remove_damaged(response)
            return None
        self._mark(response, LEAST_URGENT)
        if shared <= skip_tokens:
            return None
        self._count(hits=1, loaded_bytes=len(blocks) * header.block_bytes)
        return Held(shared, first, blocks)

    def _read(self, response: str) -> memoryview | None:
        # Memory once more at the end: an entry may have moved up from disk between the two looks.
        for tier in (*self._tiers, self._memory):
            with contextlib.suppress(OSError):
                data = tier.read(response)
                if data is not None:
                    return data
        return None

    def _remove_damaged(self, response: str) -> None:
        self._count(misses=1, corrupt=1)
        self.drop(response)

    # -- what the controller does

    def drop(self, *responses: str) -> None:
        """Remove the entries of responses that have ended."""
        with (
            contextlib.suppress(OSError),
            self._memory.exclusive(),
        ):  # nothing moves between the tiers meanwhile
            for response in responses:
                for tier in self._tiers:
                    with contextlib.suppress(OSError):
                        tier.remove(response)

    def clear(self) -> None:
        """Remove all entries: the step has ended, or the weights are new."""
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                tier.clear()

    def prefetch(self, responses: Iterable[str]) -> int:
        """Bring entries that are on disk into memory, for responses in the order of their queue.

        The first ones whose entries fit into memory together become the most urgent, the very first one most of all;
        others make room for them. Returns the number of entries that were moved.
        """
        wanted: dict[str, int] = {}
        room = self._memory.limit_bytes
        for response in responses:
            size = self._measure(response)
            if size is None:
                continue
            if size > room:
                break
            room -= size
            wanted[response] = size
        now_ns = self._now_ns()
        urgencies = {response: now_ns + len(wanted) - place for place, response in enumerate(wanted)}
        for response, urgency in urgencies.items():  # all of them before room is made for the first
            self._mark(response, urgency)
        return sum(self._lift(name, wanted[name], urgencies[name], frozenset(wanted)) for name in wanted)

    def _mark(self, response: str, urgency: int) -> None:
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                tier.mark(response, urgency)

    def _measure(self, response: str) -> int | None:
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                size = tier.measure(response)
                if size is not None:
                    return size
        return None

    def _lift(self, response: str, size: int, urgency: int, keep: frozenset[str]) -> bool:
        """Move an entry from disk to memory, unless it is there; returns whether it was moved."""
        try:
            if self._memory.measure(response) is not None:
                return False
            disk = self._tiers[-1]
            data = disk.read(response)
            if data is None or len(data) != size:
                return False

            def is_current() -> bool:  # neither dropped nor saved anew meanwhile
                return disk.measure(response) == size and self._memory.measure(response) is None

            if self._store(self._memory, response, size, urgency, _copy(data), keep, is_current):
                disk.remove(response)
                self._count(promoted=1)
                return True
        except OSError:
            self._count(failed_writes=1)
        return False

    # -- room

    def _store(
        self,
        tier: Tier,
        response: str,
        size: int,
        urgency: int,
        write: Callable[[Part], None],
        keep: frozenset[str] = frozenset(),
        is_current: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Make room, write a file and put it in its place if it `is_current` still. Raises OSError."""
        with tier.exclusive():
            self._make_room(tier, size, response, keep)
            part = tier.begin(size)
        try:
            write(part)
            with tier.exclusive():
                if is_current():
                    tier.settle(part, response, urgency)
                    return True
        except BaseException:
            part.discard()
            raise
        part.discard()
        return False

    def _make_room(self, tier: Tier, size: int, response: str, keep: frozenset[str]) -> None:
        """Evict until `size` more bytes fit; the response's older entry goes first. Raises OSError."""
        if size > tier.limit_bytes:
            raise OSError(errno.ENOSPC, f"{size} bytes are more than the tier's {tier.limit_bytes}")
        residents, used = tier.take_stock()
        residents.sort(key=lambda resident: resident.response != response)
        for resident in residents:
            if used + size <= tier.limit_bytes:
                return
            if resident.response not in keep:
                if resident.response != response:
                    self._evict(tier, resident)
                tier.remove(resident.response)
                used -= resident.num_bytes
        if used + size > tier.limit_bytes:
            raise OSError(errno.ENOSPC, f"{size} bytes do not fit beside {used} that are in use")

    def _evict(self, tier: Tier, resident: Resident) -> None:
        """An entry has to leave a tier: from memory to disk, or for good. The caller removes it there."""
        if tier is self._memory and len(self._tiers) > 1:
            try:
                data = tier.read(resident.response)
                if data is not None:
                    disk = self._tiers[-1]
                    self._store(disk, resident.response, resident.num_bytes, resident.urgency, _copy(data))
                    self._count(demoted=1)
                    return
            except OSError:
                self._count(failed_writes=1)
        self._count(evicted=1)


def _close_all(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _chain_checksum(pieces: Sequence[memoryview]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _copy(data: memoryview) -> Callable[[Part], None]:
    def write(part: Part) -> None:
        for start in range(0, len(data), _COPY_BYTES):
            part.write([data[start : start + _COPY_BYTES]], start)

    return write

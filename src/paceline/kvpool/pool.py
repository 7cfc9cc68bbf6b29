"""The KV pool: entries of responses in shared memory, and on disk when memory is full (Seer 4.2, 5).

One `KvPool` per process that uses the pool, opened on the same directories: the engines' connectors save and load, the
controller drops what has ended and prefetches what is next. One thread at a time.

* A response has one entry, its newest. It is found again under the same policy version and layout only; what asks for
  it gets the keys and values of the leading tokens that are its own.
* Whatever goes wrong with an entry (missing, damaged, of another version, no room, disk full, lock not to be had) makes
  it a miss, or one that is not saved, and is counted. Nothing but `open` raises.
* When memory is full, the least urgent entries move to disk; when the disk is full too, the least urgent of all are
  dropped. Urgency is a time: of the save, or a while after the prefetch, so that what is saved meanwhile does not take
  the place of what is next; an entry whose response is running is the least urgent.
* Nobody waits while an entry is copied: locks are held to count, to place and to remove.

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
from dataclasses import dataclass, replace
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
from paceline.kvpool.tier import EntryFile, Part, Resident, Tier
from paceline.types import Int32Array, KvPoolCounters

BlockReader: TypeAlias = Callable[[int], Sequence[memoryview]]
"""The pieces of a block, which lie one after another in the entry, by the block's number within the response."""

LEAST_URGENT = 0
PREFETCHED_NS = 10_000_000_000
"""How long after a prefetch its entries are more urgent than what is saved, unless another prefetch comes."""
MAX_TRIES = 8
"""How often room is made anew for one entry, where others take it."""

_COPY_BYTES = 1 << 22


class _NoRoomError(OSError):
    """The tier's bound leaves no room, whoever is evicted."""


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """An entry that needs room in a tier."""

    response: str
    num_bytes: int
    urgency: int
    spares: frozenset[str] = frozenset()
    """Responses whose entries stay."""
    spares_urgent: bool = False
    """Whether more urgent entries stay."""


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
        self._now_ns = now_ns
        self._counters = KvPoolCounters()
        self._leave = weakref.finalize(self, _close_all, self._tiers)  # at the latest when the process ends
        if disk_directory is not None:
            self._add_disk(Path(disk_directory), disk_bytes)

    def _add_disk(self, directory: Path, limit_bytes: int) -> None:
        try:
            self._tiers.append(Tier(directory, limit_bytes, is_memory=False))
            if self._tiers[-1].is_same_as(self._memory):
                raise ConfigError(
                    f"kv_pool.disk_directory={str(directory)!r} is kv_pool.directory under another name: give two "
                    "directories"
                )
        except ConfigError:
            self.close()
            raise

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
                spares_urgent = tier is not self._tiers[-1]
                newcomer = _Newcomer(address.response, size, self._now_ns(), spares_urgent=spares_urgent)
                self._store(tier, newcomer, write)
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
        try:
            with self._open(address.response) as entry:
                return self._check(entry, address, tokens, skip_tokens)
        except OSError:
            self._count(misses=1)
            return None

    def _check(self, entry: EntryFile, address: Address, tokens: Int32Array, skip_tokens: int) -> Held | None:
        header = read_header(entry.read, entry.num_bytes)
        if header is None:
            self._remove_damaged(address.response)
            return None
        shared = count_shared(header.tokens, tokens)
        if header.address != address or not shared:
            self._count(misses=1)
            return None
        return self._hold(entry, header, shared, skip_tokens)

    def _hold(self, entry: EntryFile, header: Header, shared: int, skip_tokens: int) -> Held | None:
        first, end = skip_tokens // header.block_tokens, count_blocks(shared, header.block_tokens)
        if first >= end:
            return None
        data = entry.read(header.start_of(first), header.start_of(end))
        blocks = check_blocks(header, data, first, end)
        if blocks is None:
            self._remove_damaged(header.address.response)
            return None
        if shared <= skip_tokens:
            return None
        self._count(hits=1, disk_hits=not entry.is_memory, loaded_bytes=len(blocks) * header.block_bytes)
        return Held(shared, first, blocks)

    def _open(self, response: str) -> EntryFile:
        """Raises OSError if there is no entry, or none that can be read."""
        # Memory once more at the end: an entry may have moved up from disk between the two looks.
        for tier in (*self._tiers, self._memory):
            with contextlib.suppress(OSError):
                entry = tier.open_entry(response)
                if entry is not None:
                    return entry
        raise FileNotFoundError(errno.ENOENT, "no entry", response)

    def _remove_damaged(self, response: str) -> None:
        self._count(misses=1, corrupt=1)
        self.drop(response)

    # -- what the controller does

    def drop(self, *responses: str) -> None:
        """Remove the entries of responses that have ended. Waits for nobody."""
        for response in responses:
            failed = 0
            for tier in (*self._tiers, self._memory):  # it may move up from disk between the two looks
                try:
                    tier.remove(response)
                except OSError:
                    failed = 1
            self._count(failed_drops=failed)

    def mark_running(self, response: str) -> None:
        """The response goes on, with what was loaded: its entry is the least urgent from now on."""
        self._mark(response, LEAST_URGENT)

    def clear(self) -> None:
        """Remove all entries: the step has ended, or the weights are new."""
        for tier in self._tiers:
            try:
                tier.clear()
            except OSError:
                self._count(failed_drops=1)

    def prefetch(self, responses: Iterable[str], loading: Iterable[str] = ()) -> int:
        """Bring entries that are on disk into memory, for responses in the order of their queue.

        The first ones whose entries fit into memory together become the most urgent, the very first one most of all;
        others make room for them. Returns the number of entries that were moved.

        loading: responses that have left the queue lately, whose workers may not have loaded their entries yet. Those
        that an earlier prefetch has in memory stay there before all others.
        """
        now_ns = self._now_ns()
        wanted = {name: size for name in loading if (size := self._measure_marked(name, now_ns)) is not None}
        room = self._memory.limit_bytes - sum(wanted.values())
        for response in responses:
            size = self._measure(response)
            if size is None:
                continue
            if size > room:
                break
            room -= size
            wanted[response] = size
        end_ns = now_ns + PREFETCHED_NS
        urgencies = {response: end_ns + len(wanted) - place for place, response in enumerate(wanted)}
        for response, urgency in urgencies.items():  # all of them before room is made for the first
            self._mark(response, urgency)
        return sum(self._lift(name, frozenset(wanted)) for name in wanted)

    def _mark(self, response: str, urgency: int) -> None:
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                tier.mark(response, urgency)

    def _measure_marked(self, response: str, now_ns: int) -> int | None:
        """Of an entry in memory that has been neither loaded nor saved since a prefetch."""
        with contextlib.suppress(OSError):
            found = self._memory.find(response)
            if found is not None and found.urgency > now_ns:
                return found.num_bytes
        return None

    def _measure(self, response: str) -> int | None:
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                found = tier.find(response)
                if found is not None:
                    return found.num_bytes
        return None

    def _lift(self, response: str, spares: frozenset[str]) -> bool:
        """Move an entry from disk to memory, unless it is there; returns whether it was moved."""
        disk = self._tiers[-1]
        try:
            found = disk.find(response)
            if found is None or self._memory.find(response) is not None:
                return False
            part = self._copy(disk, self._memory, _Newcomer(response, found.num_bytes, found.urgency, spares))
            with contextlib.closing(part), self._memory.exclusive():
                if disk.find(response) != found or self._memory.find(response) is not None:
                    return False  # dropped or saved anew meanwhile
                self._memory.settle(part, response, found.urgency)
                disk.remove(response)
            self._count(promoted=1)
            return True
        except OSError:
            self._count(failed_writes=1)
            return False

    # -- room

    def _store(self, tier: Tier, newcomer: _Newcomer, write: Callable[[Part], None]) -> None:
        """Make room, write an entry and put it in its place. Raises OSError."""
        with contextlib.closing(self._write(tier, newcomer, write)) as part, tier.exclusive():
            tier.settle(part, newcomer.response, newcomer.urgency)

    def _copy(self, source: Tier, target: Tier, newcomer: _Newcomer) -> Part:
        """A copy of an entry, not in its place yet. Raises OSError."""
        entry = source.open_entry(newcomer.response)
        if entry is None or entry.num_bytes != newcomer.num_bytes:
            raise FileNotFoundError(errno.ENOENT, "the entry has gone", newcomer.response)

        def write(part: Part) -> None:
            for start in range(0, entry.num_bytes, _COPY_BYTES):
                part.write([entry.read(start, start + _COPY_BYTES)], start)

        with entry:
            return self._write(target, newcomer, write)

    def _write(self, tier: Tier, newcomer: _Newcomer, write: Callable[[Part], None]) -> Part:
        """Make room and write a file, which is not in its place yet. Raises OSError."""
        try:
            return self._write_within(tier, newcomer, write, tier.limit_bytes)
        except _NoRoomError:
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        with tier.exclusive():  # others fill the file system: it holds no more than what is there now
            used = tier.take_stock()[1]
        return self._write_within(tier, newcomer, write, used)

    def _write_within(
        self, tier: Tier, newcomer: _Newcomer, write: Callable[[Part], None], limit_bytes: int
    ) -> Part:
        part = self._begin(tier, newcomer, limit_bytes)
        try:
            write(part)
        except BaseException:
            part.close()
            raise
        return part

    def _begin(self, tier: Tier, newcomer: _Newcomer, limit_bytes: int) -> Part:
        """Make room and begin a file. Entries that move to disk are copied while nobody waits. Raises OSError."""
        for _ in range(MAX_TRIES):
            with tier.exclusive():
                if tier.has_room(newcomer.num_bytes, limit_bytes):
                    return tier.begin(newcomer.num_bytes)
                movers = []
                for victim in self._choose(tier, newcomer, limit_bytes):
                    if victim.response == newcomer.response:
                        tier.remove(victim.response)
                    elif tier is self._tiers[-1]:
                        tier.remove(victim.response)
                        self._count(evicted=1)
                    else:
                        movers.append(victim)
                if not movers:
                    return tier.begin(newcomer.num_bytes)
            for victim in movers:
                self._demote(victim)
        raise _NoRoomError(errno.ENOSPC, "others took the room each time", str(tier.directory))

    @staticmethod
    def _choose(tier: Tier, newcomer: _Newcomer, limit_bytes: int) -> list[Resident]:
        """The entries to leave for a newcomer: its response's older one, then the least urgent.

        Raises _NoRoomError, before anything has been removed, if all that may leave were not enough.
        """
        residents, used = tier.take_stock()
        residents.sort(key=lambda resident: resident.response != newcomer.response)
        missing, victims = used + newcomer.num_bytes - limit_bytes, []
        for resident in residents:
            if missing > 0 and _may_leave(resident, newcomer):
                victims.append(resident)
                missing -= resident.num_bytes
        if missing > 0:
            raise _NoRoomError(errno.ENOSPC, f"{missing} bytes too few", str(tier.directory))
        return victims

    def _demote(self, victim: Resident) -> None:
        """Move an entry from memory to disk, or drop it where more urgent ones leave no room. Raises OSError.

        Nothing happens to one that was dropped, saved anew or marked meanwhile.
        """
        part, response = self._copy_down(victim), victim.response
        with contextlib.closing(part) if part else contextlib.nullcontext(), self._memory.exclusive():
            if self._memory.find(response) != victim:
                return
            if part is not None:
                with self._tiers[-1].exclusive():
                    self._tiers[-1].settle(part, response, victim.urgency)
            self._memory.remove(response)
        self._count(**{"evicted" if part is None else "demoted": 1})

    def _copy_down(self, victim: Resident) -> Part | None:
        newcomer = _Newcomer(victim.response, victim.num_bytes, victim.urgency, spares_urgent=True)
        try:
            return self._copy(self._memory, self._tiers[-1], newcomer)
        except (_NoRoomError, FileNotFoundError):
            return None
        except OSError:
            self._count(failed_writes=1)
            return None


def _may_leave(resident: Resident, newcomer: _Newcomer) -> bool:
    if resident.response == newcomer.response:
        return True
    is_urgent = newcomer.spares_urgent and resident.urgency > newcomer.urgency
    return resident.response not in newcomer.spares and not is_urgent


def _close_all(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _chain_checksum(pieces: Sequence[memoryview]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum

"""The KV pool against a dictionary: any interleaving of what several processes do with it."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_entries import BLOCK_BYTES, address, entry_file, is_right, load, save, used_bytes

from paceline.kvpool import KvPool
from paceline.kvpool.entry import measure_header

NUM_RESPONSES, NUM_HANDLES = 5, 3
SIZE = measure_header(12, 3) + 3 * BLOCK_BYTES

handles = st.integers(0, NUM_HANDLES - 1)
numbers = st.integers(0, NUM_RESPONSES - 1)
versions = st.integers(0, 1)
queues = st.lists(numbers, unique=True, min_size=1)
saves = st.tuples(st.just("save"), handles, numbers, versions, st.integers(1, 12))
prefetches = st.tuples(st.just("prefetch"), handles, queues)
deeds = st.one_of(
    *[saves, prefetches] * 3,
    st.tuples(st.just("load"), handles, numbers, versions, st.integers(0, 14)),
    st.tuples(st.just("drop"), handles, queues),
    st.tuples(st.just("clear"), handles),
    st.tuples(st.just("damage"), numbers, st.integers(0, 10_000)),
)


class Bench:
    """Some handles on one pool, and what a dictionary would hold."""

    def __init__(self, folder: Path, memory_bytes: int, disk_bytes: int) -> None:
        self.memory, self.disk = folder / "memory", folder / "disk"
        clock = count(1).__next__
        self.limits = memory_bytes, disk_bytes
        self.pools = [
            KvPool(self.memory, memory_bytes, self.disk, disk_bytes, now_ns=clock) for _ in range(NUM_HANDLES)
        ]
        self.known: dict[int, tuple[int, int]] = {}  # version and number of tokens
        self.damaged: set[int] = set()

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def files(self, number: int) -> list[Path]:
        return [path for folder in (self.memory, self.disk) if (path := entry_file(folder, number)).exists()]

    def do(self, deed: tuple) -> bool:
        """Do it; returns whether a load found something."""
        match deed:
            case "save", handle, number, version, length:
                if save(self.pools[handle], number, length, version):
                    self.known[number] = version, length
                    self.damaged.discard(number)
            case "load", handle, number, version, length:
                return self.check_load(handle, number, version, length)
            case "drop", handle, chosen:
                self.pools[handle].drop(*(address(number).response for number in chosen))
                for number in chosen:
                    self.known.pop(number, None)
                    self.damaged.discard(number)
            case "prefetch", handle, chosen:
                self.pools[handle].prefetch(address(number).response for number in chosen)
            case "clear", handle:
                self.pools[handle].clear()
                self.known.clear()
                self.damaged.clear()
            case "damage", number, place:
                for path in self.files(number):
                    data = bytearray(path.read_bytes())
                    data[place % len(data)] ^= 1 << place % 8
                    path.write_bytes(data)
                    self.damaged.add(number)
        return False

    def check_load(self, handle: int, number: int, version: int, length: int) -> bool:
        held = load(self.pools[handle], number, length, version)
        known = self.known.get(number)
        if held is None:
            if number in self.damaged and not self.files(number):
                self.known.pop(number, None)
                self.damaged.discard(number)
            return False
        assert known is not None  # what is damaged may be found in part: behind it, or before
        assert known[0] == version
        assert held.num_tokens == min(length, known[1])
        assert is_right(held, number, version, known[1])
        return True

    def check(self) -> None:
        assert used_bytes(self.memory) <= self.limits[0]
        assert used_bytes(self.disk) <= self.limits[1]
        assert all(len(self.files(number)) <= 1 for number in range(NUM_RESPONSES))


@settings(max_examples=150)
@given(st.lists(deeds, min_size=10, max_size=30))
def test_a_roomy_pool_is_a_dictionary(todo: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), SIZE, NUM_RESPONSES * SIZE)
        for deed in todo:
            known, damaged = dict(bench.known), set(bench.damaged)  # a load forgets what it finds damaged
            found = bench.do(deed)
            if deed[0] == "load":
                _, _, number, version, length = deed
                if number not in damaged:
                    assert found == (number in known and known[number][0] == version and length > 0)
            bench.check()
        for number, (version, length) in bench.known.items():
            if number not in bench.damaged:
                assert bench.check_load(0, number, version, length)
        assert sum(pool.counters().evicted for pool in bench.pools) == 0
        bench.close()


@settings(max_examples=150)
@given(st.lists(deeds, max_size=40))
def test_a_tight_pool_forgets_but_never_errs(todo: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), 2 * SIZE, SIZE)
        for deed in todo:
            bench.do(deed)
            bench.check()
            if deed[0] == "save":
                assert bench.files(deed[2])
        bench.close()

"""The KV pool's store: damage, full tiers, crashed and locked-out processes; nothing is ever an error or wrong."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kv_entries import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYOUT,
    address,
    entry_file,
    is_right,
    load,
    reader,
    save,
    tokens,
    used_bytes,
)

from paceline.errors import ConfigError
from paceline.kvpool import KvPool, tier
from paceline.kvpool.entry import measure_header, response_identity
from paceline.kvpool.pool import PREFETCHED_NS

ROOMY = 1 << 20
SIZE = measure_header(10, 3) + 3 * BLOCK_BYTES
"""Bytes of an entry of 10 tokens."""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def pool(memory: Path) -> Iterator[KvPool]:
    made = KvPool(memory, ROOMY, now_ns=count(1).__next__)
    yield made
    made.close()


@pytest.fixture
def tiers(memory: Path, disk: Path) -> Iterator[KvPool]:
    """Room for two entries in memory and three on disk."""
    made = KvPool(memory, 2 * SIZE, disk, 3 * SIZE, now_ns=count(1).__next__)
    yield made
    made.close()


# -- what is found


def test_a_response_finds_its_own_tokens_again(pool: KvPool) -> None:
    assert save(pool, 1, 10)
    held = load(pool, 1)
    assert held is not None
    assert (held.num_tokens, held.first_block, len(held.blocks)) == (10, 0, 3)
    assert is_right(held, 1, 0, 10)
    counters = pool.counters()
    assert (counters.hits, counters.misses, counters.saves) == (1, 0, 1)
    assert (counters.saved_bytes, counters.loaded_bytes) == (SIZE, 3 * BLOCK_BYTES)


def test_blocks_that_the_caller_has_are_left_out(pool: KvPool) -> None:
    save(pool, 1, 10)
    held = load(pool, 1, skip=4)
    assert held is not None
    assert (held.num_tokens, held.first_block, len(held.blocks)) == (10, 1, 2)
    assert is_right(held, 1, 0, 10)
    save(pool, 1, 8)
    assert load(pool, 1, skip=8) is None


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("skip", [4, 8, 12])
def test_what_is_held_serves_who_has_more_by_now(pool: KvPool, before: int, skip: int) -> None:
    """As if it were looked up anew, but for looking."""
    assert save(pool, 1, 10)
    held, anew = load(pool, 1, skip=before), load(pool, 1, skip=skip)
    hits = pool.counters().hits
    assert held is not None
    assert held.beyond(skip, BLOCK_TOKENS) == anew
    assert pool.counters().hits == hits


def test_only_shared_leading_tokens_count(pool: KvPool) -> None:
    """The asker may be behind the entry (a stale list of tokens) or on another way altogether."""
    save(pool, 1, 10)
    held = load(pool, 1, count=6)
    assert held is not None
    assert (held.num_tokens, len(held.blocks)) == (6, 2)
    other = tokens(1, 10).copy()
    other[5] += 1
    held = pool.load(address(1), other)
    assert held is not None
    assert held.num_tokens == 5
    other[0] += 1
    assert pool.load(address(1), other) is None


def test_other_versions_layouts_and_responses_never_match(pool: KvPool) -> None:
    save(pool, 1, 10, version=3)
    assert load(pool, 1, version=2) is None
    assert pool.load(replace(address(1, 3), layout=LAYOUT[::-1]), tokens(1, 10)) is None
    assert load(pool, 2, version=3) is None
    assert pool.counters().misses == 3
    assert load(pool, 1, version=3) is not None


def test_an_entry_under_another_name_is_no_entry_of_that_name(pool: KvPool, memory: Path) -> None:
    save(pool, 1, 10)
    entry_file(memory, 1).rename(entry_file(memory, 2))
    assert pool.load(address(2), tokens(1, 10)) is None


def test_the_newest_entry_of_a_response_is_the_only_one(pool: KvPool) -> None:
    save(pool, 1, 10)
    save(pool, 1, 14)
    held = load(pool, 1)
    assert held is not None
    assert held.num_tokens == 14
    assert is_right(held, 1, 0, 14)


def test_blocks_outlive_their_entry(pool: KvPool) -> None:
    save(pool, 1, 10)
    held = load(pool, 1)
    assert held is not None
    pool.drop(address(1).response)
    assert load(pool, 1) is None
    assert is_right(held, 1, 0, 10)


def test_identities_depend_on_key_and_prompt() -> None:
    names = {response_identity(key, prompt) for key in (1, 2) for prompt in ([1, 2], [1, 3], [1, 2, 3])}
    assert len(names) == 6
    assert response_identity(-1, [1]) == response_identity((1 << 64) - 1, [1])


# -- damage


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_damage_after_the_check_does_not_reach_who_loads(pool: KvPool, memory: Path, harm: str) -> None:
    save(pool, 1, 10)
    held = load(pool, 1)
    assert held is not None
    size = entry_file(memory, 1).stat().st_size
    with entry_file(memory, 1).open("r+b") as file:
        if harm == "cut":
            file.truncate(0)
        else:
            file.write(b"\xff" * size)
    assert is_right(held, 1, 0, 10)


def test_every_flipped_bit_is_a_miss(pool: KvPool, memory: Path) -> None:
    save(pool, 1, 10)
    whole = entry_file(memory, 1).read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        entry_file(memory, 1).write_bytes(damaged)
        assert load(pool, 1) is None, f"bit {place}"
    assert pool.counters().corrupt == 8 * len(whole)


def test_every_truncation_is_a_miss(pool: KvPool, memory: Path) -> None:
    save(pool, 1, 10)
    whole = entry_file(memory, 1).read_bytes()
    for cut in (*[whole[:length] for length in range(len(whole))], whole + b"\0"):
        entry_file(memory, 1).write_bytes(cut)
        assert load(pool, 1) is None, f"{len(cut)} bytes"
    assert pool.counters().corrupt == len(whole) + 1


def test_a_damaged_entry_is_removed(pool: KvPool, memory: Path) -> None:
    save(pool, 1, 10)
    entry_file(memory, 1).write_bytes(entry_file(memory, 1).read_bytes()[:-1])
    assert load(pool, 1) is None
    assert not entry_file(memory, 1).exists()
    assert save(pool, 1, 10)
    assert load(pool, 1) is not None


def test_a_directory_in_place_of_an_entry_is_a_miss(pool: KvPool, memory: Path) -> None:
    entry_file(memory, 1).mkdir()
    assert load(pool, 1) is None


# -- room


def test_the_least_urgent_move_to_disk_and_then_out(tiers: KvPool, memory: Path, disk: Path) -> None:
    for number in range(5):
        assert save(tiers, number, 10)
    assert {n for n in range(5) if entry_file(memory, n).exists()} == {3, 4}
    assert {n for n in range(5) if entry_file(disk, n).exists()} == {0, 1, 2}
    assert save(tiers, 5, 10)
    assert load(tiers, 0) is None
    held = load(tiers, 1)
    assert held is not None
    assert is_right(held, 1, 0, 10)
    assert (tiers.counters().demoted, tiers.counters().evicted) == (4, 1)


def test_the_entry_of_a_running_response_is_the_least_urgent(tiers: KvPool, memory: Path) -> None:
    """Not yet when it was looked up: its request may wait for room in the engine."""
    for number in range(2):
        save(tiers, number, 10)
        assert load(tiers, number) is not None
    tiers.mark_running(address(1).response)
    save(tiers, 2, 10)
    assert {n for n in range(3) if entry_file(memory, n).exists()} == {0, 2}


def test_what_is_looked_up_keeps_its_urgency(tiers: KvPool, memory: Path) -> None:
    save(tiers, 0, 10)
    save(tiers, 1, 10)
    assert load(tiers, 1) is not None
    save(tiers, 2, 10)
    assert {n for n in range(3) if entry_file(memory, n).exists()} == {1, 2}


def test_an_entry_in_use_does_not_push_out_those_that_wait(tiers: KvPool, memory: Path, disk: Path) -> None:
    for number in range(5):
        save(tiers, number, 10)
    tiers.mark_running(address(4).response)
    assert save(tiers, 5, 10)
    assert {n for n in range(6) if entry_file(memory, n).exists()} == {3, 5}
    assert {n for n in range(6) if entry_file(disk, n).exists()} == {0, 1, 2}
    assert tiers.counters().evicted == 1


def test_a_save_that_cannot_succeed_evicts_nobody(tiers: KvPool, memory: Path, disk: Path) -> None:
    """Others' half-written entries take the room, which nobody can make."""
    for number in range(5):
        save(tiers, number, 10)
    for number in range(3):
        tiers.drop(address(number).response)
    parts = [tiers._memory.begin(SIZE), tiers._tiers[1].begin(3 * SIZE)]
    assert not save(tiers, 6, 20)
    assert {n for n in range(7) if entry_file(memory, n).exists()} == {3, 4}
    assert (tiers.counters().failed_writes, tiers.counters().evicted) == (1, 0)
    for part in parts:
        part.close()


def test_others_do_not_wait_while_an_entry_moves_to_disk(
    tiers: KvPool, memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiers, 0, 10)
    save(tiers, 1, 10)
    other = KvPool(memory, 2 * SIZE, disk, 3 * SIZE, now_ns=count(10).__next__)
    monkeypatch.setattr(tier, "LOCK_WAIT_S", 0.01)
    write, seen = tier.Part.write, []

    def meanwhile(self: tier.Part, pieces: object, offset: int) -> int:
        if self.path.is_relative_to(disk) and not seen:
            seen.append("copying")
            assert load(other, 1) is not None
            other.drop(address(0).response)  # the very one that is being copied
            assert other.counters().failed_drops == 0
            assert save(other, 3, 10)
        return write(self, pieces, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(tier.Part, "write", meanwhile)
    assert save(tiers, 2, 10)
    assert seen
    assert load(tiers, 0) is None, "dropped while it moved"
    for number in (1, 2, 3):
        held = load(tiers, number)
        assert held is not None
        assert is_right(held, number, 0, 10)
    assert not list(memory.glob("*.part")) + list(disk.glob("*.part"))
    other.close()


def test_a_file_system_that_others_fill_holds_as_much_as_fits(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = KvPool(memory, ROOMY, now_ns=count(1).__next__)
    write = tier.Part.write

    def bounded(self: tier.Part, pieces: object, offset: int) -> int:
        if used_bytes(memory) > 2 * SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, pieces, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(tier.Part, "write", bounded)
    for number in range(4):
        assert save(pool, number, 10)
    assert {n for n in range(4) if entry_file(memory, n).exists()} == {2, 3}
    assert (pool.counters().evicted, pool.counters().failed_writes) == (2, 0)
    pool.close()


def test_a_drop_that_fails_is_counted(pool: KvPool, memory: Path) -> None:
    entry_file(memory, 1).mkdir()
    pool.drop(address(1).response)
    assert pool.counters().failed_drops == 1
    entry_file(memory, 1).rmdir()


def test_from_disk_only_what_is_asked_for_is_read(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = KvPool(memory, SIZE - 1, disk, ROOMY)
    save(pool, 1, 10)
    read, sizes = os.preadv, []

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return read(fd, buffers, offset)

    monkeypatch.setattr(tier.os, "preadv", counted)
    assert load(pool, 1, version=1) is None
    assert sum(sizes) < 2 * measure_header(10, 3)
    sizes.clear()
    held = load(pool, 1, skip=8)
    assert held is not None
    assert is_right(held, 1, 0, 10)
    assert sum(sizes) < 2 * measure_header(10, 3) + BLOCK_BYTES
    pool.close()


def test_an_older_entry_of_the_response_makes_room_first(memory: Path) -> None:
    with_room_for_two = KvPool(memory, 2 * SIZE, now_ns=count(1).__next__)
    save(with_room_for_two, 0, 10)
    save(with_room_for_two, 1, 10)
    assert save(with_room_for_two, 1, 10)
    assert load(with_room_for_two, 0) is not None
    assert with_room_for_two.counters().evicted == 0
    with_room_for_two.close()


def test_what_does_not_fit_into_memory_goes_to_disk(memory: Path, disk: Path) -> None:
    pool = KvPool(memory, SIZE - 1, disk, SIZE)
    assert save(pool, 0, 10)
    assert entry_file(disk, 0).exists()
    assert load(pool, 0) is not None
    assert not save(pool, 1, 20)
    assert pool.counters().failed_writes == 1
    pool.close()


def test_prefetch_brings_the_first_of_the_queue_into_memory(memory: Path, disk: Path) -> None:
    clock = count(1)
    pool = KvPool(memory, 2 * SIZE, disk, 4 * SIZE, now_ns=lambda: next(clock))
    for number in range(5):
        save(pool, number, 10)
    queue = [address(number).response for number in (9, 1, 0, 4)]
    assert pool.prefetch(queue) == 2
    assert {n for n in range(5) if entry_file(memory, n).exists()} == {0, 1}
    assert {n for n in range(5) if entry_file(disk, n).exists()} == {2, 3, 4}
    assert pool.prefetch(queue) == 0
    assert save(pool, 5, 10)  # what is saved goes to disk, as what is next has been brought up
    assert {n for n in range(6) if entry_file(memory, n).exists()} == {0, 1}
    pool.drop(address(5).response)
    clock = count(PREFETCHED_NS + 100)
    assert save(pool, 5, 10)  # the prefetch is long past: the second in the queue leaves first
    assert {n for n in range(6) if entry_file(memory, n).exists()} == {1, 5}
    held = load(pool, 0)
    assert held is not None
    assert is_right(held, 0, 0, 10)
    assert (pool.counters().promoted, pool.counters().evicted) == (2, 0)
    pool.close()


def test_what_is_being_loaded_stays_before_what_is_next(memory: Path, disk: Path) -> None:
    """Unless it has been loaded or saved anew since, or was never brought up."""
    pool = KvPool(memory, 2 * SIZE, disk, 8 * SIZE)
    names = [address(number).response for number in range(8)]
    for number in range(8):
        save(pool, number, 10)

    def prefetch(queue: list[int], loading: list[int]) -> set[int]:
        pool.prefetch([names[number] for number in queue], [names[number] for number in loading])
        return {number for number in range(8) if entry_file(memory, number).exists()}

    assert prefetch([0, 1, 2, 3], []) == {0, 1}
    assert prefetch([2, 3], [0, 1]) == {0, 1}
    pool.mark_running(names[0])
    assert prefetch([2, 3], [0, 1]) == {1, 2}, "one has been loaded"
    save(pool, 1, 10)
    assert prefetch([2, 3], [0, 1]) == {2, 3}, "the other one was saved anew"
    assert prefetch([6, 7], [4, 5]) == {6, 7}, "these are read from disk"
    pool.close()


def test_prefetch_beside_a_full_disk_keeps_what_is_next(tiers: KvPool, memory: Path, disk: Path) -> None:
    for number in range(5):
        save(tiers, number, 10)
    assert tiers.prefetch(address(number).response for number in (1, 0)) == 2
    assert {n for n in range(5) if entry_file(memory, n).exists()} == {0, 1}
    assert {n for n in range(5) if entry_file(disk, n).exists()} == {3, 4}


def test_drop_and_clear_reach_both_tiers(tiers: KvPool) -> None:
    for number in range(4):
        save(tiers, number, 10)
    tiers.drop(address(0).response, address(3).response, address(7).response)
    assert [load(tiers, number) is not None for number in range(4)] == [False, True, True, False]
    tiers.clear()
    assert not any(load(tiers, number) for number in range(4))


# -- writes that fail


def refuse_writes(monkeypatch: pytest.MonkeyPatch, below: Path, code: int = errno.ENOSPC) -> None:
    write = tier.Part.write

    def full(self: tier.Part, pieces: object, offset: int) -> int:
        if self.path.is_relative_to(below):
            raise OSError(code, os.strerror(code))
        return write(self, pieces, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(tier.Part, "write", full)


def test_a_full_file_system_saves_nothing(
    tiers: KvPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiers, 0, 10)
    refuse_writes(monkeypatch, tmp_path)
    assert not save(tiers, 1, 10)
    assert tiers.counters().failed_writes == 1
    assert load(tiers, 1) is None
    assert not list(tmp_path.rglob("*.part"))


def test_a_full_memory_leaves_the_disk(
    tiers: KvPool, memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writes(monkeypatch, memory)
    assert save(tiers, 1, 10)
    assert entry_file(disk, 1).exists()
    assert load(tiers, 1) is not None


def test_a_full_disk_drops_what_leaves_memory(
    tiers: KvPool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writes(monkeypatch, disk, errno.EIO)
    for number in range(3):
        assert save(tiers, number, 10)
    assert [load(tiers, number) is not None for number in range(3)] == [False, True, True]
    assert (tiers.counters().evicted, tiers.counters().failed_writes) == (1, 1)


def test_a_write_in_part_is_a_failed_write(
    pool: KvPool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev
    monkeypatch.setattr(tier.os, "pwritev", lambda fd, pieces, offset: write(fd, pieces[:1], offset))
    assert not save(pool, 1, 10)
    monkeypatch.undo()
    assert used_bytes(memory) == 0
    assert load(pool, 1) is None


def test_nobody_waits_for_a_lock_that_is_kept(
    pool: KvPool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(pool, 0, 10)
    other = KvPool(memory, ROOMY)
    monkeypatch.setattr(tier, "LOCK_WAIT_S", 0.01)
    with other._memory.exclusive():
        assert not save(pool, 1, 10)
        assert load(pool, 0) is not None
        pool.clear()
        assert load(pool, 0) is not None
        assert pool.counters().failed_drops == 1
        pool.drop(address(0).response)
        assert load(pool, 0) is None
    other.close()


# -- processes


def test_the_first_to_open_and_the_last_to_close_empty_the_pool(memory: Path) -> None:
    first = KvPool(memory, ROOMY)
    save(first, 0, 10)
    second = KvPool(memory, ROOMY)
    first.close()
    assert load(second, 0) is not None
    second.close()
    second.close()
    assert used_bytes(memory) == 0
    entry_file(memory, 1).write_bytes(b"left by a crash of all")
    (memory / "somebody's.txt").write_text("kept")
    KvPool(memory, ROOMY).close()
    assert not entry_file(memory, 1).exists()
    assert (memory / "somebody's.txt").exists()


def test_a_process_that_ends_leaves_the_pool(memory: Path) -> None:
    """Also without closing it; a forked child leaves it to its parent."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from kv_entries import save; from paceline.kvpool import KvPool\n"
        "pool = KvPool(sys.argv[1], 1 << 20); save(pool, 1, 10)\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait(); print(len(list(os.scandir(sys.argv[1]))))"
    )
    builders = str(Path(__file__).parents[1] / "builders")
    command = [sys.executable, "-c", program, str(memory), builders]
    assert subprocess.check_output(command, text=True).strip() == "3"
    assert not list(memory.glob("*.kv"))


def test_a_forked_child_keeps_nobody_out(memory: Path) -> None:
    """It shares its parent's locks; the parent gives them up before it closes."""
    pool, (reads, writes) = KvPool(memory, ROOMY), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(0)
    try:
        pool.close()
        again = KvPool(memory, ROOMY)
        assert save(again, 1, 10)
        again.close()
        assert used_bytes(memory) == 0, "the last to close it emptied it"
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_a_directory_that_is_kept_locked_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KvPool(memory, ROOMY).close()
    monkeypatch.setattr(tier, "LOCK_WAIT_S", 0.01)
    with (memory / "users").open() as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="locked by another process"):
            KvPool(memory, ROOMY)
    KvPool(memory, ROOMY).close()


def test_one_directory_under_two_names_is_refused(memory: Path, tmp_path: Path) -> None:
    memory.mkdir()
    (tmp_path / "alias").symlink_to(memory)
    with pytest.raises(ConfigError, match="under another name"):
        KvPool(memory, ROOMY, tmp_path / "alias", ROOMY)


def test_a_file_system_smaller_than_the_bound_is_refused(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384)  # Docker's /dev/shm
    monkeypatch.setattr(tier.os, "statvfs", lambda path: small)
    with pytest.raises(ConfigError, match=rf"memory_bytes={1 << 27} .* {1 << 26} bytes"):
        KvPool(memory, 1 << 27)
    with pytest.raises(ConfigError, match="disk_bytes"):
        KvPool(memory, 1 << 26, disk, 1 << 27)
    KvPool(memory, 1 << 26).close()


def die_while_writing(memory: Path) -> None:
    def read(index: int) -> list[memoryview]:
        os._exit(3)

    KvPool(memory, ROOMY).save(address(1), tokens(1, 10), BLOCK_TOKENS, BLOCK_BYTES, read)


def test_saving_looks_at_each_entry_a_few_times_at_most(
    pool: KvPool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room; what a crash left is found all the same, a while later."""
    looked, take_stock = [], tier.Tier.take_stock

    def note(self: tier.Tier) -> tuple[list[tier.Resident], int]:
        found = take_stock(self)
        looked.append(len(found[0]))
        return found

    monkeypatch.setattr(tier.Tier, "take_stock", note)
    for number in range(200):
        assert save(pool, number, 10)
        if number == 100:
            (memory / "left.part").write_bytes(b"by a crash")
    assert sum(looked) < 2 * 200
    assert not (memory / "left.part").exists()
    assert used_bytes(memory) == 200 * SIZE


def test_what_a_crashed_writer_left_is_removed(pool: KvPool, memory: Path) -> None:
    save(pool, 0, 10)
    process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(memory,))
    process.start()
    process.join()
    assert process.exitcode == 3
    assert len(list(memory.glob("*.part"))) == 1
    assert save(pool, 2, 10)
    assert not list(memory.glob("*.part"))
    assert load(pool, 0) is not None


def test_a_file_that_is_being_written_is_left_alone(pool: KvPool, memory: Path) -> None:
    other = KvPool(memory, ROOMY)

    def read(index: int) -> list[memoryview]:
        assert save(other, 2, 10)
        other.clear()
        return reader(1, 0, 10)(index)

    assert pool.save(address(1), tokens(1, 10), BLOCK_TOKENS, BLOCK_BYTES, read)
    assert load(other, 1) is not None
    other.close()


def work(memory: Path, disk: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = KvPool(memory, 6 * SIZE, disk, 6 * SIZE)
    for _ in range(150):
        number, version = int(random.integers(12)), int(random.integers(2))
        match int(random.integers(8)):
            case 0:
                pool.drop(address(number).response)
            case 1:
                pool.prefetch([address(int(n)).response for n in random.permutation(12)])
            case 2 | 3 | 4:
                save(pool, number, int(random.integers(1, 14)), version)
            case _:
                held = load(pool, number, version=version)
                assert held is None or is_right(held, number, version, held.num_tokens)
        for one in pool._tiers:
            with one.exclusive():  # while files appear and move, a count could take one twice
                assert used_bytes(one.directory) <= 6 * SIZE
    assert pool.counters().corrupt == 0
    pool.close()


def test_processes_share_a_pool(memory: Path, disk: Path) -> None:
    """Entries are whole and right, and the bounds hold at every moment, whoever does what at the same time."""
    keeper = KvPool(memory, 6 * SIZE, disk, 6 * SIZE)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(memory, disk, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    keeper.close()


def test_a_directory_of_no_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file"):
        KvPool(tmp_path / "file", ROOMY)

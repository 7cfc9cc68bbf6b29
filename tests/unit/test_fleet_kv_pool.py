"""The fleet's KV pool: made where there is room and use for it, and nothing of a killed fleet stays behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest
from kv_entries import BLOCK_BYTES, LAYOUT, reader, tokens

from paceline.config import EngineSettings, FleetSettings, KvPoolSettings
from paceline.fleet import kv_pool, prefetch
from paceline.fleet.kv_pool import PREFIX, FleetKvPool, open_pool
from paceline.kvpool import Address, KvPool, response_identity
from paceline.owned_folder import MACHINE, remove_leftovers
from paceline.types import RolloutRequest

OTHERS = KvPoolSettings(backend="MooncakeStoreConnector", namespace="run")


OWNER = """
import sys, time
from pathlib import Path
from paceline.fleet.kv_pool import FleetKvPool
pool = FleetKvPool.make(Path(sys.argv[1]), 1 << 20)
print(pool.settings.directory, flush=True)
time.sleep(600)
"""


def test_the_pool_of_a_killed_driver_is_removed_at_once(tmp_path: Path) -> None:
    """Although one of its engines still lives, and nothing of it is old."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    engine = KvPool(folder, 1 << 20)
    place = Address(response_identity(7, (1, 2)), 0, LAYOUT)
    assert engine.save(place, tokens(0, 4), 4, BLOCK_BYTES, reader(0, 0, 4))
    remove_leftovers(tmp_path, PREFIX)
    assert engine.load(place, tokens(0, 4)) is not None, "its driver lives"
    owner.kill()
    owner.communicate()
    remove_leftovers(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == []
    assert engine.load(place, tokens(0, 4)) is None
    assert not engine.save(place, tokens(0, 4), 4, BLOCK_BYTES, reader(0, 0, 4))
    engine.close()


def test_what_is_not_a_left_pool_stays(tmp_path: Path) -> None:
    other = tmp_path / "something-else"
    other.mkdir()
    used = FleetKvPool.make(tmp_path, 1 << 20)
    assert used.settings.directory is not None
    remove_leftovers(tmp_path, PREFIX)
    assert other.exists()
    assert Path(used.settings.directory).exists(), "somebody uses it"
    used.close()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    ("settings", "engine", "is_one_machine"),
    [
        (FleetSettings(workers=1), EngineSettings(), True),
        (FleetSettings(variant="group"), EngineSettings(), True),
        (FleetSettings(variant="sticky"), EngineSettings(), True),
        (FleetSettings(), EngineSettings(), False),
        (FleetSettings(kv_pool_gib=0.0), EngineSettings(), True),
        (FleetSettings(), EngineSettings(kv_pool=OTHERS), True),
    ],
)
def test_no_pool_where_there_is_no_use_for_one_and_none_is_left(
    settings: FleetSettings,
    engine: EngineSettings,
    is_one_machine: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pool, "SHARED_MEMORY", tmp_path)
    (tmp_path / f"{PREFIX}{MACHINE}-of-a-killed-driver").mkdir()
    assert open_pool(settings, engine, is_one_machine) is None
    assert not list(tmp_path.iterdir())


def test_a_pool_of_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "SHARED_MEMORY", tmp_path)
    pool = open_pool(FleetSettings(kv_pool_gib=0.125), EngineSettings(), True)
    assert pool is not None
    assert pool.settings.memory_bytes == 128 << 20
    pool.close()


# -- a pool that the user has named, with a disk

BLOCKS = (1 << 20) // 5 // BLOCK_BYTES
"""Of an entry; three of them, with their headers, fit into the smallest memory that a pool may have."""


@pytest.fixture
def named(tmp_path: Path) -> KvPoolSettings:
    return KvPoolSettings(
        directory=str(tmp_path / "memory"),
        memory_bytes=1 << 20,
        disk_directory=str(tmp_path / "disk"),
        disk_bytes=1 << 24,
        namespace="run",
    )


@pytest.fixture
def joined(named: KvPoolSettings) -> Iterator[FleetKvPool]:
    made = open_pool(FleetSettings(workers=1), EngineSettings(kv_pool=named), True)
    assert made is not None
    yield made
    made.close()


REQUESTS = [RolloutRequest((1, 2, key), 100, key=key) for key in range(8)]


def save_all(settings: KvPoolSettings) -> KvPool:
    """What a worker of the fleet would have saved, in order."""
    pool = KvPool.open(settings)
    for request in REQUESTS:
        assert request.key is not None
        place = Address(response_identity(request.key, request.prompt), 0, LAYOUT)
        assert pool.save(place, tokens(0, BLOCKS * 4), 4, BLOCK_BYTES, reader(0, 0, BLOCKS * 4))
    return pool


def in_memory(settings: KvPoolSettings) -> set[int | None]:
    assert settings.directory is not None
    found = {path.stem for path in Path(settings.directory).glob("*.kv")}
    return {r.key for r in REQUESTS if r.key is not None and response_identity(r.key, r.prompt) in found}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_named_pool_is_joined_under_a_name_of_its_own(joined: FleetKvPool, named: KvPoolSettings) -> None:
    """Or entries of a fleet that was killed could pass for those of this one's policy versions."""
    again = FleetKvPool.join(named)
    names = {named.namespace, joined.settings.namespace, again.settings.namespace}
    assert len(names) == 3
    assert all(str(name).startswith("run") for name in names)
    again.close()
    assert joined.settings.model_copy(update={"namespace": "run"}) == named


def test_what_is_next_is_brought_to_memory(joined: FleetKvPool) -> None:
    worker = save_all(joined.settings)
    assert in_memory(joined.settings) == {5, 6, 7}
    joined.look_ahead(lambda count: [REQUESTS[2], REQUESTS[0], REQUESTS[7], REQUESTS[1]][:count])
    wait_until(lambda: joined.counters().promoted == 2)
    assert in_memory(joined.settings) == {2, 0, 7}
    joined.drop(REQUESTS[2])
    assert in_memory(joined.settings) == {0, 7}
    joined.clear()
    assert in_memory(joined.settings) == set()
    worker.close()


def test_what_was_handed_out_stays_until_it_runs(
    joined: FleetKvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker loads it some steps later; what comes next in the queue must not push it out before."""
    monkeypatch.setattr(prefetch, "LEAST_PAUSE_S", 0.0)
    worker = save_all(joined.settings)

    def look_ahead(*numbers: int) -> set[int | None]:
        joined.look_ahead(lambda count: [REQUESTS[number] for number in numbers][:count])
        assert joined._prefetcher is not None
        joined._prefetcher._last.result()
        return in_memory(joined.settings)

    assert look_ahead(0, 1, 2, 3) == {0, 1, 2}
    assert look_ahead(2, 3, 4) == {0, 1, 2}, "two have been handed out"
    first = REQUESTS[0]
    assert first.key is not None
    worker.mark_running(response_identity(first.key, first.prompt))
    assert look_ahead(2, 3, 4) == {1, 2, 3}, "one of them runs"
    assert look_ahead(0, 2, 3, 4) == {0, 1, 2}, "it waits again: its worker has died"
    monkeypatch.setattr(prefetch, "HANDED_OUT_S", 0.0)
    assert look_ahead(2, 3, 4) == {2, 3, 4}, "the others have had time enough"
    worker.close()


def test_the_loop_never_waits_for_the_prefetch(joined: FleetKvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, asked = threading.Semaphore(0), threading.Semaphore(0), count()

    def slow(pool: KvPool, responses: Iterable[str], loading: Iterable[str] = ()) -> int:
        begun.release()
        assert gate.acquire(timeout=10)
        return len(list(responses))

    def queue(most: int) -> list[RolloutRequest]:
        next(asked)
        return REQUESTS[:most]

    monkeypatch.setattr(KvPool, "prefetch", slow)
    monkeypatch.setattr(prefetch, "LEAST_PAUSE_S", 0.0)
    joined.look_ahead(queue)
    assert begun.acquire(timeout=10)
    started_s = time.monotonic()
    for _ in range(1000):
        joined.look_ahead(queue)
    assert time.monotonic() - started_s < 1.0
    assert next(asked) == 1, "nobody is asked while the disk is slow"
    gate.release(1000)
    wait_until(lambda: joined.look_ahead(queue) or begun.acquire(blocking=False))  # type: ignore[func-returns-value]


def test_nobody_is_asked_more_often_than_is_of_use(joined: FleetKvPool) -> None:
    asked: list[int] = []
    for _ in range(100):
        joined.look_ahead(lambda most: asked.append(most) or [])  # type: ignore[func-returns-value]
    assert asked == [prefetch.LOOK_AHEAD]

"""The fleet's KV pool: made where there is room and use for it, and nothing of a killed fleet stays behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.config import EngineSettings, FleetSettings, KvPoolSettings
from paceline.fleet import kv_pool
from paceline.fleet.kv_pool import PREFIX, FleetKvPool, open_pool, remove_leftovers


def make_old(folder: Path) -> None:
    before = time.time() - 3600
    os.utime(folder, (before, before))


def test_pools_of_killed_fleets_are_removed(tmp_path: Path) -> None:
    left, fresh = tmp_path / f"{PREFIX}left", tmp_path / f"{PREFIX}fresh"
    other = tmp_path / "something-else"
    for folder in (left, fresh, other):
        folder.mkdir()
        (folder / "users").touch()
        (folder / "entry").write_bytes(bytes(100))
    used = FleetKvPool(tmp_path, 1 << 20)
    assert used.settings.directory is not None
    for folder in (left, other, Path(used.settings.directory)):
        make_old(folder)
    remove_leftovers(tmp_path)
    assert not left.exists()
    assert fresh.exists(), "its fleet may be about to open it"
    assert other.exists()
    assert Path(used.settings.directory).exists(), "somebody uses it"
    used.close()
    assert not Path(used.settings.directory).exists()


@pytest.mark.parametrize(
    ("settings", "engine", "is_one_machine"),
    [
        (FleetSettings(workers=1), EngineSettings(), True),
        (FleetSettings(variant="group"), EngineSettings(), True),
        (FleetSettings(), EngineSettings(), False),
        (FleetSettings(kv_pool_gib=0.0), EngineSettings(), True),
        (FleetSettings(), EngineSettings(kv_pool=KvPoolSettings(directory="/dev/shm/mine")), True),
    ],
)
def test_no_pool_where_there_is_no_use_for_one(
    settings: FleetSettings,
    engine: EngineSettings,
    is_one_machine: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pool, "SHARED_MEMORY", tmp_path)
    assert open_pool(settings, engine, is_one_machine) is None
    assert not list(tmp_path.iterdir())


def test_a_pool_of_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "SHARED_MEMORY", tmp_path)
    pool = open_pool(FleetSettings(kv_pool_gib=0.125), EngineSettings(), True)
    assert pool is not None
    assert pool.settings.memory_bytes == 128 << 20
    pool.close()

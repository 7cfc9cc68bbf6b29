"""The benchmark of the fleet's driver, at a size that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import driver_load


def test_the_driver_is_measured_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_load, "WORKERS", 2)
    monkeypatch.setattr(driver_load, "CHUNKS", 3)
    monkeypatch.setattr(driver_load, "CHUNK_TOKENS", 64)
    rows = driver_load.measure_growths(tmp_path, 0.5)
    rows += [driver_load.measure_ending(tmp_path, is_told) for is_told in (True, False)]
    assert len({row["case"] for row in rows}) == 6
    assert all(isinstance(row["value"], float) and row["value"] > 0 for row in rows)

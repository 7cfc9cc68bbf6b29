"""Workloads: their distribution, how alike groups are, and files of lengths."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.noise import normal, uniform
from paceline.sim.workload import (
    HistogramLengths,
    LogNormalLengths,
    Workload,
    draw_workload,
    read_histogram,
    recorded_workload,
)


def draw(groups: int = 500, size: int = 16, correlation: float = 0.6, seed: int = 0) -> Workload:
    return draw_workload(LogNormalLengths(1000.0, 1.0), groups, size, 32, 100_000, correlation, seed)


def test_noise_depends_on_its_arguments_alone() -> None:
    whole = normal(3, 5, np.arange(100))
    parts = [float(normal(3, 5, np.array([at]))[0]) for at in range(100)]
    assert whole.tolist() == parts
    assert not np.allclose(whole, normal(4, 5, np.arange(100)))
    assert not np.allclose(whole, normal(3, 6, np.arange(100)))


def test_noise_is_uniform_and_normal() -> None:
    u, z = uniform(1, 2, np.arange(200_000)), normal(1, 2, np.arange(200_000))
    counts, _ = np.histogram(u, bins=20, range=(0.0, 1.0))
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 44.0  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1.0) < 0.01
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01


def test_log_normal_has_its_median_and_spread() -> None:
    log = np.log(draw(correlation=0.0).length_tokens)
    assert np.exp(np.median(log)) == pytest.approx(1000.0, rel=0.05)
    assert log.std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_siblings_are_as_alike_as_asked(correlation: float) -> None:
    log = np.log(draw(4000, 2, correlation).length_tokens).reshape(-1, 2)
    assert np.corrcoef(log[:, 0], log[:, 1])[0, 1] == pytest.approx(correlation, abs=0.05)


def test_lengths_are_cut_at_the_limit() -> None:
    work = draw_workload(LogNormalLengths(1000.0, 2.0), 100, 8, 32, 4096, 0.5, 1)
    assert work.length_tokens.max() == 4096
    assert work.length_tokens.min() >= 1
    assert (work.num_groups, work.num_responses) == (100, 800)


def test_histogram_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"output_tokens": [[10, 0.5], [1000, 0.2], [100, 0.3]]}, file)
    found = read_histogram(path)
    assert found.quantile(np.array([0.1, 0.5, 0.6, 0.81, 0.999])).tolist() == [10, 10, 100, 1000, 1000]
    assert isinstance(found, HistogramLengths)
    assert found.scaled(2.0).quantile(np.array([0.6])).tolist() == [200]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "[[1]]", "no json", '{"output_tokens": [[1, 0.0]]}', "[[-1, 1.0]]"]
)
def test_files_that_are_no_histogram_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"lengths\.json"):
        read_histogram(path)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"[[1, 0.5]]")[:-12],
        gzip.compress(b"[[1, 0.5]]")[:10] + b"\xff" * 20,
        gzip.compress(b"[[1, NaN], [2, 0.5]]"),
        gzip.compress(b"[[Infinity, 0.5]]"),
        gzip.compress(b"[" * 100_000),
    ],
    ids=["cut off", "damaged", "not a number", "infinite", "nested"],
)
def test_damaged_histograms_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lengths.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"lengths\.json\.gz"):
        read_histogram(path)


def test_recorded_lengths_are_taken_as_they_are() -> None:
    work = recorded_workload([[3, 4], [5, 6]], [7, 8], 10)
    assert work.length_tokens.tolist() == [3, 4, 5, 6]
    assert work.group_size == 2
    with pytest.raises(ConfigError, match="sizes"):
        recorded_workload([[3], [5, 6]], [7, 8], 10)


@pytest.mark.parametrize(("groups", "correlation"), [(0, 0.5), (3, 1.5), (3, -0.1)])
def test_impossible_workloads_are_refused(groups: int, correlation: float) -> None:
    with pytest.raises(ConfigError):
        draw(groups, 4, correlation)

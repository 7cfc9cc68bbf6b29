"""Methods run side by side, shown in a run's report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import SimulatedRun

from paceline.commands.bench.command import compare
from paceline.commands.bench.contender import Measurement
from paceline.errors import RecordError
from paceline.report import build_report
from paceline.report.history import MAX_POINTS
from paceline.report.side_by_side import (
    FILE_NAME,
    Case,
    Row,
    SideBySide,
    read_side_by_side,
    side_by_side_figure,
)
from paceline.training.run_folder import clear_folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return SimulatedRun().build(tmp_path / "run")


def leave_bench(run_dir: Path) -> None:
    """What `paceline bench --json` writes: drafts take half of the time and change one token of eight."""

    def measured(wall_s: float, last: int) -> list[Measurement]:
        tokens = ((1, 2, 3, 4), (5, 6, 7, last))
        return [Measurement(wall_s, wall_s / 4, tokens, 8, 6, 4, (wall_s * 3 / 4, wall_s))]

    runs = {"plain": measured(9.0, 9), "none": measured(8.0, 8), "suffix+model": measured(4.0, 9)}
    case = {"model": "/somewhere/<large>", "prompts": 1, "samples": 2, "temperature": 1.0}
    found = {"benchmark": "bench", "case": case, "rows": [compare(name, runs) for name in runs]}
    (run_dir / FILE_NAME).write_text(json.dumps(found))


def test_a_run_without_it_shows_no_section(run_dir: Path) -> None:
    assert read_side_by_side(run_dir) is None
    assert "side by side</h2>" not in build_report(run_dir).read_text()


def test_what_bench_wrote_is_shown(run_dir: Path) -> None:
    leave_bench(run_dir)
    page = build_report(run_dir).read_text()
    assert "The same rollout side by side</h2>" in page
    for text in ("vLLM without Paceline", "Paceline, no drafts", "Paceline, suffix+model drafts"):
        assert f'<th scope="row">{text}</th>' in page
    assert "2.00 times as fast; 1 of 8 tokens differ" in page
    assert "&lt;large&gt;" in page
    assert "<large>" not in page


def test_the_picture_falls_from_all_to_none(run_dir: Path) -> None:
    leave_bench(run_dir)
    found = read_side_by_side(run_dir)
    assert found is not None
    figure = side_by_side_figure(found)
    assert [series.name for series in figure.series] == [row.name for row in found.rows]
    fast = figure.series[2]
    assert fast.x == [0.0, 3.0, 3.0, 4.0, 4.0]
    assert fast.y == [2.0, 2.0, 1.0, 1.0, 0.0]
    assert len({series.colour for series in figure.series}) == 3


def test_the_picture_of_many_responses_is_thinned() -> None:
    ends_s = [float(at) for at in range(1, 10 * MAX_POINTS + 2)]
    row = Row("none", ends_s[-1], 1.0, 1.0, 1.0, 0, 0, ends_s)
    (series,) = side_by_side_figure(SideBySide(Case("m", 1, len(ends_s)), [row])).series
    assert MAX_POINTS // 2 < len(series.x) == len(series.y) <= MAX_POINTS
    assert (series.x[0], series.y[0]) == (0.0, len(ends_s))
    assert (series.x[-1], series.y[-1]) == (ends_s[-1], 0.0)
    assert all(left == len(ends_s) - at for at, left in zip(series.x[2::2], series.y[2::2], strict=True))


@pytest.mark.parametrize(
    "text",
    [b'{"rows": 3}', b'{"case": {"model": "caf\xe9"}}', b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=["foreign", "not UTF-8", "nested"],
)
def test_another_file_of_that_name_is_refused(run_dir: Path, text: bytes) -> None:
    (run_dir / FILE_NAME).write_bytes(text)
    with pytest.raises(RecordError, match=r"no result of 'paceline bench'.*remove it"):
        build_report(run_dir)


def test_a_new_run_in_the_folder_does_not_show_the_old_one(run_dir: Path) -> None:
    leave_bench(run_dir)
    clear_folder(run_dir)
    assert read_side_by_side(run_dir) is None

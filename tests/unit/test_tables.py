"""Every table that a command prints fits into 80 columns, with the longest names, and nothing of it is cut."""

from __future__ import annotations

import io
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Run
from rich.console import Console, RenderableType
from rich.table import Table
from test_planning_commands import make_profile

from paceline.commands.bench.command import METHODS, bench_table
from paceline.commands.ladder import ladder_table
from paceline.commands.profile import profile_tables
from paceline.commands.replay import Replayed, replay_table
from paceline.commands.rollout.fleet_job import FleetView
from paceline.commands.simulate import claims_table, presets_table, results_table
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.planning.ladder import rank_drafters
from paceline.planning.profile_fit import fit_profile
from paceline.record.ladder_file import Ladder, Rungs
from paceline.record.profile import write_profile
from paceline.record.tally import Tally
from paceline.sim.comparison import ClaimResult, SystemResult
from paceline.sim.scenario import SYSTEMS, load_scenario, preset_names
from paceline.terminal.progress import COLUMNS
from paceline.terminal.tables import make_table

WIDTH = 80


def shown(table: RenderableType) -> str:
    """The table on a terminal of 80 columns; every word of its cells must be there, and nothing stand beyond."""
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    if isinstance(table, Table):
        words = text.split()
        for column in table.columns:
            for cell in (column.header, *column.cells):
                for word in str(cell).split():
                    assert word in words, f"{word!r} of {cell!r} is cut:\n{text}"
    return text


def result(name: str) -> SystemResult:
    return SystemResult(
        name=name,
        rollout_s=123456.0,
        step_s=234567.0,
        tail_s=23456.0,
        idle_share=1.0,
        wasted_tokens=9.9e8,
        drafted_tokens=1e9,
        acceptance_length=12.34,
        preemptions=1234567.0,
        training_s=1.0,
        last=None,  # type: ignore[arg-type]
    )


def test_simulated_systems() -> None:
    names = [*SYSTEMS]
    text = shown(results_table("SpecActor, DAPO-32B-20K", {name: result(name) for name in names}))
    for name in names:
        assert name in text, "a name stands on one line"


@pytest.mark.parametrize("preset", preset_names())
def test_published_numbers(preset: str) -> None:
    claims = load_scenario(preset).claims
    assert claims
    shown(claims_table([ClaimResult(claim, 1.2345 * claim.paper) for claim in claims]))


def test_presets() -> None:
    shown(presets_table())


def test_bench() -> None:
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "repetitions": 3,
            "wall_s": 12345.67,
            "tokens_per_s": 123456.0,
            "ratio": 12.34,
            "tail_s": 1234.56,
            "acceptance_length": 12.34,
            "compared_tokens": 1234567,
            "diverged_tokens": 23456 if method == "suffix" else 0,
        }
        for method in METHODS
    ]
    shown(bench_table(rows))


def test_profiles() -> None:
    made = make_profile()
    for table in profile_tables(made, *fit_profile(made)):
        shown(table)


def test_ladders() -> None:
    made = Ladder(
        128, (0.3, 0.5, 0.7, 0.85, 0.95), (Rungs("countdown-drafter", (0.9, 1.1, 1.45, 1.9, 12.25)),)
    )
    shown(ladder_table("countdown-189m", made, rank_drafters(made, {"countdown-drafter": 0.83})))


def test_plans(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    path = tmp_path / "profile.json"
    write_profile(make_profile(), path)
    done = run("plan", path, "--acceptance", "0.8")
    assert done.code == 0
    assert "…" not in done.out
    for word in ("suffix", "small", "x plain"):
        assert word in done.out
    for word in ("decoupled", "coupled", "plain"):
        assert re.search(rf"^{word} ", done.out, re.MULTILINE)


def test_replays() -> None:
    tally = Tally("fleet controller")
    tally.num_planned, tally.num_different = 123456789, 1234567
    shown(replay_table([Replayed("controller-12345.decisions", [tally], torn=False)]))


def test_workers_of_a_fleet() -> None:
    status = WorkerStatus(
        "worker-123",
        num_running=1234,
        num_waiting=1234,
        num_kv_blocks=1,
        num_kv_used=1,
        num_decoded=100,
        num_accepted=1134,
        num_losses=123,
        num_tokens=10**9,
    )
    board = StatusBoard({"worker-123": status})
    view = FleetView(SimpleNamespace(board=board))  # type: ignore[arg-type]
    view._seen = deque([(0.0, {"worker-123": 0}), (1.0, {"worker-123": 1234567})])
    shown(view.table())


def test_training_steps() -> None:
    table = make_table((), COLUMNS)
    table.add_row("10000/10000", "-0.123", "100.0%", "123456", "12.34", "12345.6", "12345.6")
    shown(table)


def test_a_long_text_wraps_and_numbers_stay_whole() -> None:
    table = make_table(("what",), ("one", "two"))
    table.add_row("a very long name " * 10 + "x" * 200, "1" * 12, "2" * 12)
    text = Console(file=io.StringIO(), width=WIDTH)
    text.print(table)
    said: str = text.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert "1" * 12 in said
    assert "2" * 12 in said
    assert said.count("x") == 200

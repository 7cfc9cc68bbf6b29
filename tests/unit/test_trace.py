"""The trace of a run: valid Trace Event Format, and everything of the record in it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from recorded_run import SimulatedRun

from paceline.errors import RecordError
from paceline.record import EngineStepSample, RecordReader, ResponseDone, TrainStep
from paceline.report.trace import ENGINES, RESPONSES, TRAINER, write_trace


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return SimulatedRun(num_steps=3, num_responses=16).build(tmp_path / "run")


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_everything_recorded_is_in_the_trace(run_dir: Path, tmp_path: Path) -> None:
    count = write_trace(run_dir, tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    assert len(events) == count
    slices = Counter(event["pid"] for event in events if event["ph"] == "X")
    with RecordReader(run_dir) as record:
        recorded = list(record)
    kinds = Counter(type(event) for event in recorded)
    assert slices[ENGINES] == kinds[EngineStepSample]
    assert slices[RESPONSES] == kinds[ResponseDone] == 48
    assert slices[TRAINER] > kinds[TrainStep] == 3
    tokens = sum(
        event["args"]["response_tokens"]
        for event in events
        if event.get("pid") == RESPONSES and event["ph"] == "X"
    )
    assert tokens == sum(event.response_tokens for event in recorded if isinstance(event, ResponseDone))


def test_phases_lie_within_their_step(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "trace.json")
    trainer = [
        event for event in read(tmp_path / "trace.json") if event["ph"] == "X" and event["pid"] == TRAINER
    ]
    steps = [event for event in trainer if event["name"].startswith("step ")]
    for step in steps:
        inside = [
            event
            for event in trainer
            if event is not step and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
        ]
        assert sum(event["dur"] for event in inside) == pytest.approx(step["dur"], abs=10.0)


def test_every_event_has_what_the_format_asks_for(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "trace.json")
    for event in read(tmp_path / "trace.json"):
        assert {"ph", "name", "pid"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0


def test_the_command_writes_it(run: Run, run_dir: Path, tmp_path: Path) -> None:
    outcome = run("report", str(run_dir), "--trace", str(tmp_path / "trace.json"))
    assert outcome.code == 0, outcome.error
    assert "trace.json" in outcome.out
    assert read(tmp_path / "trace.json")


def test_a_place_that_cannot_be_written_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot write"):
        write_trace(run_dir, tmp_path / "nowhere" / "trace.json")

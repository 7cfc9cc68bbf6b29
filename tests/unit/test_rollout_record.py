"""`rollout --record`: the rollout as a run folder that the report understands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from reports import make_ending

from paceline.commands.inputs.launch import Launch
from paceline.commands.inputs.prompts import Prompt
from paceline.commands.rollout.job import Job
from paceline.commands.rollout.rollout_record import RolloutRecord, refuse_existing_record
from paceline.config import EngineSettings, FleetSettings
from paceline.control.events import (
    CancelChunk,
    Deliver,
    DraftFor,
    LoseDrafter,
    Report,
    Reported,
    Rest,
    RunChunk,
    StartWorker,
    Telemetry,
    Tick,
    WorkerStep,
)
from paceline.errors import EngineError, RecordError
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.fleet import Finished
from paceline.fleet.help_log import HelpLog
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.planning.help import Help
from paceline.record import (
    ChunkDone,
    EngineStepSample,
    Event,
    Header,
    HelpDone,
    Machine,
    Note,
    RecordReader,
    RecordWriter,
    ResponseDone,
    RunEnd,
    TrainStep,
)
from paceline.report import build_report
from paceline.types import DraftSharingCounters, KvUse, Response, RolloutRequest, StepObservation


@dataclass
class Told:
    """A fleet that generates nothing: what a record hears of one."""

    board: StatusBoard = field(default_factory=lambda: StatusBoard({"w0": WorkerStatus("w0")}))
    chunks: ChunkLog = field(default_factory=ChunkLog)
    helps: HelpLog = field(default_factory=HelpLog)
    invariance_gap: str | None = None

    def run(self, index: int, tokens: int) -> Finished:
        """A response runs in one chunk and is finished."""
        request = RolloutRequest((1, 2), 9, key=index, group=77)
        self.chunks.note([RunChunk("w0", 0, index, request, 0, index)], 1.0)
        step = WorkerStep(StepObservation(1, 0, 0, 0, 0.01), tokens)
        ending = make_ending(index, 0, (5,) * tokens, "stop")
        report = Report(1, endings=(ending,), telemetry=Telemetry(KvUse(10, 16, 1, 0), 1, (step,)))
        self.board.hear("w0", report)
        self.chunks.hear(Reported("w0", 0, report), 2.0)
        response = Response(request, (5,) * tokens, (-1.0,) * tokens, "stop", index, 77, 0, 0, 0, tokens)
        return Finished(index, response, None)


@pytest.fixture
def job() -> Job:
    launch = Launch(Path("models/policy"), EngineSettings(), "float32", 64, 8, 1 << 20, True, False)
    todo = [(Prompt(line, line, {}, (1, 2)), sample, None) for line in (1, 2) for sample in (0, 1)]
    unused: Any = None
    return Job(unused, launch, unused, "abc", {"seed": 3}, todo, 0)


def record_of(job: Job, folder: Path, **switches: bool) -> RolloutRecord:
    return RolloutRecord(folder, job, FleetSettings(), **{"resume": False, "overwrite": False} | switches)


def read(folder: Path, kind: type[Event]) -> list[Any]:
    with RecordReader(folder) as reader:
        return [event for event in reader if isinstance(event, kind)]


def roll_out(record: RolloutRecord, count: int) -> None:
    fleet = Told()
    with record:
        record.begin(fleet)  # type: ignore[arg-type]
        for index in range(count):
            record.look([fleet.run(index, 4 + index)])


def test_a_rollout_is_one_step_of_a_run(job: Job, tmp_path: Path) -> None:
    record = record_of(job, tmp_path / "r")
    roll_out(record, 4)
    assert len(record.take_observations()) == 4
    assert record.take_observations() == []
    chunks, responses = read(tmp_path / "r", ChunkDone), read(tmp_path / "r", ResponseDone)
    places = [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(one.group, one.sample) for one in chunks] == places
    assert [(one.group, one.sample) for one in responses] == places
    assert [one.tokens for one in chunks] == [one.response_tokens for one in responses] == [4, 5, 6, 7]
    assert {one.worker for one in read(tmp_path / "r", EngineStepSample)} == {"w0"}
    [step] = read(tmp_path / "r", TrainStep)
    assert (step.step, step.tokens) == (1, 22)
    assert [one.reason for one in read(tmp_path / "r", RunEnd)] == ["finished"]
    page = build_report(tmp_path / "r").read_text()
    assert page.count('class="timeline"') == 1
    assert "No train step ended" not in page


def test_who_helped_whom_is_recorded(job: Job, tmp_path: Path) -> None:
    record, fleet = record_of(job, tmp_path), Told()
    with record:
        fleet.helps.note(Tick(0.5), [DraftFor("w1", 0, ("w0",), ("ipc://w0",))], 0.5)
        fleet.helps.note(Tick(0.6), [Rest("w1", 0)], 0.6)
        record.begin(fleet)  # type: ignore[arg-type]
        fleet.board.drafters = ("small", "tiny")
        fleet.helps.note(Tick(1.0), [DraftFor("w1", 0, ("w0",), ("ipc://w0",), 1)], 1.0)
        fleet.helps.note(Tick(3.0), [LoseDrafter("w0", 0)], 3.0)
        fleet.helps.note(Tick(4.0), [StartWorker("w1", 1)], 4.0)
        record.look([fleet.run(0, 4)])
    [one] = read(tmp_path, HelpDone)
    assert (one.worker, one.helped, one.kind, one.outcome, one.step) == ("w1", "w0", "draft", "", 1)
    assert one.t_end_s - one.t_start_s == pytest.approx(2.0)
    assert one.drafter == "tiny"
    assert "w1 drafted for w0 with tiny" in build_report(tmp_path).read_text()


def test_races_and_those_that_copies_won_are_counted() -> None:
    told, request = Told(), RolloutRequest((1, 2), 9, key=0, group=0)
    for chunk in (1, 2, 3, 4):
        order = RunChunk("w1", 0, chunk, request, 0, chunk, Help.COPY, "w0")
        told.helps.note(Tick(0.0), [order], 0.0)
    over = Response(request, (5,), (-1.0,), "stop", 0, 0, 0, 0, 0, 1)
    for ended, delivered, cancelled in ((1, 1, 7), (8, 2, 2), (9, 6, 3)):
        event = Reported("w1", 0, Report(1, endings=(make_ending(ended, 0, (5,), "stop"),)))
        told.helps.note(event, [Deliver(delivered, over), CancelChunk("w1", 0, cancelled)], 1.0)
    told.helps.note(Tick(2.0), [CancelChunk("w1", 0, 4)], 2.0)
    assert [one.outcome for one in told.helps.take()] == ["won", "lost", "stopped", "stopped"]
    assert (told.helps.races["w1"], told.helps.won["w1"], told.helps.races["w0"]) == (4, 1, 0)


def test_a_draft_server_that_did_not_keep_up_is_noted_and_reported(job: Job, tmp_path: Path) -> None:
    record, fleet = record_of(job, tmp_path), Told()
    fleet.board.workers["w0"].draft_sharing = DraftSharingCounters(held_messages=2)
    with record:
        record.begin(fleet)  # type: ignore[arg-type]
        fleet.board.workers["w0"].draft_sharing = DraftSharingCounters(held_messages=2, unanswered_fetches=5)
        record.look([fleet.run(0, 4)])
        fleet.board.workers["w0"].draft_sharing = DraftSharingCounters(held_messages=2, unanswered_fetches=5)
    [note] = read(tmp_path, Note)
    assert "left 5 questions unanswered" in note.text
    assert "took no message" not in note.text
    assert note.text in build_report(tmp_path).read_text()


def test_layers_that_batch_invariance_does_not_reach_are_noted_and_reported(job: Job, tmp_path: Path) -> None:
    record, fleet = record_of(job, tmp_path), Told(invariance_gap="not ensured for Experts")
    with record:
        record.begin(fleet)  # type: ignore[arg-type]
        record.look([fleet.run(0, 4)])
    assert [note.text for note in read(tmp_path, Note)] == ["not ensured for Experts"]
    assert "not ensured for Experts" in build_report(tmp_path).read_text()


def test_a_resumed_rollout_adds_a_step(job: Job, tmp_path: Path) -> None:
    roll_out(record_of(job, tmp_path), 2)
    roll_out(record_of(job, tmp_path, resume=True), 4)
    assert [(one.step, one.tokens) for one in read(tmp_path, TrainStep)] == [(1, 9), (2, 22)]
    assert [one.reason for one in read(tmp_path, RunEnd)] == ["interrupted", "finished"]


def test_a_record_is_not_replaced_unasked(job: Job, tmp_path: Path) -> None:
    roll_out(record_of(job, tmp_path), 1)
    with pytest.raises(RecordError, match="already holds a run"):
        record_of(job, tmp_path)
    roll_out(record_of(job, tmp_path, overwrite=True), 4)
    assert len(read(tmp_path, ResponseDone)) == 4


@pytest.mark.parametrize("may_go", [True, False])
def test_the_record_of_a_training_run_is_not_a_rollouts(tmp_path: Path, *, may_go: bool) -> None:
    """Neither replaced nor gone on with, whatever was asked for: its checkpoints would be of no use."""
    header = Header(Machine("c", 2, 1), {}, 0.0, {}, "m", "Countdown", 5)
    RecordWriter.create(tmp_path, header).close()
    with pytest.raises(RecordError, match=r"a run of another kind \('Countdown'\)"):
        refuse_existing_record(tmp_path, may_go=may_go)


def test_a_record_that_cannot_be_read_may_be_replaced(tmp_path: Path) -> None:
    refuse_existing_record(tmp_path, may_go=False)
    (tmp_path / "record.jsonl").touch()
    refuse_existing_record(tmp_path, may_go=True)
    with pytest.raises(RecordError, match="already holds a run"):
        refuse_existing_record(tmp_path, may_go=False)


@pytest.mark.parametrize(
    ("error", "reason"), [(EngineError("x"), "failed"), (typer.Exit(130), "interrupted")]
)
def test_how_it_ended_is_recorded(job: Job, tmp_path: Path, error: Exception, reason: str) -> None:
    record = record_of(job, tmp_path)
    with pytest.raises(type(error)), record:
        raise error
    assert [one.reason for one in read(tmp_path, RunEnd)] == [reason]
    assert read(tmp_path, TrainStep) == []

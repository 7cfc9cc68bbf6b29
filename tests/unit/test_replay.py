"""Replay: unchanged planning decides the same, and any other decision is found and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import Run
from edited_log import edit_log
from live_loop import live
from reports import make_ending

from paceline.config import BudgetSettings, EngineSettings, FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    Abandoned,
    CancelChunk,
    Event,
    Growth,
    Growths,
    Opened,
    Report,
    Reported,
    StopWorker,
    Submitted,
    Tick,
    WeightsChanged,
    WeightsLoaded,
    WorkerLost,
    WorkerUp,
)
from paceline.control.packed import Packed
from paceline.engine.loop_replay import replay_engine
from paceline.errors import RecordError, RequestError
from paceline.fleet.controller_log import describe, open_log
from paceline.fleet.controller_replay import replay_controller
from paceline.record.decisions import (
    BudgetLine,
    DecisionLine,
    DecisionReader,
    DrafterLine,
    PathsLine,
)
from paceline.record.tally import Tally
from paceline.types import RolloutRequest

STEPS = 120
FULL: dict[str, Any] = {
    "num_paths": 3,
    "model_drafter": "somewhere",
    "further_drafters": ["elsewhere"],
    "max_draft_tokens": 8,
}


def record(folder: Path, **fields: Any) -> Path:
    live(EngineSettings.model_validate({"decision_log": str(folder), **fields}), 7, STEPS)
    return folder / "engine-1.decisions"


@pytest.fixture(scope="module")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of an engine with everything: several paths and a model drafter."""
    return record(tmp_path_factory.mktemp("live") / "decisions", **FULL)


def replay(path: Path) -> dict[str, Tally]:
    with DecisionReader(path) as reader:
        kind = replay_engine if reader.header.kind == "engine" else replay_controller
        return {tally.kind: tally for tally in kind(reader)}


def test_an_engines_decisions_are_the_same_again(engine_log: Path) -> None:
    tallies = replay(engine_log)
    assert set(tallies) == {"draft budget", "draft paths", "model drafter"}
    assert all(tally.num_planned > STEPS / 2 for tally in tallies.values())
    assert all(tally.num_different == 0 and tally.first is None for tally in tallies.values())


def test_the_log_tells_of_decisions_that_matter(engine_log: Path) -> None:
    with DecisionReader(engine_log) as reader:
        lines = list(reader)
    assert any(sum(line.lengths) for line in lines if isinstance(line, BudgetLine))
    assert any(line.judged and line.free is not None for line in lines if isinstance(line, BudgetLine))
    assert any(line.chosen for line in lines if isinstance(line, PathsLine))
    assert {line.floor is None for line in lines if isinstance(line, DrafterLine)} >= {False}


def test_drafts_alone_are_all_there_is_to_replay(tmp_path: Path) -> None:
    assert set(replay(record(tmp_path / "free"))) == {"draft budget"}
    assert not (tmp_path / "none").exists()
    live(EngineSettings(), 7, 5)


def test_a_log_does_not_change_what_is_decided(engine_log: Path) -> None:
    logged = live(EngineSettings(**FULL, decision_log=str(engine_log.parent / "again")), 7, STEPS)
    silent = live(EngineSettings(**FULL), 7, STEPS)
    assert [made.lengths.tolist() for made in logged] == [made.lengths.tolist() for made in silent]


def test_other_settings_decide_otherwise(engine_log: Path, tmp_path: Path) -> None:
    greedy = BudgetSettings(policy="fixed", fixed_tokens=2).model_dump()
    tally = replay(edit_log(engine_log, tmp_path, settings={"budget": greedy}))["draft budget"]
    assert tally.num_different > 10


def test_a_changed_budget_is_shown(engine_log: Path, tmp_path: Path) -> None:
    numbers: list[int] = []

    def change(number: int, line: DecisionLine) -> DecisionLine:
        if not isinstance(line, BudgetLine):
            return line
        numbers.append(number)
        if len(numbers) != 21:
            return line
        return msgspec.structs.replace(line, lengths=(line.lengths[0] + 1, *line.lengths[1:]))

    tally = replay(edit_log(engine_log, tmp_path, change))["draft budget"]
    assert tally.num_different == 1, "later decisions do not depend on it"
    assert tally.first is not None
    assert tally.first.number == 21
    assert "request 0 takes" in tally.first.recorded
    assert tally.first.recorded != tally.first.planned


def test_changed_paths_and_orders_are_shown(engine_log: Path, tmp_path: Path) -> None:
    def change(_: int, line: DecisionLine) -> DecisionLine:
        if isinstance(line, PathsLine) and line.chosen:
            return msgspec.structs.replace(line, chosen=line.chosen[:-1], lengths=line.lengths[:-1])
        if isinstance(line, DrafterLine):
            return DrafterLine()
        return line

    tallies = replay(edit_log(engine_log, tmp_path, change))
    paths, orders = tallies["draft paths"].first, tallies["model drafter"].first
    assert paths is not None
    assert "alternatives are verified: candidates" in paths.planned
    assert orders is not None
    assert orders.recorded == "it rests"
    assert orders.planned.startswith("it drafts down to path probability 0.")


def test_a_log_ends_where_another_policy_begins(tmp_path: Path) -> None:
    from paceline.engine.fast_loop import FastLoop

    loop = FastLoop(EngineSettings(decision_log=str(tmp_path)))
    loop.use_budget(BudgetSettings(policy="fixed"))
    live(EngineSettings(), 1, 3)
    assert replay(tmp_path / "engine-1.decisions")["draft budget"].num_planned == 0


# -- the controller

SETTINGS = FleetSettings(workers=2, chunk_tokens=8, silence_s=10.0, max_failed_starts=2)


def request(key: int) -> RolloutRequest:
    return RolloutRequest((1, 2, 3, 4), 20, key=key, group=key // 10)


def ended(chunk: int, start: int, count: int, reason: str) -> Report:
    return Report(2, endings=(make_ending(chunk, start, range(start, start + count), reason),))


EVENTS: list[Event] = [
    Opened(),
    WorkerUp("w0", 0, 0, 100, 4, 10),
    Submitted((request(2**64 - 1), request(2)), true_lengths=(12, 3)),
    Reported("w0", 0, Report(1, Growths.pack([Growth(0, 0, Packed.of((0, 1), (-0.5, float("nan"))), 1)]))),
    WorkerUp("w1", 0, 0, 100, 4, 10),
    WorkerLost("w0", 0, "killed"),
    *(Tick(float(now_s)) for now_s in range(1, 13)),
    WorkerUp("w1", 1, 0, 100, 4, 10),
    Reported("w1", 1, ended(4, 0, 8, "length")),
    Reported("w1", 1, ended(5, 2, 6, "stop")),
    Reported("w1", 1, ended(6, 8, 3, "stop")),
    WeightsChanged(3),
    WeightsLoaded("w1", 1, 3),
    Submitted((request(4),)),
    Abandoned(),
]


@pytest.fixture
def controller_log(tmp_path: Path) -> Path:
    """A fleet of two workers, of which one is lost and one silent."""
    log, controller = open_log(SETTINGS, str(tmp_path / "live")), Controller(SETTINGS)
    assert log is not None
    for event in EVENTS:
        log.decide(controller, event)
    log.close()
    return tmp_path / "live" / "controller-1.decisions"


def test_a_controllers_actions_are_the_same_again(controller_log: Path) -> None:
    tally = replay(controller_log)["fleet controller"]
    assert (tally.num_planned, tally.num_different, tally.num_left) == (len(EVENTS), 0, 0)


def test_events_come_back_as_they_were(controller_log: Path) -> None:
    from paceline.fleet.controller_replay import _read_event

    with DecisionReader(controller_log) as reader:
        found = [_read_event(reader, line) for line in reader]  # type: ignore[arg-type]
    assert repr(found) == repr(EVENTS)


def test_another_controller_is_shown(controller_log: Path, tmp_path: Path) -> None:
    tally = replay(edit_log(controller_log, tmp_path, settings={"chunk_tokens": 12}))["fleet controller"]
    assert tally.num_different == 1
    assert tally.num_planned + tally.num_left == len(EVENTS)
    assert tally.first is not None
    assert tally.first.number == 3
    assert f"run chunk 0 on w0 (life 0): response of key {2**64 - 1}, tokens 0 to 8" in tally.first.recorded
    assert "tokens 0 to 12" in tally.first.planned


def test_an_event_with_a_text_that_is_not_utf_8_is_named(controller_log: Path, tmp_path: Path) -> None:
    def damage(number: int, line: DecisionLine) -> DecisionLine:
        if number != 1:
            return line
        return msgspec.structs.replace(
            line, event="WorkerLost", body=msgspec.Raw(b"\x81\xa6worker\xa4caf\xe9")
        )

    with pytest.raises(RecordError, match="has a WorkerLost that is another one in this Paceline"):
        replay(edit_log(controller_log, tmp_path, damage))


def test_an_error_is_a_decision_too(tmp_path: Path) -> None:
    log, controller = open_log(SETTINGS, str(tmp_path)), Controller(SETTINGS)
    assert log is not None
    for event in EVENTS[:3]:
        log.decide(controller, event)
    with pytest.raises(RequestError, match="2 responses are still running"):
        log.decide(controller, EVENTS[2])
    path = tmp_path / "controller-1.decisions"
    tally = replay(path)["fleet controller"]
    assert (tally.num_planned, tally.num_different) == (4, 0)
    edited = edit_log(path, tmp_path / "edited", lambda _, line: msgspec.structs.replace(line, error=None))
    first = replay(edited)["fleet controller"].first
    assert first is not None
    assert first.recorded == "on Submitted: nothing"
    assert first.planned.startswith("on Submitted: raises RequestError: 2 responses are still running")


def test_every_action_has_a_text() -> None:
    assert describe(StopWorker("w1", 3)) == "stop w1 (life 3)"
    assert describe(CancelChunk("w1", 3, 9)) == "cancel chunk 9 on w1 (life 3)"


def test_lines_of_another_kind_are_refused(engine_log: Path, controller_log: Path) -> None:
    with DecisionReader(engine_log) as reader:
        reader.header = msgspec.structs.replace(reader.header, settings={})
        with pytest.raises(RecordError, match="is of kind engine and has a BudgetLine: it is damaged"):
            replay_controller(reader)
    with DecisionReader(controller_log) as reader:
        reader.header = msgspec.structs.replace(reader.header, settings={})
        with pytest.raises(RecordError, match="is of kind controller and has a ControllerLine"):
            replay_engine(reader)


# -- the command


def test_the_command_counts_what_was_planned_again(
    run: Run, engine_log: Path, controller_log: Path, tmp_path: Path
) -> None:
    controller_log.rename(engine_log.parent / controller_log.name)
    try:
        done = run("replay", engine_log.parent.parent)
    finally:
        (engine_log.parent / controller_log.name).unlink()
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert ["controller-1.decisions", "fleet", "controller", str(len(EVENTS)), "0"] in rows
    assert any(row[:3] == ["engine-1.decisions", "draft", "budget"] and row[-1] == "0" for row in rows)
    assert "recorded" not in done.out


def test_the_command_shows_what_differs(run: Run, controller_log: Path, tmp_path: Path) -> None:
    path = edit_log(controller_log, tmp_path / "edited", settings={"chunk_tokens": 12})
    path.write_bytes(path.read_bytes()[:-1])
    done = run("replay", path)
    assert done.code == 1
    assert "controller-1.decisions, fleet controller: decision 3 is the first that differs" in done.out
    assert "  recorded: on Submitted, action 1 of 2: run chunk 0 on w0" in done.out
    assert "  planned:  on Submitted, action 1 of 2: run chunk 0 on w0" in done.out
    assert f"{len(EVENTS) - 4} events behind it" in done.out
    assert "the last line is torn and was passed over" in done.out


def test_the_command_says_where_logs_come_from(run: Run, tmp_path: Path) -> None:
    done = run("replay", tmp_path)
    assert done.code == 6
    assert "holds no decision log" in done.error


def test_a_rollout_refuses_a_log_that_cannot_be(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    for options, message in (
        (["--decisions", prompts], "is a file: give a folder"),
        (["--decisions", tmp_path / "d", "--plain"], "decides nothing: drop --decisions"),
    ):
        done = run("rollout", model, prompts, "--out", tmp_path / "o.jsonl", *options)
        assert done.code == 2
        assert message in done.error

"""Fleet carries out what the controller says: in an order that workers can follow, failures last. Without Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    Action,
    CancelChunk,
    EndTraining,
    Event,
    Fail,
    LoadWeights,
    Opened,
    Order,
    Report,
    Reported,
    StartWorker,
    StopWorker,
    Submitted,
    Telemetry,
    Tick,
    TrainDrafter,
    WorkerLost,
    WorkerUp,
)
from paceline.errors import EngineError
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.fleet import TICK_S, Fleet
from paceline.fleet.help_log import HelpLog
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.types import KvPoolCounters, KvUse, RolloutRequest


class Calls:
    """Stands where the actors are, and writes down what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, worker: str, life: int) -> None:
        self.told.append(("start", worker, life))

    def stop(self, worker: str, life: int) -> None:
        self.told.append(("stop", worker, life))

    def load(self, worker: str, life: int, weights: Any, version: int) -> None:
        self.told.append(("load", worker, version))

    def order(self, worker: str, orders: Sequence[Order], params: Any) -> None:
        self.told.append(("order", worker, *(one.chunk for one in orders)))


@pytest.fixture
def fleet() -> Fleet:
    """A fleet of two workers without processes."""
    made = Fleet.__new__(Fleet)
    made._num_rollouts, made._is_closed = 0, False
    made.settings = FleetSettings(workers=2, silence_s=10.0)
    made.board = StatusBoard({name: WorkerStatus(name) for name in ("w0", "w1")})
    made._controller = Controller(made.settings)
    made._actors = Calls()  # type: ignore[assignment]
    made._journal = made._params = made._weights = made._decision_log = None
    made.chunks, made.helps = ChunkLog(), HelpLog()
    made._next_tick_s, made._trainer = 0.0, None
    return made


def told(fleet: Fleet) -> list[tuple[Any, ...]]:
    calls = fleet._actors.told  # type: ignore[attr-defined]
    fleet._actors.told = []  # type: ignore[attr-defined]
    return calls


def test_orders_go_out_once_per_worker_and_before_its_weights(fleet: Fleet) -> None:
    chunks: list[Action] = [CancelChunk("w1", 0, 1), CancelChunk("w0", 0, 7), CancelChunk("w0", 0, 8)]
    fleet._act([*chunks, LoadWeights("w0", 0, 3), CancelChunk("w1", 0, 2)])
    assert told(fleet) == [("order", "w0", 7, 8), ("load", "w0", 3), ("order", "w1", 1, 2)]


def test_the_trainer_is_stopped_before_any_chunk_goes_out(fleet: Fleet) -> None:
    calls = fleet._actors.told  # type: ignore[attr-defined]
    used_s = iter([0.25, None])  # the second time it has died

    def pause(*words: str | None) -> float | None:
        calls.append(("pause", *words))
        return next(used_s)

    trainer: Any = SimpleNamespace(resume=lambda *words: calls.append(("resume", *words)), pause=pause)
    fleet._trainer = trainer
    for _ in range(2):
        fleet.helps.note(Tick(1.0), [TrainDrafter("w1", 0, "w1")], 1.0)
        fleet._act([TrainDrafter("w1", 0, "w1")])
        fleet._act([EndTraining("w1", 0), CancelChunk("w1", 0, 7)])
        assert told(fleet) == [("resume", "w1", "w1"), ("pause", "w1", None), ("order", "w1", 7)]
        calls = fleet._actors.told  # type: ignore[attr-defined]
    assert [(one.worker, one.core_s) for one in fleet.helps.take_training()] == [("w1", 0.25)]


def test_a_failure_is_raised_when_all_else_is_done(fleet: Fleet) -> None:
    with pytest.raises(EngineError, match="it cannot go on"):
        fleet._act([Fail(EngineError, "it cannot go on"), StartWorker("w0", 1), CancelChunk("w1", 0, 7)])
    assert told(fleet) == [("start", "w0", 1), ("order", "w1", 7)]


def test_a_loss_counts_once_however_often_it_is_told(fleet: Fleet) -> None:
    events: list[Event] = [Opened(), WorkerUp("w0", 0, 0, 100, 4, 10), WorkerUp("w1", 0, 0, 100, 4, 10)]
    for event in events:
        fleet._hear(event)
    fleet._tell(Submitted((RolloutRequest((1,), 8, key=1, group=0),)))
    for now_s in range(12):
        fleet._tell(Tick(float(now_s)))
    stopped = [call for call in told(fleet) if call[0] == "stop"]
    assert stopped == [("stop", "w0", 0)]
    fleet._hear(WorkerLost("w0", 0, "its report was cut off"))
    fleet._hear(WorkerLost("w0", 0, "its orders were cut off"))
    assert fleet.board.workers["w0"].num_losses == 1
    fleet._hear(WorkerLost("w0", 1, "killed"))
    assert fleet.board.workers["w0"].num_losses == 2
    fleet._act([StopWorker("w0", 2)])
    assert fleet.board.workers["w0"].num_losses == 3


def test_what_has_arrived_is_read_before_the_clock(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    fleet._draft_server = fleet._kv_pool = fleet._rewards = None
    fleet._finished = []
    fleet._actors = SimpleNamespace(calls=["report"], take=lambda ref: heard.append(ref))  # type: ignore[assignment]
    ray = SimpleNamespace(wait=lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setitem(sys.modules, "ray", ray)
    fleet._tell = lambda event: heard.append(type(event).__name__)  # type: ignore[method-assign]
    fleet.advance()
    assert heard == ["report", "Tick"]


def test_time_is_told_no_oftener_than_it_matters(fleet: Fleet) -> None:
    events: list[Event] = []
    fleet._tell = events.append  # type: ignore[method-assign]
    for step in range(1000):
        fleet._tick(step * TICK_S / 100)
    assert len(events) == 10


def test_what_a_life_that_is_over_still_tells_is_not_shown(fleet: Fleet) -> None:
    """A hung engine's reports go on until its process is gone."""
    seen = Telemetry(KvUse(10, 16, 7, 2), 5, (), KvPoolCounters(hits=3))
    fleet._hear(Reported("w0", 0, Report(1, telemetry=seen)))
    fleet._act([StopWorker("w0", 0)])
    before = replace(fleet.board.workers["w0"])
    assert (before.num_running, before.num_preemptions, before.kv_pool.hits) == (0, 2, 3)
    fleet._hear(Reported("w0", 0, Report(2, telemetry=seen)))
    assert fleet.board.workers["w0"] == before
    fleet._hear(Reported("w0", 1, Report(1, telemetry=seen)))
    status = fleet.board.workers["w0"]
    assert (status.num_running, status.num_preemptions, status.kv_pool.hits) == (5, 4, 6)

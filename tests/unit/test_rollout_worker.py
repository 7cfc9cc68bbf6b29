"""The rollout worker's thread and reports, on an engine that counts instead of thinking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from reports import digest, pack

from paceline.control.events import CancelChunk, DraftFor, Ending, Growth, Report, RunChunk
from paceline.engine import rungs
from paceline.engine.rollout_engine import TokenEvent
from paceline.errors import CheckpointError, EngineError
from paceline.fleet.rollout_worker import Pace, RolloutWorker
from paceline.fleet.weights import pack_weights, unpack_weights
from paceline.types import (
    DrafterScore,
    DraftSharingCounters,
    KvPoolCounters,
    Response,
    RolloutRequest,
    StepCosts,
)

PARAMS: Any = object()
PACE = Pace(0.001, 1)
COSTS = StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.001, 0.8)


@dataclass
class CountingEngine:
    """Every step gives each response its next number, when the test lets it."""

    gate: threading.Semaphore
    policy_version: int = 0
    vocab_size: int = 64
    kv_pool_obstacle: str | None = "2 workers"
    invariance_gap: str | None = "experts"
    draft_addresses: tuple[str, ...] = ()
    running: dict[int, RolloutRequest] = field(default_factory=dict)
    failure: Exception | None = None
    failing: set[int] = field(default_factory=set)
    scheduler: Any = field(
        default_factory=lambda: SimpleNamespace(
            block_size=16,
            num_preemptions=0,
            kv_cache_manager=SimpleNamespace(
                block_pool=SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 4)
            ),
        )
    )
    closed: bool = False
    drafter: int = 0
    step_tokens: int = 1
    """Tokens that a step brings to a response."""

    def num_running(self) -> int:
        return len(self.running)

    def submit(self, index: int, request: RolloutRequest, params: Any) -> None:
        if not request.prompt:
            raise ValueError("empty prompt")
        self.running[index] = request

    def kv_pool_counters(self) -> KvPoolCounters:
        return KvPoolCounters()

    def drafter_score(self) -> DrafterScore:
        return DrafterScore(tried=4)

    def make_draft_workers(self) -> list[Any]:
        return ["a drafter"]

    def use_drafter(self, place: int) -> None:
        self.drafter = place

    def draft_sharing_counters(self) -> DraftSharingCounters:
        return DraftSharingCounters(heard_tokens=5)

    def abort(self, indices: list[int], *, keep_kv: bool = True) -> None:
        for index in indices:
            self.running.pop(index, None)

    def step(self) -> list[TokenEvent]:
        self.gate.acquire()
        if self.failure is not None:
            raise self.failure
        return [self._grow(index, request) for index, request in list(self.running.items())]

    def _grow(self, index: int, request: RolloutRequest) -> TokenEvent:
        if index in self.failing:
            del self.running[index]
            why = "ended with 'error': the engine reported an internal error"
            return TokenEvent(index, (), (), Response(request, (), (), "error", 0, 0, 0, 0, 0, 0, why))
        start = len(request.generated)
        new = tuple(range(start, min(start + self.step_tokens, request.max_tokens)))
        tokens = (*request.generated, *new)
        grown = RolloutRequest(request.prompt, request.max_tokens, key=request.key, generated=tokens)
        response = None
        if len(tokens) == request.max_tokens:
            del self.running[index]
            response = Response(grown, tokens, (), "length", 0, 0, 0, 9, 0, 1)
        else:
            self.running[index] = grown
        return TokenEvent(index, new, (-1.0,) * len(new), response)

    def step_costs(self) -> StepCosts:
        return COSTS

    def take_observations(self) -> list[Any]:
        return []

    def push_weights(self, weights: Any, version: int) -> int:
        if self.running:
            raise EngineError("responses are running")
        self.policy_version = version
        return version

    def close(self) -> None:
        self.closed = True


@dataclass
class Spec:
    """Starts the engine that the test holds."""

    engine: CountingEngine
    start: Callable[[], CountingEngine]
    max_num_seqs: int = 8
    tells_costs: bool = False


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine(threading.Semaphore(0))


@pytest.fixture
def worker(engine: CountingEngine) -> Iterator[RolloutWorker]:
    made = RolloutWorker(Spec(engine, lambda: engine), PACE)  # type: ignore[arg-type]
    made.start()
    yield made
    engine.gate.release(1000)
    made.stop()


def chunk(number: int, max_tokens: int, generated: tuple[int, ...] = (), version: int = 0) -> RunChunk:
    request = RolloutRequest((1, 2), max_tokens, key=number, group=0, generated=generated)
    return RunChunk("w0", 0, number, request, version, number)


def wait_for(worker: RolloutWorker, found: Callable[[Report], bool]) -> Report:
    for _ in range(200):
        report = worker.report(0.05)
        if found(report):
            return report
    pytest.fail("nothing came")


def test_facts_come_from_the_engine(worker: RolloutWorker) -> None:
    facts = worker.start()
    assert (facts.num_kv_blocks, facts.block_tokens, facts.max_concurrency, facts.vocab_size) == (
        10,
        16,
        8,
        64,
    )
    assert facts.kv_pool_obstacle == "2 workers"
    assert facts.invariance_gap == "experts"


def test_a_fleet_with_help_is_told_how_fast_a_worker_is(engine: CountingEngine) -> None:
    engine.step_tokens = 2
    made = RolloutWorker(Spec(engine, lambda: engine, tells_costs=True), PACE)  # type: ignore[arg-type]
    made.start()
    made.take([chunk(1, 8), chunk(2, 8)], PARAMS)
    engine.gate.release(1000)
    num_ended = 0
    while num_ended < 2:
        report = made.report(0.05)
        num_ended += len(report.endings)
    made.stop()
    assert report.costs == COSTS
    assert report.progress is not None
    num_tokens, step_s, response_s, num_steps = astuple(report.progress)
    assert (num_tokens, num_steps) == (16, report.num_steps)
    assert num_steps in {4, 5}, "the second may come behind the first step"
    assert 0.0 < step_s < response_s <= 2.0 * step_s


def test_growth_is_told_piece_by_piece_and_the_ending_tells_the_rest(
    worker: RolloutWorker, engine: CountingEngine
) -> None:
    worker.take([chunk(5, 6, (0, 1))], PARAMS)
    engine.gate.release(2)
    told: list[int] = []
    while len(told) < 2:
        for growth in worker.report(0.05).growths:
            assert growth.start == 2 + len(told)
            told += growth.piece.unpack()[0]
    assert told == [2, 3]
    engine.gate.release(2)
    between: list[Growth] = []

    def has_ended(report: Report) -> bool:
        between.extend(report.growths)
        return bool(report.endings)

    report = wait_for(worker, has_ended)
    [ending] = report.endings
    assert (ending.chunk, ending.start, ending.num_tokens) == (5, 2, 4)
    told += [number for growth in between for number in growth.piece.unpack()[0]]
    assert (*told, *ending.rest.unpack()[0]) == (2, 3, 4, 5)
    assert ending.digest == digest(pack((2, 3, 4, 5)))
    assert (ending.num_steps, ending.num_draft_tokens, ending.finish_reason) == (4, 9, "length")
    assert report.num_steps == 4
    assert report.telemetry is not None
    assert (report.telemetry.kv.num_used, report.telemetry.num_running) == (6, 0)
    assert report.telemetry.draft_sharing.heard_tokens == 5


def test_the_last_token_never_comes_before_the_ending(worker: RolloutWorker, engine: CountingEngine) -> None:
    worker.take([chunk(1, 40)], PARAMS)
    engine.gate.release(1000)
    grown = 0
    while True:
        report = worker.report(0.05)
        grown += sum(len(growth.piece) for growth in report.growths)
        assert grown < 40
        if report.endings:
            break
    assert report.endings[0].num_tokens == 40
    assert report.endings[0].digest == digest(pack(range(40)))
    assert grown + len(report.endings[0].rest) == 40


def test_a_chunk_of_another_version_is_refused(worker: RolloutWorker, engine: CountingEngine) -> None:
    worker.take([chunk(1, 5, version=3)], PARAMS)
    assert wait_for(worker, lambda report: bool(report.refused)).refused == (1,)
    assert worker.load_weights([], 3) == 3
    worker.take([chunk(2, 5, version=3)], PARAMS)
    engine.gate.release(5)
    assert wait_for(worker, lambda report: bool(report.endings)).endings[0].chunk == 2


def test_a_chunk_that_cannot_run_is_rejected_alone(worker: RolloutWorker, engine: CountingEngine) -> None:
    bad = RunChunk("w0", 0, 1, RolloutRequest((), 5), 0, 1)
    worker.take([bad, chunk(2, 1)], PARAMS)
    engine.gate.release(1)
    rejected: list[tuple[int, str]] = []
    endings: list[int] = []
    while not (rejected and endings):
        report = worker.report(0.05)
        rejected += report.rejected
        endings += [ending.chunk for ending in report.endings]
    assert rejected == [(1, "ValueError: empty prompt")]
    assert endings == [2]


def test_a_chunk_that_the_engine_gives_up_ends_alone(worker: RolloutWorker, engine: CountingEngine) -> None:
    engine.failing.add(1)
    worker.take([chunk(1, 5), chunk(2, 5)], PARAMS)
    engine.gate.release(5)
    endings: dict[int, Ending] = {}
    while len(endings) < 2:
        endings |= {ending.chunk: ending for ending in worker.report(0.05).endings}
    assert (endings[1].finish_reason, endings[1].failure) == (
        "error",
        "the engine reported an internal error",
    )
    assert (endings[2].finish_reason, endings[2].failure) == ("length", None)


def test_a_cancelled_chunk_is_silent(worker: RolloutWorker, engine: CountingEngine) -> None:
    worker.take([chunk(1, 30), chunk(2, 30)], PARAMS)
    worker.take([CancelChunk("w0", 0, 1)], None)
    engine.gate.release(100)
    seen: list[int] = []
    while 2 not in seen:
        seen += [ending.chunk for ending in worker.report(0.05).endings]
    assert seen == [2]


def test_a_report_without_news_is_empty(worker: RolloutWorker) -> None:
    report = worker.report(0.01)
    assert (len(report.growths), report.endings, report.num_steps) == (0, (), 0)


def test_the_ladder_is_measured_with_what_was_ordered_before(
    worker: RolloutWorker, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rungs, "measure_ladder", lambda engine, *_: engine.drafter)
    worker.use_drafter(2)
    assert worker.measure_ladder([], PARAMS) == 2


def test_an_engine_that_cannot_measure_the_ladder_does_not_go_on(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise EngineError("no")

    monkeypatch.setattr(rungs, "measure_ladder", fail)
    with pytest.raises(EngineError, match="no"):
        worker.measure_ladder([], PARAMS)
    with pytest.raises(EngineError, match="the engine failed: no"):
        wait_for(worker, lambda report: False)


def test_a_failed_engine_is_told(engine: CountingEngine) -> None:
    worker = RolloutWorker(Spec(engine, lambda: engine), PACE)  # type: ignore[arg-type]
    worker.start()
    engine.failure = RuntimeError("out of order")
    worker.take([chunk(1, 30)], PARAMS)
    engine.gate.release(1)
    with pytest.raises(EngineError, match="the engine failed: RuntimeError: out of order"):
        wait_for(worker, lambda report: False)


def test_a_dead_engine_ends_its_worker_and_blames_no_chunk(
    worker: RolloutWorker, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: Any) -> None:
        raise EngineError("the engine has died")

    monkeypatch.setattr(engine, "submit", submit)
    worker.take([chunk(1, 30)], PARAMS)
    with pytest.raises(EngineError, match="the engine failed: the engine has died"):
        wait_for(worker, lambda report: bool(report.rejected))


def test_who_asks_an_engine_that_has_ended_does_not_wait(
    engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.fleet.rollout_worker.ASK_S", 0.01)
    engine.failure = RuntimeError("no memory")
    worker = RolloutWorker(Spec(engine, lambda: engine), PACE)  # type: ignore[arg-type]
    worker.start()
    worker.take([chunk(3, 9)], PARAMS)
    engine.gate.release()
    worker._thread.join()
    with pytest.raises(EngineError, match=r"answers nothing more \(RuntimeError: no memory\)"):
        worker.collection_s()


def test_an_engine_that_does_not_start_is_told(engine: CountingEngine) -> None:
    def start() -> CountingEngine:
        raise MemoryError("too large")

    worker = RolloutWorker(Spec(engine, start), PACE)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="did not start: MemoryError: too large"):
        worker.start()


def test_a_fleet_tells_no_more_than_its_driver_can_hear() -> None:
    assert Pace(0.1, 64).interval_s(128) == 0.1
    assert Pace(0.1, 1000).interval_s(128) == pytest.approx(1.28)
    assert Pace(0.1, 1000).interval_s(1) == 0.1


def test_growths_wait_for_their_time(engine: CountingEngine) -> None:
    worker = RolloutWorker(Spec(engine, lambda: engine), Pace(0.0, 10**9))  # type: ignore[arg-type]
    worker.start()
    worker.take([chunk(1, 3)], PARAMS)
    worker.report(0.2)
    engine.gate.release(2)
    while engine.running[1].generated != (0, 1):
        time.sleep(0.001)
    begin_s = time.monotonic()
    worker.report(0.1)
    assert time.monotonic() - begin_s >= 0.1, "nothing is due for hours"
    engine.gate.release(1)
    assert wait_for(worker, lambda report: bool(report.endings)), "an ending is told at once"
    worker.stop()


def test_stopping_closes_the_engine(engine: CountingEngine) -> None:
    worker = RolloutWorker(Spec(engine, lambda: engine), PACE)  # type: ignore[arg-type]
    worker.start()
    worker.stop()
    assert engine.closed


def test_weights_are_the_same_after_the_way() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.tensor(2.5),
        "c": torch.arange(12).reshape(3, 4).t(),
    }
    found = dict(unpack_weights(pack_weights(weights.items())))
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_drafters_come_and_samples_go_between_two_steps(
    worker: RolloutWorker, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    told: list[Any] = []
    for name in ("push_drafter", "drop_drafter", "collect_states"):
        monkeypatch.setattr(
            CountingEngine, name, lambda _, *given, name=name: told.append((name, *given)), raising=False
        )
    monkeypatch.setattr(CountingEngine, "take_samples", lambda _: ["sample"], raising=False)
    monkeypatch.setattr(CountingEngine, "collection_s", lambda _: 0.5, raising=False)
    worker.load_drafter(None)
    worker.collect_states(0.25, 99)
    worker.load_drafter(pack_weights([("w", torch.ones(2))]))
    assert worker.take_samples() == ["sample"]
    assert worker.collection_s() == 0.5
    (dropped, collected, (pushed, weights)) = told
    assert (dropped, collected, pushed) == (("drop_drafter",), ("collect_states", 0.25, 99), "push_drafter")
    assert weights["w"].tolist() == [1.0, 1.0]


def test_an_engine_goes_on_with_its_old_drafter_where_the_new_one_does_not_fit(
    worker: RolloutWorker,
    engine: CountingEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def push_drafter(self: CountingEngine, weights: Any) -> None:
        raise CheckpointError("weight 'w' is missing")

    monkeypatch.setattr(CountingEngine, "push_drafter", push_drafter, raising=False)
    worker.load_drafter([])
    worker.take([chunk(3, 1)], PARAMS)
    engine.gate.release()
    assert wait_for(worker, lambda report: bool(report.endings)).endings[0].chunk == 3
    assert "weight 'w' is missing" in caplog.text


def test_turns_of_drafting_are_told_and_that_it_has_failed(
    worker: RolloutWorker, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that who helps, and stands still or fails, is not counted on for ever; its engine goes on."""
    fails = threading.Event()

    def serve(drafter: str, addresses: tuple[str, ...], goes_on: Callable[[], bool], idle_s: float) -> None:
        assert (drafter, addresses) == ("a drafter", ("ipc://there",))
        while goes_on():
            if fails.wait(0.001):
                raise RuntimeError("no memory")

    monkeypatch.setattr("paceline.drafting.draft_worker.serve", serve)
    order = DraftFor("w0", 0, ("w1",), ("ipc://there",))
    worker.take([order], None)
    told = [wait_for(worker, lambda report: report.num_steps > 0).num_steps]
    told.append(wait_for(worker, lambda report: report.num_steps > told[0]).num_steps)
    fails.set()
    wait_for(worker, lambda report: report.has_failed_drafting)
    assert not worker.report(0.0).has_failed_drafting, "once"
    fails.clear()
    worker.take([order], None)
    wait_for(worker, lambda report: report.num_steps > told[1] + 1)
    worker.take([chunk(3, 1)], PARAMS)
    engine.gate.release()
    assert wait_for(worker, lambda report: bool(report.endings)).endings[0].chunk == 3

"""What a fleet costs its driver: processor time of what workers tell, and bytes of what the driver holds and keeps.

The load is that of a fleet at work: 64 workers with 128 chunks each tell every 100 ms what each chunk has grown by (4
tokens), and the driver reads the report, hears it (status, chunk log, controller) and writes the journal. Besides, the
ending of a chunk of 8192 tokens, and with `--ray` what Ray takes to bring such a report from an actor. Processor time
of one core: a busy machine makes nothing dearer, only later.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import parser, publish

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    Deliver,
    Ending,
    Event,
    Growth,
    Growths,
    Keep,
    Opened,
    Report,
    Reported,
    RunChunk,
    Submitted,
    Telemetry,
    Tick,
    WorkerStep,
    WorkerUp,
)
from paceline.control.packed import Digest, Packed
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.cluster import import_ray
from paceline.fleet.journal import Journal
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.types import KvUse, RolloutRequest, StepObservation

COLUMNS = ("case", "value", "unit")
WORKERS, CHUNKS, TOKENS, CHUNK_TOKENS = 64, 128, 4, 8192
PROGRESS_S, TICK_S = 0.1, 0.25


class Driver:
    """What `Fleet` does with what it hears, without Ray."""

    def __init__(self, num_workers: int, num_responses: int, journal: Journal) -> None:
        self.controller = Controller(FleetSettings(workers=num_workers, chunk_tokens=CHUNK_TOKENS))
        self.journal = journal
        self.chunks = ChunkLog()
        self.board = StatusBoard({name: WorkerStatus(name) for name in self.controller.workers})
        self.running: list[RunChunk] = []
        self.num_delivered = 0
        self.tell(Opened())
        for name in self.controller.workers:
            self.tell(WorkerUp(name, 0, 0, 10**6, 16, CHUNKS))
        requests = tuple(
            RolloutRequest(tuple(range(96)), 2 * CHUNK_TOKENS, key=2**63 + i, group=i // 16, sample=i % 16)
            for i in range(num_responses)
        )
        journal.find(requests)
        self.tell(Submitted(requests))

    def tell(self, event: Event, now_s: float = 0.0) -> None:
        """One event, as `Fleet` hears it."""
        if isinstance(event, Reported):
            self.board.hear(event.worker, event.report)
        self.chunks.hear(event, now_s)
        actions = self.controller.decide(event)
        self.chunks.note(actions, now_s)
        self.journal.write([action for action in actions if isinstance(action, Keep)])
        self.running += [action for action in actions if isinstance(action, RunChunk)]
        self.num_delivered += sum(isinstance(action, Deliver) for action in actions)


def make_piece(start: int, count: int) -> Packed:
    """Tokens with ids of a large vocabulary."""
    return Packed.of([(start + i) * 7919 % 150_000 for i in range(count)], [-0.37] * count)


def make_report(chunks: Sequence[int], start: int) -> bytes:
    """A worker's report of 100 ms, as it comes out of Ray."""
    growths = Growths.pack([Growth(chunk, start, make_piece(start, TOKENS), start) for chunk in chunks])
    steps = tuple(
        WorkerStep(StepObservation(len(chunks), 100, 50, 0, 0.03), 2 * len(chunks)) for _ in range(3)
    )
    telemetry = Telemetry(KvUse(10**6, 16, 10**5, 0), len(chunks), steps)
    return pickle.dumps(Report(start, growths, telemetry=telemetry), protocol=5)


def measure_growths(folder: Path, seconds: float) -> list[dict[str, object]]:
    """A fleet at work for so long, in fleet time."""
    journal = Journal.open(folder / "progress", "job", resume=False)
    driver = Driver(WORKERS, WORKERS * CHUNKS, journal)
    of: dict[str, list[int]] = {name: [] for name in driver.controller.workers}
    for order in driver.running:
        of[order.worker].append(order.chunk)
    num_rounds = round(seconds / PROGRESS_S)
    spent_s = tick_s = 0.0
    for number in range(num_rounds):
        reports = [(name, make_report(chunks, TOKENS * number)) for name, chunks in of.items()]
        now_s = number * PROGRESS_S
        begin_s = time.process_time()
        for name, report in reports:
            driver.tell(Reported(name, 0, pickle.loads(report)), now_s)
        if now_s >= tick_s:
            tick_s = now_s + TICK_S
            driver.tell(Tick(now_s), now_s)
        spent_s += time.process_time() - begin_s
    driver.tell(Tick(1e9))
    num_growths = num_rounds * WORKERS * CHUNKS
    held = [
        chunk.response for worker in driver.controller._workers.values() for chunk in worker.chunks.values()
    ]
    num_tokens = sum(one.num_tokens for one in held)
    assert num_tokens == num_growths * TOKENS
    held_bytes = sum(one.tokens.__sizeof__() + one.logprobs.__sizeof__() for one in held)
    journal.close()
    return [
        row("a growth of 4 tokens", 1e6 * spent_s / num_growths, "us"),
        row("64 workers x 128 chunks at 100 ms", 100 * spent_s / seconds, "% of a core"),
        row("driver's memory", held_bytes / num_tokens, "bytes a token"),
        row("journal", journal.path.stat().st_size / num_tokens, "bytes a token"),
    ]


def measure_ending(folder: Path, is_told: bool) -> dict[str, object]:
    """A response's first chunk of 8192 tokens ends, told by growths before or not."""
    journal = Journal.open(folder / f"ending-{is_told}", "job", resume=False)
    driver = Driver(1, 100, journal)
    chunks = [order.chunk for order in driver.running]
    packed = make_piece(0, CHUNK_TOKENS)
    rest = packed
    if is_told:
        rest = packed.cut(CHUNK_TOKENS - 2, CHUNK_TOKENS)
        told = packed.cut(0, CHUNK_TOKENS - 2)
        driver.tell(Reported("w0", 0, Report(1, Growths.pack([Growth(one, 0, told, 9) for one in chunks]))))
        driver.tell(Tick(0.0))
    digest = Digest().add(packed.tokens, packed.logprobs)
    endings = [Ending(one, 0, CHUNK_TOKENS, rest, digest, 9, 0, "stop") for one in chunks]
    reports = [pickle.dumps(Report(2, endings=(ending,)), protocol=5) for ending in endings]
    begin_s = time.process_time()
    for report in reports:
        driver.tell(Reported("w0", 0, pickle.loads(report)))
    spent_s = time.process_time() - begin_s
    assert driver.num_delivered == len(chunks)
    journal.discard()
    how = "told before" if is_told else "told at once"
    return row(f"the ending of 8192 tokens, {how}", 1e6 * spent_s / len(chunks), "us")


def measure_ray(num_calls: int) -> dict[str, object]:
    """Processor time of this process for a report of 128 growths that an actor gives, the next call included."""
    ray = import_ray()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    report = pickle.loads(make_report(range(CHUNKS), 0))

    @ray.remote(num_cpus=0.1)
    class Worker:
        def report(self) -> Report:
            return report  # type: ignore[no-any-return]

    remote: Any = Worker
    workers = [remote.remote() for _ in range(4)]
    ray.get([worker.report.remote() for worker in workers])
    calls = {worker.report.remote(): worker for worker in workers}
    begin_s = time.process_time()
    for _ in range(num_calls):
        [ready], _ = ray.wait(list(calls), num_returns=1)
        ray.get(ready)
        worker = calls.pop(ready)
        calls[worker.report.remote()] = worker
    spent_s = time.process_time() - begin_s
    ray.shutdown()
    return row("Ray brings a report of 128 growths", 1e6 * spent_s / num_calls, "us")


def row(case: str, value: float, unit: str) -> dict[str, object]:
    return {"case": case, "value": round(value, 2), "unit": unit}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=20.0, help="fleet time to measure")
    arguments.add_argument("--ray", action="store_true", help="measure Ray's own part too")
    options = arguments.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = measure_growths(folder, options.seconds)
        cases: list[Callable[[], dict[str, object]]] = [
            lambda: measure_ending(folder, True),
            lambda: measure_ending(folder, False),
        ]
        if options.ray:
            cases.append(lambda: measure_ray(5000))
        rows += [measure() for measure in cases]
    publish("driver_load", rows, COLUMNS, options)


if __name__ == "__main__":
    main()

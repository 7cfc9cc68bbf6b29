"""Milliseconds of the decisions across workers at cluster size: they are taken while GPUs wait.

Processor time, the fastest of five, one core: a busy machine does not make a decision slower, only later. Cases:
placement on 512 GPUs, reconfiguration of 1000 requests, racers for 10^4 requests, 10^4 dispatch decisions, and what the
fleet's controller takes to hear of 10^4 ended chunks and give out the next ones, of 10^4 and 10^5 responses, and of the
time four times a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from harness import parser, publish

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import Ending, Opened, Report, Reported, RunChunk, Submitted, Tick, WorkerUp
from paceline.control.packed import Digest, Packed
from paceline.planning.dispatch import Dispatcher, DispatchSettings
from paceline.planning.latency_profile import AffineLatency
from paceline.planning.placement import Cluster, place
from paceline.planning.racing import RacingSnapshot, assign_best_of_n, assign_fastest_of_n
from paceline.planning.reconfigure import reconfigure
from paceline.planning.window import Rules, profiled_times
from paceline.types import RolloutRequest

COLUMNS = ("case", "ms", "limit_ms")
DRAFT, VERIFY = AffineLatency(0.001, 0.00001), AffineLatency(0.012, 0.00002)


def fastest_ms(prepare: Callable[[], Callable[[], object]]) -> float:
    """Processor milliseconds of what `prepare` returns, the fastest of five."""
    found = []
    for _ in range(5):
        decide = prepare()
        start = time.process_time()
        decide()
        found.append(1e3 * (time.process_time() - start))
    return min(found)


def placement(rules: Rules) -> Callable[[], object]:
    """512 GPUs, 16384 requests, verifiers on powers of two, every smaller drafter."""
    verify = {2**power: AffineLatency(0.012 / 2**power, 0.00002 / 2**power) for power in range(9)}
    cluster = Cluster(512, 16384, dict.fromkeys(range(1, 257), DRAFT), verify)
    return lambda: place(cluster, 0.8, 32, rules)


def reconfiguration() -> Callable[[], object]:
    """1000 requests, windows up to 32."""
    acceptance = np.random.default_rng(2).beta(6, 2, size=1000)
    times = profiled_times(DRAFT, VERIFY, 64, 32)
    return lambda: reconfigure(acceptance, times)


def race(assign: Callable[[RacingSnapshot, int], object]) -> Callable[[], object]:
    """10^4 requests with one drafter each, 4 drafters, 512 workers with room for 128."""
    rng = np.random.default_rng(3)
    drafting = np.eye(4, dtype=np.bool_)[rng.integers(0, 4, 10_000)]
    snapshot = RacingSnapshot(rng.random(10_000), drafting, np.arange(512) % 4, rng.integers(0, 5, 512))
    return lambda: assign(snapshot, 128)


def dispatch(variant: str) -> Callable[[], object]:
    """625 groups of 16 on 64 workers with room for all."""
    lengths = {group: [8192 + group] * 16 for group in range(625)}
    settings = DispatchSettings(variant=variant)  # type: ignore[arg-type]
    dispatcher = Dispatcher(settings, lengths if variant == "oracle" else None)
    for group in lengths:
        dispatcher.submit(group, 16, 512, 65_536)
    for number in range(64):
        dispatcher.worker_up(f"w{number}", 10**9, 10**9)

    def decide() -> int:
        count = 0
        while dispatcher.next_assignment() is not None:
            count += 1
        return count

    return decide


def control(num_workers: int) -> Callable[[], object]:
    """10^4 chunks end, one after another; 100 responses of 8 tokens a chunk a worker, which tells once a second."""
    controller = Controller(FleetSettings(workers=num_workers, chunk_tokens=8))
    controller.decide(Opened())
    for name in controller.workers:
        controller.decide(WorkerUp(name, 0, 0, 10**6, 4, 64))
    requests = tuple(
        RolloutRequest((1, 2, 3, i // 16), 64, key=i, group=i // 16, sample=i % 16)
        for i in range(100 * num_workers)
    )
    running = deque(controller.decide(Submitted(requests)))
    packed = Packed.of(range(8), (-1.0,) * 8)
    digest = Digest().add(packed.tokens, packed.logprobs)

    def decide() -> None:
        for number in range(10_000):
            if number % (num_workers // 4) == 0:
                controller.decide(Tick(number / num_workers))
            chunk = running.popleft()
            assert isinstance(chunk, RunChunk)
            start = len(chunk.request.generated)
            reason = "stop" if start == 24 else "length"
            ending = Ending(chunk.chunk, start, 8, packed, digest, 8, 0, reason)
            report = Report(number + 1, endings=(ending,))
            actions = controller.decide(Reported(chunk.worker, 0, report))
            running.extend(action for action in actions if isinstance(action, RunChunk))

    return decide


def main() -> None:
    options = parser(__doc__).parse_args()
    cases: list[tuple[str, Callable[[], Callable[[], object]], float]] = [
        ("placement, ours", lambda: placement(Rules.PROTOCOL), 50.0),
        ("placement, paper", lambda: placement(Rules.PAPER), 50.0),
        ("reconfiguration", reconfiguration, 10.0),
        ("racing, best of n", lambda: race(assign_best_of_n), 50.0),
        ("racing, fastest of n", lambda: race(assign_fastest_of_n), 50.0),
    ]
    variants = ("even", "context", "no-context", "oracle", "sticky", "group")
    cases += [(f"dispatch, {name}", partial(dispatch, name), 50.0) for name in variants]
    cases += [
        (f"controller, {100 * count} responses", partial(control, count), 500.0) for count in (100, 1000)
    ]
    rows = [{"case": name, "ms": fastest_ms(prepare), "limit_ms": limit} for name, prepare, limit in cases]
    publish("decisions", rows, COLUMNS, options)


if __name__ == "__main__":
    main()

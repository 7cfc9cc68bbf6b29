"""Milliseconds of the decisions across workers at cluster size: they are taken while GPUs wait.

Processor time, the fastest of five, one core: a busy machine does not make a decision slower, only later. Cases:
placement on 512 GPUs, reconfiguration of 1000 requests, racers for 10^4 requests, 10^4 dispatch decisions, and what the
fleet's controller takes to hear of 10^4 ended chunks and give out the next ones, of 10^4 and 10^5 responses, and of the
time four times a second. Help where half of 1000 workers drafts for the other half: the choice when the worker that
ends last has lost its helper, and 100 reports.

And what an engine step spends on its draft worker, telling and hearing all and deciding whether to wait, at 1 and 128
responses: the engine thread's time, median of 200 steps. `wait or go` is the part of it that decides: what the next
drafts would bring, what waiting for them costs. `draft windows`: what it takes to learn from a step's drafts
and to plan all windows, which is done every `reconfigure_steps` steps. `inside or ahead`: what an engine that chooses
learns from a step. `limit_ms` is what each should take at most; a row above it misses its limit. Before each
measurement the processor's caches are filled with something else, as a target fills them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from harness import Stopwatch, median, parser, publish

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    DraftFor,
    Ending,
    Opened,
    Report,
    Reported,
    RunChunk,
    Submitted,
    Tick,
    WorkerLost,
    WorkerUp,
)
from paceline.control.packed import Digest, Packed
from paceline.drafting.tree import DraftTrees
from paceline.drafting.wire import Seal
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import (
    DraftCounts,
    Drafts,
    WorkerSettings,
    decode_for_worker,
    encode,
    hello,
    pack_draft,
)
from paceline.engine.draft_ahead import DraftAhead
from paceline.engine.loop_log import EngineLog
from paceline.planning.coupling import Coupling
from paceline.planning.dispatch import Dispatcher, DispatchSettings
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.latency_profile import AffineLatency
from paceline.planning.placement import Cluster, place
from paceline.planning.racing import RacingSnapshot, assign_best_of_n, assign_fastest_of_n
from paceline.planning.reconfigure import reconfigure
from paceline.planning.window import Rules, profiled_times
from paceline.types import DraftQuery, RolloutRequest, StepCosts, StepObservation

COLUMNS = ("case", "ms", "limit_ms")
LEVELS, SURE = np.arange(16, dtype=np.int32), np.full(16, 0.8, np.float32)
DRAFT, VERIFY = AffineLatency(0.001, 0.00001), AffineLatency(0.012, 0.00002)
COSTS = StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.001, 0.8)


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


def helping_fleet(num_workers: int) -> Controller:
    """Half of the workers have 4 stragglers each, the others have just fallen free."""
    controller = Controller(FleetSettings(workers=num_workers, variant="even", help="draft"))
    controller.decide(Opened())
    for name in controller.workers:
        controller.decide(WorkerUp(name, 0, 0, 10**6, 4, 64, (f"ipc://{name}",)))
    requests = tuple(RolloutRequest((1, 2, 3), 4096 + i, key=i, group=i) for i in range(4 * num_workers))
    chunks = [one for one in controller.decide(Submitted(requests)) if isinstance(one, RunChunk)]
    free = set(controller.workers[num_workers // 2 :])
    packed = Packed.of(range(8), (-1.0,) * 8)
    digest = Digest().add(packed.tokens, packed.logprobs)
    for name in controller.workers:
        ended = [chunk for chunk in chunks if chunk.worker == name and name in free]
        endings = tuple(Ending(chunk.chunk, 0, 8, packed, digest, 8, 0, "stop") for chunk in ended)
        controller.decide(Reported(name, 0, Report(1, endings=endings, costs=COSTS)))
    return controller


def help_decision(num_workers: int) -> Callable[[], object]:
    """The worker that ends last has lost its helper, and gets the next one: one tick of the controller."""
    controller = helping_fleet(num_workers)
    helped = [one for one in controller.decide(Tick(1.0)) if isinstance(one, DraftFor)]
    assert len(helped) == num_workers // 2
    helper = helped[0].worker  # the first to be chosen helps the one that ends last
    controller.decide(WorkerLost(helper, 0, "killed"))
    controller.decide(WorkerUp(helper, 1, 0, 10**6, 4, 64, (f"ipc://{helper}",)))
    return lambda: controller.decide(Tick(2.0))


def help_report(num_workers: int) -> Callable[[], object]:
    """A hundred reports of a worker that is helped, as half of the fleet is."""
    controller = helping_fleet(num_workers)
    controller.decide(Tick(1.0))
    report = Reported("w0", 0, Report(2, costs=COSTS))
    controller.decide(report)  # what the tick has changed is predicted anew

    def decide() -> None:
        for _ in range(100):
            controller.decide(report)

    return decide


class DraftWorkerStep(NamedTuple):
    """Milliseconds of the engine's thread, medians over steps."""

    all_ms: float
    windows_ms: float
    waiting_ms: float
    """Deciding whether to wait."""


def step_of_draft_worker(num_responses: int, every: int = 0, num_steps: int = 200) -> DraftWorkerStep:
    """What a step spends on its draft worker. every: steps from plan to plan of the windows.

    The worker's end is played here: 16 tokens are always drafted ahead of every response.
    """
    import zmq

    trees = DraftTrees(most_ahead=16)
    settings = WorkerSettings("", 0, "", "auto", 4096, num_responses, 512, 0.05, None)
    link = WorkerLink(settings, 16, trees, has_child=False)
    ahead = DraftAhead([link], trees, EngineLog(None, 1), every, 32)
    steps: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    drafts: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    steps.connect(link.settings.address)
    seal = Seal(None)
    steps.send(seal.close(hello(link.settings.address)))
    while not steps.poll(1):
        link.take()
    packed = seal.open(steps.recv())
    assert packed is not None
    begin = decode_for_worker(packed)
    drafts.setsockopt(zmq.CONFLATE, 1)
    drafts.connect(begin.drafts_to)
    responses, positions = np.arange(num_responses), np.full(num_responses, 200)
    query = DraftQuery(
        responses,
        responses,
        responses.astype(np.uint64),
        positions,
        np.ones(num_responses, np.float32),
        np.full(num_responses, 16, np.int32),
    )
    for response in range(num_responses):
        trees.open(response, np.zeros(200, np.int32))
        link.open(response, response, 1.0, 4096)
    offsets, decided = np.arange(num_responses + 1, dtype=np.int32) * 4, np.arange(4)
    step_time = StepTimeModel.initial()
    for count in (1, 2, 16, 128, 2048):
        step_time = update_measured_time(step_time, count, 0.014 + 0.0001 * count)
    caches, seconds, planning_s, deciding_s = np.zeros(1 << 24, np.float32), [], [], []
    in_trees = Stopwatch(time.thread_time)
    trees.best = in_trees.around(trees.best)  # type: ignore[method-assign]
    for _ in range(num_steps):
        tokens = ((positions[:, None] + decided) % 512).astype(np.int32)  # as they are drafted below
        caches += 1.0
        start_s = time.thread_time()
        ahead.learn(responses, tokens)
        ahead.plan(responses, step_time)
        planning_s.append(time.thread_time() - start_s)
        trees.advance(responses, offsets, tokens.ravel())
        ahead.grow(responses, offsets, tokens.ravel())
        told_s = time.thread_time()
        positions += 4
        ahead_of = b"".join(
            pack_draft(r, p, (p + LEVELS) % 512, LEVELS - 1, SURE) for r, p in enumerate(positions.tolist())
        )
        said = Drafts(begin.begun, link.number, ahead_of, 1.0, 1, 0.8, DraftCounts())
        drafts.send(seal.close(encode(said)))
        time.sleep(0.002)
        caches += 1.0
        began_s = time.thread_time()
        assert ahead.listen()
        heard_s, in_trees.total_s = time.thread_time(), 0.0
        ahead.best(query, step_time, 16 * num_responses, may_wait=True)
        end_s = time.thread_time()
        deciding_s.append(end_s - heard_s - in_trees.total_s)
        seconds.append(end_s - began_s + told_s - start_s)
    link.shut_down()
    return DraftWorkerStep(*(1e3 * median(some) for some in (seconds, planning_s, deciding_s)))


def inside_or_ahead_ms(num_responses: int, num_steps: int = 200) -> float:
    """What a step of an engine with `draft_worker="auto"` spends on where its model is to draft."""
    coupling, rng = Coupling(), np.random.default_rng(0)
    caches, seconds = np.zeros(1 << 24, np.float32), []
    for number in range(num_steps):
        accepted = int(rng.binomial(8 * num_responses, 0.5))
        told = (accepted,) if coupling.is_ahead else ()
        context = num_responses * (200 + 4 * number)
        step = StepObservation(
            num_responses, 8 * num_responses, accepted, 0, 0.02, num_context_tokens=context, ahead_tokens=told
        )
        caches += 1.0
        start_s = time.thread_time()
        coupling.after_step(step)
        seconds.append(time.thread_time() - start_s)
    return 1e3 * median(seconds)


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
    cases += [
        ("help, a choice among 1000 workers", partial(help_decision, 1000), 1.0),
        ("help, 100 reports of 1000 workers", partial(help_report, 1000), 10.0),
    ]
    rows = [{"case": name, "ms": fastest_ms(prepare), "limit_ms": limit} for name, prepare, limit in cases]
    for count, limit in ((1, 0.05), (128, 0.3)):
        step, planned = step_of_draft_worker(count), step_of_draft_worker(count, every=1)
        found = {
            "wait or go": step.waiting_ms,
            "draft windows": planned.windows_ms,
            "inside or ahead": inside_or_ahead_ms(count),
            "step of a draft worker": step.all_ms,
        }
        rows += [
            {"case": f"{what}, responses: {count}", "ms": ms, "limit_ms": limit} for what, ms in found.items()
        ]
    publish("decisions", rows, COLUMNS, options)


if __name__ == "__main__":
    main()

"""Simulated workers: their closed form against a loop over single rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.planning.latency_profile import AffineLatency, StepLatency
from paceline.sim.acceptance_model import AcceptanceProcess
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.simulated_worker import Job, SimulatedWorker
from paceline.sim.speculation import FixedWindow, Plain, Speculation
from paceline.types import Float64Array, Int64Array

BASE_S, TOKEN_S, CONTEXT_S = 0.01, 0.001, 1e-6


def costs(kv_tokens: int = 10**9, prefill_token_s: float = 0.0, max_requests: int = 10**6) -> EngineCosts:
    step = StepLatency(AffineLatency(BASE_S, TOKEN_S), CONTEXT_S)
    return EngineCosts(1, step, prefill_token_s, kv_tokens, max_requests)


def no_rates(responses: Int64Array, tokens: Float64Array) -> Float64Array:
    return np.empty((0, len(responses)))


def worker(engine: EngineCosts, speculation: Speculation | None = None) -> SimulatedWorker:
    return SimulatedWorker(0, engine, speculation or Plain(), no_rates)


def jobs(lengths: list[int], prompt: int = 5) -> list[Job]:
    return [Job(at, 0.0, float(length), prompt, False) for at, length in enumerate(lengths)]


def run(made: SimulatedWorker, now_s: float = 0.0) -> dict[int, float]:
    """Until nothing is left: when each response ended."""
    ends: dict[int, float] = {}
    while not made.is_free:
        now_s = made.next_event_s()
        assert now_s < math.inf
        for response, _ in made.advance(now_s):
            ends[response] = now_s
    return ends


def by_single_steps(lengths: list[int], prompt: int = 5) -> dict[int, float]:
    """The same, one step after the other; a step reads the context as it is in its middle."""
    ends: dict[int, float] = {}
    now_s, done = 0.0, 0
    while len(ends) < len(lengths):
        running = [at for at in range(len(lengths)) if at not in ends]
        context = sum(prompt + done + 0.5 for _ in running)
        now_s += BASE_S + TOKEN_S * len(running) + CONTEXT_S * context
        done += 1
        ends |= {at: now_s for at in running if lengths[at] == done}
    return ends


def test_plain_decoding_is_the_sum_of_its_steps() -> None:
    lengths = [3, 50, 50, 700, 1]
    made = worker(costs())
    made.add(jobs(lengths), 0.0)
    found, expected = run(made), by_single_steps(lengths)
    assert found.keys() == expected.keys()
    for response, end_s in expected.items():
        assert found[response] == pytest.approx(end_s, rel=1e-9)
    assert made.counters.generated_tokens == pytest.approx(sum(lengths))
    assert made.counters.busy_s == pytest.approx(max(expected.values()))


def test_stops_on_the_way_change_nothing() -> None:
    whole, cut = worker(costs()), worker(costs())
    for one in (whole, cut):
        one.add(jobs([40, 90, 300]), 0.0)
    expected = run(whole)
    ends: dict[int, float] = {}
    for now_s in np.linspace(0.0, max(expected.values()) + 0.01, 1000).tolist():
        while cut.next_event_s() <= now_s:
            at_s = cut.next_event_s()
            ends |= {response: at_s for response, _ in cut.advance(at_s)}
        cut.advance(now_s)
    assert ends.keys() == expected.keys()
    for response, end_s in expected.items():
        assert ends[response] == pytest.approx(end_s, rel=1e-6)


def test_prefill_comes_first() -> None:
    made = worker(costs(prefill_token_s=0.1))
    made.add(jobs([10, 10], prompt=20), 1.0)
    assert made.clock_s == pytest.approx(1.0 + 0.1 * 40)
    assert made.counters.prefilled_tokens == 40


def test_full_memory_preempts_the_last_and_computes_it_again() -> None:
    made = worker(costs(kv_tokens=60))
    made.add(jobs([40, 40, 40], prompt=5), 0.0)
    assert made.num_running == 3
    ends = run(made)
    assert sorted(ends) == [0, 1, 2]
    assert made.counters.preemptions >= 1
    assert ends[0] < ends[2]
    assert made.counters.prefilled_tokens > 15
    assert made.counters.generated_tokens == pytest.approx(120)


def test_one_response_larger_than_memory_still_runs() -> None:
    made = worker(costs(kv_tokens=8))
    made.add(jobs([40], prompt=5), 0.0)
    assert sorted(run(made)) == [0]


def test_concurrency_is_kept() -> None:
    made = worker(costs(max_requests=2))
    made.add(jobs([5, 5, 5, 5]), 0.0)
    assert (made.num_running, len(made.waiting)) == (2, 2)
    assert sorted(run(made)) == [0, 1, 2, 3]


def test_removed_responses_are_gone() -> None:
    made = worker(costs(max_requests=2))
    made.add(jobs([50, 50, 50]), 0.0)
    made.remove(2)
    made.remove(0)
    assert (made.responses.tolist(), len(made.waiting)) == ([1], 0)
    assert sorted(run(made)) == [1]


def test_catching_up_saves_the_difference() -> None:
    made = worker(costs())
    made.add(jobs([100]), 0.0)
    without_s = made.next_event_s()
    made.catch_up(0, 60.0)
    assert made.next_event_s() < without_s
    assert made.tokens_of(0) == 60.0
    made.catch_up(0, 30.0)
    assert made.tokens_of(0) == 60.0
    end_s = run(made)[0]
    assert end_s == pytest.approx(
        40 * (BASE_S + TOKEN_S) + CONTEXT_S * sum(65.5 + at for at in range(40)), rel=1e-9
    )


def test_catching_up_in_full_memory_preempts() -> None:
    made = worker(costs(kv_tokens=100))
    made.add(jobs([80, 80], prompt=5), 0.0)
    made.catch_up(0, 75.0)
    made.catch_up(1, 75.0)
    assert made.counters.preemptions == 1
    assert sorted(run(made)) == [0, 1]


def test_catching_up_never_takes_tokens_away() -> None:
    made = worker(costs())
    made.add(jobs([10]), 0.0)
    made.advance(made.next_event_s() - 0.5 * (BASE_S + TOKEN_S))
    before = made.tokens_of(0)
    made.catch_up(0, 1000.0)
    assert before is not None
    assert made.tokens_of(0) == pytest.approx(before)
    assert made.tokens_of(1) is None


def test_speculation_yields_what_the_window_promises() -> None:
    process = AcceptanceProcess(0.7, between=0.0, within=0.0)
    drafter = Drafter("small", AffineLatency(0.002, 0.0), process)
    made = SimulatedWorker(
        0, costs(), FixedWindow(drafter, 0, 4), lambda responses, tokens: np.full((1, len(responses)), 0.7)
    )
    made.add(jobs([1000], prompt=0), 0.0)
    end_s = run(made)[0]
    per_round = sum(0.7**k for k in range(5))
    rounds = 1000 / per_round
    expected = rounds * (4 * 0.002 + BASE_S + 5 * TOKEN_S) + CONTEXT_S * rounds * 500
    assert end_s == pytest.approx(expected, rel=1e-9)
    assert made.counters.drafted_tokens == pytest.approx(4 * rounds)
    assert made.counters.accepted_tokens == pytest.approx(1000 - rounds)


def ranked(num_ranks: int) -> EngineCosts:
    return replace(costs(), num_ranks=num_ranks)


def test_a_step_takes_what_the_fullest_rank_takes() -> None:
    """Five requests on four ranks: all wait for the one with two."""
    made = worker(ranked(4))
    made.add(jobs([100] * 5), 0.0)
    fullest = 2 * 5 + 0.5 * 2 * 100
    step_s = BASE_S + TOKEN_S * 4 * 2 + CONTEXT_S * 4 * fullest
    assert list(run(made).values()) == pytest.approx([100 * step_s] * 5, rel=1e-9)


def test_even_ranks_cost_nothing() -> None:
    one, four = worker(costs()), worker(ranked(4))
    for made in (one, four):
        made.add(jobs([80] * 8), 0.0)
    assert run(one)[0] == pytest.approx(run(four)[0])


def test_requests_stay_with_their_rank_and_new_ones_go_where_least_is() -> None:
    made = worker(ranked(2))
    made.add(jobs([10, 500, 10, 500]), 0.0)  # ranks 0, 1, 0, 1: after ten rounds both long ones share rank 1
    made.advance(made.next_event_s())
    lone_s = made.next_event_s() - made.clock_s
    made.add([Job(7, 0.0, 490.0, 5, False), Job(8, 0.0, 490.0, 5, False)], made.clock_s)
    assert made.next_event_s() - made.clock_s == pytest.approx(lone_s, rel=0.05)


def test_nothing_is_kept_free_for_growth() -> None:
    """A prompt that just fits begins, and is preempted when the other grows (vLLM V1 keeps no watermark)."""
    made = worker(costs(kv_tokens=100))
    made.add([Job(0, 0.0, 60.0, 30, False), Job(1, 0.0, 20.0, 60, False)], 0.0)
    assert made.num_running == 2
    assert set(run(made)) == {0, 1}
    assert made.counters.preemptions >= 1

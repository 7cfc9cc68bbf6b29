"""A fleet generates what a single engine does, token for token, wherever its responses run."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import Generate, make_requests, make_score
from vllm import SamplingParams

from paceline.config import Variant
from paceline.control.events import Event, RunChunk
from paceline.engine.loop_replay import replay_engine
from paceline.errors import EngineError, RequestError, UnsupportedError
from paceline.fleet.controller_replay import replay_controller
from paceline.fleet.fleet import Fleet
from paceline.fleet.journal import Journal
from paceline.record.decisions import DecisionReader, find_decisions

PARAMS = SamplingParams(temperature=1.0)


@pytest.fixture
def chunks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[RunChunk]:
    """The chunks that are given out during the test."""
    seen: list[RunChunk] = []
    decide = fleet._controller.decide

    def watch(event: Event) -> list[Any]:
        actions = decide(event)
        seen.extend(action for action in actions if isinstance(action, RunChunk))
        return actions

    monkeypatch.setattr(fleet._controller, "decide", watch)
    return seen


def count_kv_loads(fleet: Fleet) -> int:
    return fleet.kv_pool_counters().hits


def test_tokens_are_those_of_a_single_plain_engine(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]], chunks: list[RunChunk]
) -> None:
    requests = make_requests(prompts, 8, 400)
    while fleet.board.workers["w1"].state != "up" or fleet.board.workers["w0"].state != "up":
        fleet.advance()
    before = count_kv_loads(fleet)
    found = {finished.index: finished for finished in fleet.stream(requests, PARAMS)}
    wanted = plain(requests, PARAMS)
    assert [found[i].response.tokens for i in range(len(requests))] == [r.tokens for r in wanted]
    assert [found[i].response.finish_reason for i in range(len(requests))] == [
        r.finish_reason for r in wanted
    ]
    for index, response in enumerate(wanted):
        mine = found[index].response
        assert mine.logprobs == pytest.approx(response.logprobs, abs=1e-4)
        assert (mine.key, mine.group) == (response.key, response.group)
        reward = found[index].reward
        assert reward is not None
        assert reward.value == make_score()(index, mine)
    homes: dict[int, set[str]] = {}
    for chunk in chunks:
        assert chunk.request.key is not None
        homes.setdefault(chunk.request.key, set()).add(chunk.worker)
    assert sum(len(workers) > 1 for workers in homes.values()) >= 8, "responses must move"
    assert max(Counter(chunk.request.key for chunk in chunks).values()) == -(-400 // 64)
    assert sum(finished.response.num_accepted_tokens for finished in found.values()) > 0
    assert fleet.board.num_preemptions == 0
    resumed = sum(bool(chunk.request.generated) for chunk in chunks)
    assert 0.9 * resumed <= count_kv_loads(fleet) - before <= resumed, "nothing is prefilled twice"


def test_no_order_of_dispatch_changes_a_token(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]]
) -> None:
    requests = make_requests(prompts, 4, 150)
    wanted = [response.tokens for response in plain(requests, PARAMS)]
    variants: tuple[Variant, ...] = ("context", "even", "no-context", "oracle", "sticky", "group")
    try:
        for variant in variants:
            fleet.use_variant(variant)
            fleet.submit(requests, PARAMS, true_lengths=[len(tokens) for tokens in wanted])
            found: dict[int, tuple[int, ...]] = {}
            while fleet.num_unfinished:
                found |= {one.index: one.response.tokens for one in fleet.advance()}
            assert [found[i] for i in range(len(requests))] == wanted, variant
    finally:
        fleet.use_variant(fleet.settings.variant)
    assert fleet.board.num_preemptions == 0


def test_requests_that_cannot_run_are_refused_before_any_work(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    good = make_requests(prompts[:1], 1, 5)[0]
    for bad, message in (
        (replace(good, prompt=()), "prompt is empty"),
        (replace(good, prompt=(1, 999)), "not one of the model's 28"),
        (replace(good, prompt=(1,) * 1400), "leave no room"),
    ):
        with pytest.raises(RequestError, match=f"request 1: .*{message}"):
            fleet.submit([good, bad], PARAMS)
    with pytest.raises(UnsupportedError, match="stop text may lie across"):
        fleet.submit([good], SamplingParams(stop=["x"]))
    [refused] = fleet.generate([good], SamplingParams(allowed_token_ids=[999]))
    assert (refused.tokens, refused.finish_reason) == ((), "error")
    assert re.search(r"cannot run on worker .*allowed_token_ids", refused.failure or "")
    with pytest.raises(RequestError, match="max_tokens=1 is already reached"):
        fleet.submit([replace(good, max_tokens=1, generated=(5,))], PARAMS)
    assert fleet.num_unfinished == 0
    assert len(fleet.generate([good], PARAMS)) == 1
    assert fleet.generate([], PARAMS) == []


def test_leaving_a_stream_abandons_the_rest(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]]
) -> None:
    requests = make_requests(prompts[:4], 4, 300)
    stream = fleet.stream(requests, PARAMS)
    next(stream)
    with pytest.raises(EngineError, match="responses are running"):
        fleet.push_weights([])
    stream.close()
    assert fleet.num_unfinished == 0
    short = make_requests(prompts[:2], 2, 20)
    assert [r.tokens for r in fleet.generate(short, PARAMS)] == [r.tokens for r in plain(short, PARAMS)]


def test_a_restarted_driver_goes_on_from_the_journal(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]], chunks: list[RunChunk], tmp_path: Path
) -> None:
    requests = make_requests(prompts[:3], 4, 500)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    journal = Journal.open(tmp_path / "o.progress", "job", resume=False)
    fleet.submit(requests, params, journal=journal)
    begun: dict[int, int] = {}  # what each response had when its latest chunk began
    while sum(status.num_running for status in fleet.board.workers.values()) < 12 or len(chunks) < 30:
        fleet.advance()
    while len(begun) < len(requests) or min(begun.values()) <= 64:
        fleet.advance()
        begun |= {chunk.index: len(chunk.request.generated) for chunk in chunks}
    fleet.abandon()
    journal.close()
    chunks.clear()
    read = Journal.open(journal.path, "job", resume=True)
    kept = read.find(list(map(fleet._resolve, range(len(requests)), requests)))
    read.close()
    assert min(len(one.packed) for one in kept.values()) > 64
    again = Journal.open(journal.path, "job", resume=True)
    fleet.submit(requests, params, journal=again)
    found = {}
    while fleet.num_unfinished:
        found |= {finished.index: finished.response for finished in fleet.advance()}
    assert all(len(chunk.request.generated) >= 64 for chunk in chunks)
    wanted = plain(requests, params)
    assert [found[i].tokens for i in range(len(requests))] == [r.tokens for r in wanted]
    for index, response in enumerate(wanted):
        assert found[index].logprobs == pytest.approx(response.logprobs, abs=1e-4)
    again.discard()


def test_workers_come_behind_nobody(fleet: Fleet) -> None:
    """Ray gives its workers a niceness of 15."""
    wanted = os.getpriority(os.PRIO_PROCESS, 0)
    assert fleet._rewards is not None
    engines = [fleet._actors.process(name) for name in fleet.board.workers]
    for process in (*engines, *fleet._rewards.processes):
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process) == wanted


def test_every_worker_reports_what_it_does(fleet: Fleet, prompts: list[tuple[int, ...]]) -> None:
    fleet.board.take_steps()
    before = {name: status.num_tokens for name, status in fleet.board.workers.items()}
    responses = fleet.generate(make_requests(prompts, 4, 100), PARAMS)
    steps = fleet.board.take_steps()
    told = sum(status.num_tokens - before[name] for name, status in fleet.board.workers.items())
    assert told == sum(len(response.tokens) for response in responses)
    assert sum(step.num_tokens for _, step in steps) == told
    assert all(status.num_kv_blocks > 0 for status in fleet.board.workers.values())


def test_what_the_fleet_decided_is_planned_again(fleet: Fleet, prompts: list[tuple[int, ...]]) -> None:
    """The controller's events since the fleet began, killed workers among them, and every engine's steps."""
    fleet.generate(make_requests(prompts[:2], 4, 100), PARAMS)
    folder = fleet.engine_settings.decision_log
    assert folder is not None
    planned: Counter[str] = Counter()
    for path in find_decisions(Path(folder)):
        with DecisionReader(path) as reader:
            plan = replay_engine if reader.header.kind == "engine" else replay_controller
            [tally] = plan(reader)
        assert (tally.first, tally.num_left) == (None, 0)
        planned[path.name] += tally.num_planned
    assert {"controller-1.decisions", "engine-1.decisions", "engine-2.decisions"} <= set(planned)
    assert planned.pop("controller-1.decisions") > 20
    assert planned.total() > 20

"""An engine with a draft worker: the tokens are those of plain decoding, whatever becomes of the worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_tokens import plain_tokens
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting import worker_link
from paceline.engine.rollout_engine import RolloutEngine
from paceline.record.decisions import DecisionReader, WaitLine, find_decisions
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i // 2), 60 + 9 * i, sample=i % 2) for i in range(6)]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_bytes": 1 << 27,
}


@pytest.fixture(scope="module")
def engine(
    model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(drafter_dir),
        draft_worker=True,
        draft_window=4,
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        decision_log=str(tmp_path_factory.mktemp("decisions")),
    )
    with RolloutEngine(model_dir, settings, **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine: RolloutEngine) -> list[tuple[int, ...]]:
    """Tokens of plain decoding."""
    return plain_tokens(engine, REQUESTS, PARAMS)


def generate(engine: RolloutEngine, between: Callable[[int], None] = lambda _: None) -> list[Any]:
    """Tokens of all requests; `between` is called with the number of each step."""
    responses: dict[int, tuple[int, ...]] = {}
    for step, event in enumerate(engine.stream(REQUESTS, PARAMS)):
        between(step)
        if event.response is not None:
            responses[event.index] = event.response.tokens
    return [responses[index] for index in range(len(REQUESTS))]


def link_of(engine: RolloutEngine) -> worker_link.WorkerLink:
    link: worker_link.WorkerLink = engine.scheduler.loop.ahead.links[0]
    return link


def generate_until_it_drafts(engine: RolloutEngine, wanted: list[Any], timeout_s: float = 120.0) -> int:
    """Generate until the worker's tokens are accepted; returns how many were in the last turn."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        engine.take_observations()
        assert generate(engine) == wanted
        if accepted := sum(step.num_model_tokens for step in engine.take_observations()):
            return accepted
    raise AssertionError("the draft worker did not come back")


def test_a_worker_drafts_and_the_tokens_are_the_same(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until_it_drafts(engine, wanted)  # it may still be loading its model
    engine.reset_prefix_cache()
    accepted = generate_until_it_drafts(engine, wanted)
    assert accepted > 0.1 * sum(map(len, wanted))
    link = link_of(engine)
    assert link.counts.num_drafted > accepted
    assert link.counts.num_wasted > 0


def test_likely_corrections_are_prepared_and_come(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until_it_drafts(engine, wanted)
    requests, tokens = REQUESTS[:1], wanted[:1]  # the fewer run, the more time there is for corrections
    engine.take_observations()
    hits = 0
    for _ in range(20):
        engine.reset_prefix_cache()
        assert [response.tokens for response in engine.generate(requests, PARAMS)] == tokens
        steps = engine.take_observations()
        hits += sum(step.num_branch_hits for step in steps)
        if hits >= 10:
            break
    assert hits >= 10
    assert sum(step.num_branches for step in steps) > 0
    assert link_of(engine).counts.num_hits <= link_of(engine).counts.num_branches
    assert link_of(engine).counts.num_branch_tokens > 0


def test_it_waits_for_drafts_under_way_and_says_so(engine: RolloutEngine, wanted: list[Any]) -> None:
    engine.take_observations()
    for _ in range(20):
        assert generate(engine) == wanted
        steps = engine.take_observations()
        if any(step.wait_s > 0.0 for step in steps) and any(step.num_wasted_tokens for step in steps):
            break
    assert sum(step.num_wasted_tokens for step in steps) > 0
    assert any(step.wait_s > 0.0 for step in steps)
    assert all(0.0 <= step.wait_s < step.step_s for step in steps)
    assert sum(sum(step.ahead_tokens) for step in steps) > sum(step.num_model_tokens for step in steps)
    assert sum(sum(step.ahead_s) for step in steps) > 0.0
    [log] = find_decisions(Path(engine.settings.decision_log))
    with DecisionReader(log) as reader:
        waits = [line for line in reader if isinstance(line, WaitLine)]
    assert any(line.wait_s > 0.0 for line in waits)


def test_a_killed_worker_comes_back(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until_it_drafts(engine, wanted)
    link = link_of(engine)
    first = link.child.pid

    def kill(step: int) -> None:
        if step == 40:
            os.kill(first, signal.SIGKILL)

    assert generate(engine, kill) == wanted
    generate_until_it_drafts(engine, wanted)
    assert link.child.pid != first
    assert link.child.num_starts == 2


def test_a_stopped_worker_holds_nothing_up_and_goes_on(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until_it_drafts(engine, wanted)
    pid = link_of(engine).child.pid

    def stop(step: int) -> None:
        if step in (40, 160):
            os.kill(pid, signal.SIGSTOP if step == 40 else signal.SIGCONT)

    engine.take_observations()
    assert generate(engine, stop) == wanted
    generate_until_it_drafts(engine, wanted)
    assert link_of(engine).child.pid == pid


def test_a_hung_worker_is_replaced(
    engine: RolloutEngine, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_until_it_drafts(engine, wanted)
    link = link_of(engine)
    hung = link.child.pid
    monkeypatch.setattr(worker_link, "SILENCE_S", 0.5)
    os.kill(hung, signal.SIGSTOP)
    deadline_s = time.monotonic() + 60.0
    while link.child.pid == hung and time.monotonic() < deadline_s:
        assert generate(engine) == wanted
    assert link.child.pid != hung
    monkeypatch.undo()
    generate_until_it_drafts(engine, wanted)


def test_nothing_is_kept_of_responses_that_have_ended(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until_it_drafts(engine, wanted)
    assert engine.scheduler.loop._trees.num_responses == 0
    link = link_of(engine)
    assert not link._running
    assert not link._waiting


def test_nothing_is_left_of_it(model_dir: Path, drafter_dir: Path) -> None:
    settings = EngineSettings(model_drafter=str(drafter_dir), draft_worker=True)
    with RolloutEngine(model_dir, settings, **SIZES) as made:
        link = link_of(made)
        pid, folder = link.child.pid, link._folder.path
        assert folder.exists()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

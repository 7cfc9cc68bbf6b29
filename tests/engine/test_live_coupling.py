"""An engine that chooses where its model drafts: inside, with all threads, or ahead, with one less."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_tokens import plain_tokens
from pydantic import ValidationError
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.live_coupling import LiveCoupling
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import UnsupportedError
from paceline.planning import coupling
from paceline.record.decisions import CouplingLine, DecisionReader, find_decisions
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i // 2), 90 + 9 * i, sample=i % 2) for i in range(6)]
THREADS = 2


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest,
    model_dir: Path,
    drafter_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RolloutEngine]:
    """With trials that are short and come often, on two threads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "SETTLING_STEPS": 2,
            "TRIAL_STEPS": 5,
            "EARLY_STEPS": 9,
            "LEAST_STEPS": 6,
            "FIRST_STEPS": 4,
        }.items():
            patch.setattr(coupling, name, value)
        patch.setattr(coupling, "TRIAL_COST", 10.0)
        settings = EngineSettings(
            model_drafter=str(drafter_dir),
            draft_worker="auto",
            draft_window=4,
            decision_log=str(tmp_path_factory.mktemp("decisions")),
        )
        sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_bytes": 1 << 27}
        with RolloutEngine(model_dir, settings, dtype=request.param, **sizes) as made:
            before = torch.get_num_threads()
            torch._C.set_num_threads(THREADS)
            yield made
            coupling_of(made).state = replace(coupling_of(made).state, is_ahead=True)
            events = made.stream(REQUESTS, PARAMS)
            was_shared = any(torch.get_num_threads() == THREADS - 1 for _ in events)  # the rest still runs
        num_threads = torch.get_num_threads()
        torch._C.set_num_threads(before)
        assert was_shared
        assert num_threads == THREADS, "a closed engine keeps no core"


@pytest.fixture(scope="module")
def wanted(engine: RolloutEngine) -> list[tuple[int, ...]]:
    """Tokens of plain decoding."""
    return plain_tokens(engine, REQUESTS, PARAMS)


def coupling_of(engine: RolloutEngine) -> LiveCoupling:
    made: LiveCoupling = engine.scheduler.loop.coupling
    return made


def generate(engine: RolloutEngine) -> tuple[list[Any], set[tuple[bool, int]]]:
    """Tokens of all requests, and (ahead?, threads) of the steps."""
    responses: dict[int, tuple[int, ...]] = {}
    modes = set()
    for event in engine.stream(REQUESTS, PARAMS):
        modes.add((engine.scheduler.loop.coupling.state.is_ahead, torch.get_num_threads()))
        if event.response is not None:
            responses[event.index] = event.response.tokens
    return [responses[index] for index in range(len(REQUESTS))], modes


def generate_until(engine: RolloutEngine, wanted: list[Any], num_changes: int) -> set[tuple[bool, int]]:
    """Generate until the mode has changed so often; the (ahead?, threads) that were seen."""
    seen, until_s = set(), time.monotonic() + 120.0
    goal = coupling_of(engine).num_changes + num_changes
    while coupling_of(engine).num_changes < goal:
        assert time.monotonic() < until_s
        engine.reset_prefix_cache()
        tokens, modes = generate(engine)
        assert tokens == wanted
        seen |= modes
    return seen


def test_tokens_stay_the_same_through_changes_of_mode_and_threads(
    engine: RolloutEngine, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, inside = engine.scheduler.loop, []
    receive = loop.receive
    monkeypatch.setattr(loop, "receive", lambda drafts: inside.append(receive(drafts)))
    engine.take_observations()
    seen = generate_until(engine, wanted, 12)
    # an event may be read behind a decision that the next step carries out
    assert {(False, THREADS), (True, THREADS - 1)} <= seen
    steps = engine.take_observations()
    assert inside
    assert sum(step.num_model_tokens for step in steps if any(step.ahead_tokens)) > 0


def test_between_rollouts_all_threads_are_the_callers(engine: RolloutEngine, wanted: list[Any]) -> None:
    """A trainer in this process computes with them."""
    until_s, ends_ahead = time.monotonic() + 120.0, False
    while not ends_ahead:
        assert time.monotonic() < until_s
        engine.reset_prefix_cache()
        tokens, modes = generate(engine)
        assert tokens == wanted
        assert torch.get_num_threads() == THREADS
        ends_ahead = (True, THREADS - 1) in modes and coupling_of(engine).state.is_ahead


def test_a_window_of_nothing_does_not_outlive_a_rest(engine: RolloutEngine, wanted: list[Any]) -> None:
    """What was planned in the first steps ahead would else stand for all trials to come."""
    generate_until(engine, wanted, 1)
    ahead = engine.scheduler.loop.ahead
    [link], [worker] = ahead.links, ahead._workers
    worker.windows._planned_batch = 4
    link.begin_with(0)
    ahead.rest()
    ahead.wake()
    try:
        assert link.first_ahead == engine.settings.most_ahead
    finally:
        if not coupling_of(engine).state.is_ahead:
            ahead.rest()


def test_a_killed_worker_gives_its_core_back(engine: RolloutEngine, wanted: list[Any]) -> None:
    generate_until(engine, wanted, 1)
    while not coupling_of(engine).state.is_ahead:
        generate_until(engine, wanted, 1)
    os.kill(engine.scheduler.loop.ahead.links[0].child.pid, signal.SIGKILL)
    generate_until(engine, wanted, 1)
    generate_until(engine, wanted, 2)  # another has come


def test_plain_decoding_has_all_threads(engine: RolloutEngine, wanted: list[Any]) -> None:
    while not coupling_of(engine).state.is_ahead:
        generate_until(engine, wanted, 1)
    try:
        engine.set_drafting(False)
        assert torch.get_num_threads() == THREADS
        tokens, modes = generate(engine)
        assert tokens == wanted
        assert modes == {(False, THREADS)}
    finally:
        engine.set_drafting(True)
    generate_until(engine, wanted, 2)


def test_under_another_budget_it_drafts_inside(engine: RolloutEngine, wanted: list[Any]) -> None:
    loop = engine.scheduler.loop
    settings, state = loop._settings.budget, loop.policy_state
    loop.use_budget(BudgetSettings(policy="fixed", fixed_tokens=4))
    try:
        for _ in range(3):
            tokens, modes = generate(engine)
            assert tokens == wanted
            assert modes == {(False, THREADS)}
    finally:
        loop.use_budget(settings, state)


def test_the_log_is_planned_again(engine: RolloutEngine) -> None:
    """The log ended with the change of policy."""
    [log] = find_decisions(Path(engine.settings.decision_log))
    with DecisionReader(log) as reader:
        lines = [line for line in reader if isinstance(line, CouplingLine)]
    assert {line.is_ahead for line in lines} == {True, False}
    assert {line.has_worker for line in lines} == {True, False}
    with DecisionReader(log) as reader:
        tallies = {tally.kind: tally for tally in replay_engine(reader)}
    assert tallies["coupled or ahead"].num_planned == len(lines)
    for tally in tallies.values():
        assert tally.num_planned
        assert not tally.num_different, tally


def test_its_drafter_cannot_be_changed(engine: RolloutEngine) -> None:
    with pytest.raises(UnsupportedError, match="draft_worker"):
        engine.use_drafter(0)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"further_drafters": ["b"]}, "remove further_drafters"),
        ({"draft_by_turns": True}, "set draft_worker to true"),
        ({"draft_help": True}, "no draft_worker"),
        ({"model_drafter": None}, "needs a model_drafter"),
    ],
)
def test_what_it_does_not_go_with_is_refused(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        EngineSettings.model_validate({"model_drafter": "a", "draft_worker": "auto", **fields})

"""One engine and two draft workers with different drafters: the tokens of plain decoding, whichever of them is lost."""

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
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.record.decisions import DecisionReader, WaitLine, WindowsLine, find_decisions
from paceline.types import RolloutRequest, StepObservation

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i), 60 + 9 * i) for i in range(4)]
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def engine(
    drafter_dir: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    """The further drafter is the target itself: it has what the model drafter has wrong."""
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(drafter_dir),
        draft_worker=True,
        further_drafters=(str(model_dir),),
        draft_window=4,
        reconfigure_steps=64,
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        decision_log=str(tmp_path_factory.mktemp("decisions")),
    )
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    with RolloutEngine(model_dir, settings, kv_cache_bytes=1 << 27, **sizes) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine: RolloutEngine) -> list[Tokens]:
    """Tokens of plain decoding."""
    return plain_tokens(engine, REQUESTS, PARAMS)


def generate(engine: RolloutEngine, between: Callable[[int], None] = lambda _: None) -> list[Tokens]:
    """Tokens of all requests; `between` is called with the number of each step."""
    responses: dict[int, Tokens] = {}
    for step, event in enumerate(engine.stream(REQUESTS, PARAMS)):
        between(step)
        if event.response is not None:
            responses[event.index] = event.response.tokens
    return [responses[index] for index in range(len(REQUESTS))]


def generate_until_both_draft(engine: RolloutEngine, wanted: list[Tokens]) -> list[StepObservation]:
    """Generate until tokens of both workers are accepted in one turn; returns its steps."""
    deadline_s = time.monotonic() + 500.0
    while time.monotonic() < deadline_s:
        engine.take_observations()
        assert generate(engine) == wanted
        steps = engine.take_observations()
        further = sum(step.further_tokens[0] for step in steps if step.further_tokens)
        if further >= 5 and sum(step.num_model_tokens for step in steps) - further >= 5:
            return steps
    raise AssertionError("one of the draft workers does not draft")


def test_drafts_of_both_are_accepted_and_counted(engine: RolloutEngine, wanted: list[Tokens]) -> None:
    steps, deadline_s = generate_until_both_draft(engine, wanted), time.monotonic() + 300.0
    links = engine.scheduler.loop.ahead.links
    assert all(link.counts.num_drafted > 0 for link in links)
    while not (wasted := sum(step.num_wasted_tokens for step in steps)) and time.monotonic() < deadline_s:
        steps += generate_until_both_draft(engine, wanted)  # by luck no draft of a turn is in vain
    assert 0 <= sum(sum(step.further_wasted_tokens) for step in steps) <= wasted
    assert wasted > 0


def test_the_other_goes_on_where_one_is_killed(engine: RolloutEngine, wanted: list[Tokens]) -> None:
    generate_until_both_draft(engine, wanted)
    links = engine.scheduler.loop.ahead.links
    before = [link.child.pid for link in links]

    def kill(step: int) -> None:
        if step == 40:
            os.kill(before[0], signal.SIGKILL)

    assert generate(engine, kill) == wanted
    generate_until_both_draft(engine, wanted)
    after = [link.child.pid for link in links]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False]


def test_the_log_tells_whose_drafts_are_waited_for_and_replays(
    engine: RolloutEngine, wanted: list[Tokens]
) -> None:
    assert generate(engine) == wanted
    [log] = find_decisions(Path(engine.settings.decision_log))
    with DecisionReader(log) as reader:
        lines = list(reader)
    assert {line.drafter for line in lines if isinstance(line, WaitLine)} == {0, 1}
    assert {line.drafter for line in lines if isinstance(line, WindowsLine)} == {0, 1}
    with DecisionReader(log) as reader:
        tallies = {tally.kind: tally for tally in replay_engine(reader)}
    assert tallies["draft windows"].num_planned > 0
    assert all(tally.num_different == 0 for tally in tallies.values())

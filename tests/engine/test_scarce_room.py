"""Drafts where a step has few tokens and the cache few blocks: plain decoding's tokens, and no response starves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import ScriptedDrafter
from tiny_model import VOCAB, scarce_engine

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import Response, RolloutRequest

STEP_TOKENS = 24
SEATS = 8


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RolloutEngine]:
    """24 tokens a step, and KV blocks for a few of the responses at their full length."""
    settings = EngineSettings(budget=BudgetSettings(policy="fixed", fixed_tokens=8), max_draft_tokens=8)
    with RolloutEngine(
        model_dir, settings, **scarce_engine(12, seats=SEATS, step_tokens=STEP_TOKENS)
    ) as made:
        yield made


def requests(prompt_tokens: int, max_tokens: int) -> list[RolloutRequest]:
    rng = np.random.default_rng(8)
    return [
        RolloutRequest((1, *rng.integers(3, VOCAB, prompt_tokens + 7 * i).tolist()), max_tokens, key=50 + i)
        for i in range(2 * SEATS)
    ]


def params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, ignore_eos=True)


def run(engine: RolloutEngine, wanted: list[RolloutRequest], drafter: Any) -> list[Response]:
    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    try:
        engine.reset_prefix_cache()
        engine.take_observations()
        return engine.generate(wanted, params())
    finally:
        engine.scheduler.loop.free.drafter = own


def check(plain: list[Response], drafted: list[Response]) -> None:
    assert [r.tokens for r in plain] == [r.tokens for r in drafted]
    for one, other in zip(plain, drafted, strict=True):
        assert np.array_equal(np.float32(one.logprobs), np.float32(other.logprobs))
    assert sum(r.num_accepted_tokens for r in drafted) > 50


def test_small_steps_with_chunked_prefill(engine: RolloutEngine) -> None:
    wanted = requests(60, 40)
    plain = run(engine, wanted, None)
    known = {r.key: (*r.request.prompt, *r.tokens) for r in plain}
    running: list[tuple[int, int]] = []
    schedule, scheduler = engine.scheduler.schedule, engine.scheduler

    def watch(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        held = [r for r in scheduler.running if r.num_tokens > r.num_prompt_tokens]
        running.append((len(held), sum(r.request_id in output.num_scheduled_tokens for r in held)))
        return output

    scheduler.schedule = watch
    try:
        drafted = run(engine, wanted, ScriptedDrafter(known, 0.8, VOCAB))
    finally:
        del scheduler.schedule
    check(plain, drafted)
    steps = engine.take_observations()
    assert max(step.num_tokens for step in steps) <= STEP_TOKENS
    assert all(held == served for held, served in running), "a running response got no token in a step"
    assert any(step.num_prefill_tokens and step.num_draft_tokens for step in steps)


def test_preemption_under_drafts(engine: RolloutEngine) -> None:
    wanted = requests(100, 200)
    before = engine.scheduler.num_preemptions
    plain = run(engine, wanted, None)
    known = {r.key: (*r.request.prompt, *r.tokens) for r in plain}
    middle = engine.scheduler.num_preemptions
    drafted = run(engine, wanted, ScriptedDrafter(known, 0.8, VOCAB))
    check(plain, drafted)
    assert before < middle < engine.scheduler.num_preemptions
    scheduler = engine.scheduler
    assert not scheduler.live
    assert not scheduler.finished
    assert not scheduler.loop.free._numbers
    assert not scheduler.loop.free._running

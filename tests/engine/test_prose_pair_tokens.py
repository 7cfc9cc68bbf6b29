"""The second pair in the engine: drafts of the small model change no token of the policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pairs import PAIRS  # isort: skip

from paceline.config import BudgetSettings, EngineSettings
from paceline.dice import derive_key
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import Response, RolloutRequest

PAIR = PAIRS["prose"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_with_and_without_drafts(dtype: str) -> None:
    from vllm import SamplingParams

    requests = [
        RolloutRequest(prompt, max_tokens=96, key=derive_key(3, prompt, sample), sample=sample)
        for prompt in PAIR.draw_prompts(PAIR.policy, 2, 3)
        for sample in range(3)
    ]

    def generate(drafts: bool) -> list[Response]:
        engine.set_drafting(drafts)
        engine.reset_prefix_cache()
        return engine.generate(requests, SamplingParams(temperature=1.0))

    budget = BudgetSettings(policy="fixed", fixed_tokens=5)
    settings = EngineSettings(model_drafter=str(PAIR.drafter), budget=budget)
    with RolloutEngine(
        PAIR.policy, settings, dtype=dtype, max_model_len=512, kv_cache_bytes=1 << 28
    ) as engine:
        plain, drafted = generate(False), generate(True)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]
    assert sum(r.num_accepted_tokens for r in drafted) > sum(len(r.tokens) for r in drafted) / 3
    assert not any(r.num_draft_tokens for r in plain)

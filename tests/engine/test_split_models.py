"""Models that are split, over two processes (tensor parallelism) or into experts: drafts change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafters import ScriptedDrafter
from safetensors.torch import load_file
from tiny_model import VOCAB, make_mixture
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError, EngineError
from paceline.types import Response, RolloutRequest

pytestmark = pytest.mark.slow

SETTINGS = EngineSettings(
    max_draft_tokens=6, draft_floor=0.0, budget=BudgetSettings(policy="fixed", fixed_tokens=6)
)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i // 2), 40, key=i + 1, sample=i % 2) for i in range(6)]
TWO_PROCESSES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def generate(engine: RolloutEngine, requests: list[RolloutRequest] = REQUESTS) -> list[Response]:
    engine.reset_prefix_cache()
    return engine.generate(requests, SamplingParams(temperature=1.0, ignore_eos=True))


@pytest.mark.parametrize("kind", ["two processes", "experts"])
def test_tokens_and_log_probabilities_are_those_without_drafts(
    kind: str, model_dir: Path, tmp_path: Path
) -> None:
    model, split = (model_dir, TWO_PROCESSES) if kind == "two processes" else (make_mixture(tmp_path), {})
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 1 << 26}
    with RolloutEngine(model, SETTINGS, **sizes, skip_tokenizer_init=True, **split) as engine:
        engine.set_drafting(False)
        plain = generate(engine)
        engine.set_drafting(True)
        drafted = generate(engine)
        known = {response.key: (*response.request.prompt, *response.tokens) for response in plain}
        engine.scheduler.loop.free.drafter = ScriptedDrafter(known, 0.8, VOCAB, 6)
        scripted = generate(engine, REQUESTS[:3])
        gap = engine.invariance_gap
        if kind == "two processes":
            own = load_file(model / "model.safetensors")
            engine.push_weights((name, weight * 0.5) for name, weight in own.items())
            assert generate(engine, REQUESTS[:3])[0].tokens != plain[0].tokens
            engine.push_weights(iter(own.items()))
            assert [r.tokens for r in generate(engine, REQUESTS[:3])] == [r.tokens for r in plain[:3]]
    for responses in (drafted, scripted):
        assert [r.tokens for r in responses] == [r.tokens for r in plain[: len(responses)]]
        assert [r.logprobs for r in responses] == [r.logprobs for r in plain[: len(responses)]]
        assert sum(r.num_draft_tokens for r in responses) > 100
    assert sum(r.num_accepted_tokens for r in scripted) > 30
    assert (gap is None) == (kind == "two processes")
    assert gap is None or "RoutedExperts" in gap


@pytest.mark.parametrize("expert_size", [64, 48])
def test_new_weights_reach_the_experts(expert_size: int, tmp_path: Path) -> None:
    """vLLM packs them for its kernels when it loads them, and forgets it when they are renewed. Sizes that do not fit
    the kernel are padded.
    """
    from transformers import AutoModelForCausalLM

    folder = make_mixture(tmp_path, expert_size=expert_size)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 1 << 26}
    with RolloutEngine(folder, SETTINGS, **sizes, skip_tokenizer_init=True) as engine:
        before = generate(engine)
        own = load_file(folder / "model.safetensors")
        engine.push_weights(iter(own.items()))
        assert [r.tokens for r in generate(engine)] == [r.tokens for r in before]
        engine.push_weights((name, weight * 0.5) for name, weight in own.items())
        assert [r.tokens for r in generate(engine)] != [r.tokens for r in before]
        engine.push_weights(
            policy.named_parameters()
        )  # transformers has the experts of a layer in one tensor
        after = generate(engine)
        with pytest.raises(EngineError, match=r"experts\.0\."):
            engine.push_weights((name, weight) for name, weight in own.items() if "experts.1." in name)
    assert [r.tokens for r in after] == [r.tokens for r in before]
    assert [r.logprobs for r in after] == [r.logprobs for r in before]


def test_drafter_weights_that_do_not_fit_are_refused_by_two_processes(model_dir: Path) -> None:
    """In the same words as by one, and the engine goes on."""
    settings = SETTINGS.model_copy(update={"model_drafter": str(model_dir)})
    with RolloutEngine(
        model_dir, settings, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 26, **TWO_PROCESSES
    ) as engine:
        before = generate(engine, REQUESTS[:3])
        with pytest.raises(CheckpointError, match=r"weights were not sent, first .* send the complete set"):
            engine.push_drafter({})
        assert engine.push_drafter(load_file(model_dir / "model.safetensors")) == 1
        assert [r.tokens for r in generate(engine, REQUESTS[:3])] == [r.tokens for r in before]
        assert engine.drafter_score().acceptance is not None

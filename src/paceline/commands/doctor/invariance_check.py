"""Is this machine batch-invariant? A tiny random model is generated from in several ways and every bit compared.

Each number format is checked in a process of its own. Ways: all responses together, together with drafts, one at a
time, and cut in the middle and resumed; prompts are short and longer than where the attention kernel changes its tile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.doctor.child import in_child
from paceline.engine.installed import is_cpu_build
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.engine.rollout_engine import RolloutEngine

VOCAB_SIZE = 512
HIDDEN_SIZE = 256
MAX_LEN = 1536
PROMPT_LENGTHS = (5, 64, 130, 1000)
SAMPLES = 2
MAX_TOKENS = 32
CACHE_BYTES = 1 << 28
INVARIANT = "VLLM_BATCH_INVARIANT"
ATTENTION = {"attention_backend": "TRITON_ATTN"}
"""What goes with it: FlashAttention 3 gives tokens that are read again other bits (docs/gpu.md)."""


def small_engine() -> dict[str, Any]:
    """Arguments of an engine that needs little memory; on a GPU others may have the rest. To be asked where it starts,
    with the environment that it has.
    """
    if is_cpu_build():
        return {"kv_cache_bytes": CACHE_BYTES}
    attention = ATTENTION if os.environ.get(INVARIANT) == "1" else {}
    return {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.1, **attention}


@dataclass(frozen=True, slots=True)
class Way:
    """How one way of generating agrees with the first."""

    name: str
    compared: int
    """Tokens compared."""
    diverged: int
    """Tokens that differ."""
    different_logprobs: int
    """Log-probabilities of which a bit differs."""
    num_draft_tokens: int


def check_invariance(dtype: str, batch_invariant: bool | None = None, *, compiled: bool = False) -> list[Way]:
    """Generate in several ways in one number format.

    `batch_invariant` and `compiled` as in EngineSettings; batch_invariant=False shows what the machine does without
    Paceline's measures. Raises EngineError when the engine does not run here.
    """
    return in_child(_check, dtype, batch_invariant, compiled)


def _check(dtype: str, batch_invariant: bool | None, compiled: bool) -> list[Way]:
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        write_model(Path(folder))
        return _compare(Path(folder), dtype, batch_invariant, compiled)


def write_model(folder: Path) -> None:
    """A random Qwen2 model of two layers, its weights enlarged so that its distributions are not flat."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN_SIZE // 64,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LEN,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(3.0)
    model.save_pretrained(folder)


def _compare(model: Path, dtype: str, batch_invariant: bool | None, compiled: bool) -> list[Way]:
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine

    settings = EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        max_draft_tokens=8,
        draft_floor=0.0,
        batch_invariant=batch_invariant,
        compiled=compiled,
    )
    with RolloutEngine(
        model, settings, dtype=dtype, max_model_len=MAX_LEN, skip_tokenizer_init=True, **small_engine()
    ) as engine:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, ignore_eos=True)
        engine.set_drafting(False)
        requests = make_requests()
        plain = _generate(engine, requests, params)
        alone = [_generate(engine, [request], params)[0] for request in requests]
        half = [replace(response.request, generated=response.tokens[: MAX_TOKENS // 2]) for response in plain]
        resumed = _generate(engine, half, params)
        engine.set_drafting(True)
        drafted = _generate(engine, requests, params)
    return [
        compare("with drafts", plain, drafted),
        compare("one at a time", plain, alone),
        compare("cut and resumed", plain, resumed),
    ]


def make_requests() -> list[RolloutRequest]:
    """Prompts of several lengths, each with SAMPLES responses."""
    return [
        RolloutRequest(
            prompt=tuple((7 * length + 13 * place * place) % VOCAB_SIZE for place in range(length)),
            max_tokens=MAX_TOKENS,
            key=1000 * length + sample,
            sample=sample,
        )
        for length in PROMPT_LENGTHS
        for sample in range(SAMPLES)
    ]


def _generate(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], params: SamplingParams
) -> list[Response]:
    engine.reset_prefix_cache()
    return engine.generate(requests, params)


def compare(name: str, plain: Sequence[Response], other: Sequence[Response]) -> Way:
    """Count what differs; of a resumed response the newly generated part has log-probabilities."""
    compared = diverged = different = 0
    for one, two in zip(plain, other, strict=True):
        compared += len(one.tokens)
        diverged += sum(a != b for a, b in zip(one.tokens, two.tokens, strict=False))
        diverged += abs(len(one.tokens) - len(two.tokens))
        tail = one.logprobs[len(one.logprobs) - len(two.logprobs) :]
        different += sum(a != b for a, b in zip(tail, two.logprobs, strict=True))
    return Way(name, compared, diverged, different, sum(response.num_draft_tokens for response in other))

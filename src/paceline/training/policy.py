"""Model folders, loaded for training: tokenizer and policy. Failures are CheckpointErrors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def load_tokenizer(model: Path) -> Any:
    """The checkpoint's tokenizer. Raises CheckpointError if it has none or it cannot pad."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{model} has no usable tokenizer: {' '.join(str(error).split())[:200]}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


EAGER_TOKENS = 1024
"""Up to this context the plain attention is the faster one on a CPU; its memory grows with the square."""


def load_policy(model: str | Path, context_tokens: int, on_cpu: bool) -> Any:
    """The policy with float32 master weights, for contexts up to `context_tokens`. Raises CheckpointError."""
    import torch
    from transformers import AutoModelForCausalLM

    attention = "eager" if on_cpu and context_tokens <= EAGER_TOKENS else "sdpa"
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {model}: {' '.join(str(error).split())[:200]}") from error

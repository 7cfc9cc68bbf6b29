"""A target of a few thousand parameters, and responses with its hidden states."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.distillation.packing import ATTENTION_NAME, Sample
from paceline.distillation.target import choose_layers, read_samples

VOCAB = 29


def tiny_target(seed: int = 0, *, width: int = 8) -> Any:
    """A random Llama model of 4 layers that takes packs. width: of its 4 attention heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=4 * width,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=ATTENTION_NAME,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_samples(target: Any, lengths: list[int], num_prompt: int = 4, seed: int = 0) -> list[Sample]:
    """Responses of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    layers = choose_layers(target.config.num_hidden_layers)
    return list(read_samples(target, [(document, num_prompt) for document in ids], layers, 512))

"""A tiny random policy with the Countdown tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_policy(folder: Path) -> Path:
    """Write a random two-layer Llama over the Countdown alphabet."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline.tasks.alphabet import ALPHABET, BOS_ID, EOS_ID, PAD_ID, build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "embed" in name else 3.0)
    model.save_pretrained(folder)
    build_tokenizer(256).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy."""
    return make_policy(tmp_path_factory.mktemp("policy"))

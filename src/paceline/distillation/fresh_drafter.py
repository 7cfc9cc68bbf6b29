"""A fresh drafter of a target, a small language model or a draft head: what grows where nobody has given one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paceline.distillation.checkpoints import written_aside
from paceline.distillation.export import export
from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.networks import Shared
from paceline.distillation.target import choose_layers
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import describe
from paceline.errors import CheckpointError

HEAD_DIM = 64
SHARE = 0.5
"""Width over the target's, where none is given."""


def make_small_model(target: Path, out: Path, hidden_size: int | None, num_layers: int, seed: int) -> None:
    """Write a Llama model with random weights into a folder, with the target's tokenizer; all of it or nothing.

    hidden_size: a multiple of 64; None: `default_width`. torch's generator is left as it is found. Raises
    CheckpointError for another width.
    """
    wanted = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    size = hidden_size or default_width(target)
    if size % HEAD_DIM:
        raise CheckpointError(f"a drafter's hidden size is {size}: make it a multiple of {HEAD_DIM}")
    config = LlamaConfig(
        vocab_size=wanted.vocab_size,
        hidden_size=size,
        intermediate_size=size * 11 // 4 // 16 * 16,
        num_hidden_layers=num_layers,
        num_attention_heads=size // HEAD_DIM,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=wanted.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=wanted.bos_token_id,
        eos_token_id=wanted.eos_token_id,
        pad_token_id=wanted.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with written_aside(out) as aside:
        model.save_pretrained(aside)
        lend_tokenizer(target, aside)


def default_width(target: Path) -> int:
    """Hidden size of a fresh small model: half the target's."""
    config = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    return max(int(config.hidden_size * SHARE) // HEAD_DIM, 1) * HEAD_DIM


def read_size(folder: Path) -> tuple[int, int]:
    """Hidden size and layers of a small model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return config.hidden_size, config.num_hidden_layers


def make_head(target: Path, out: Path, method: MethodName, seed: int) -> None:
    """Write a head with random weights into a folder, all of it or nothing; it shares the target's embedding, head and
    tokenizer.

    method: any but osd. torch's generator is left as it is found. Raises CheckpointError for EAGLE-3 and a target of
    fewer layers than it fuses.
    """
    config = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    chosen, nothing = METHODS[method], torch.empty(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(chosen, Shared(nothing, nothing, config), None)
    fused = choose_layers(config.num_hidden_layers) if network.num_fused else ()
    made = describe(network, method, chosen.objective.loss, chosen.objective.temperature, fused)
    weights = {f"{NETWORK}{name}": weight.detach() for name, weight in network.named_parameters()}
    export(weights, made, out, "huggingface", str(target))


def lend_tokenizer(target: Path, out: Path) -> None:
    """Put the target's tokenizer beside a drafter."""
    AutoTokenizer.from_pretrained(target, local_files_only=True).save_pretrained(out)

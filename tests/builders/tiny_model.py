"""A tiny random model in a folder, for engines that load it as they load any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64


def scarce_engine(
    num_blocks: int, *, seats: int = 8, step_tokens: int = 128, layers: int = 2
) -> dict[str, Any]:
    """Options of an engine with `make_model`'s model in float32: so many KV blocks of 128 tokens, prompts in pieces."""
    block_bytes = 128 * layers * 2 * 64 * 4  # tokens x layers x (K, V) x head x bytes
    return {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": seats,
        "block_size": 128,
        "kv_cache_bytes": num_blocks * block_bytes,
        "max_num_batched_tokens": step_tokens,
        "enable_chunked_prefill": True,
    }


def make_model(folder: Path, *, layers: int = 2, hidden: int = 128, seed: int = 0, tie: bool = True) -> Path:
    """Write a random Qwen2 model, sharp enough that responses repeat themselves, with a character tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(4.0 if "embed" in name else 2.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token for each of `VOCAB` - 3 characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *(chr(33 + i) for i in range(VOCAB - 3))]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_mixture(folder: Path, *, expert_size: int = 64) -> Path:
    """Write a random mixture of 8 experts, of which each token has two; without a tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        moe_intermediate_size=expert_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(4.0 if "embed" in name else 2.0)
    model.save_pretrained(folder)
    return folder


def make_predicting_model(folder: Path) -> Path:
    """Write a random mixture of 4 experts that brings a prediction layer (MTP) of its own, in the form of GLM-4.5."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        num_nextn_predict_layers=1,
    )
    Glm4MoeForCausalLM(config).float().save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    layer = {name.replace("layers.1.", "layers.2."): w for name, w in weights.items() if "layers.1." in name}
    ones = torch.ones(config.hidden_size)
    layer |= {f"model.layers.2.{name}.weight": ones for name in ("enorm", "hnorm", "shared_head.norm")}
    layer["model.layers.2.eh_proj.weight"] = 0.1 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    layer["model.layers.2.shared_head.head.weight"] = weights["lm_head.weight"]
    layer["model.layers.2.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights | {name: w.clone() for name, w in layer.items()}, file, metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder

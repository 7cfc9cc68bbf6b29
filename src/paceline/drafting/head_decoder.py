"""An EAGLE head's forward pass over packed rows: one decoder layer from (token, state) pairs to next states.

The pair of position i is the target's state at token i and the embedding of token i + 1; the layer's output stands for
the state at token i + 1 (EAGLE, Li and others 2024). As published, there is no norm before the attention, and the
output goes to the target's head as it is. The same function as `distillation.networks.Eagle`, with a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.lean_decoder import rotate
from paceline.drafting.model_cache import PackedStep, RowCache
from paceline.errors import CheckpointError

LAYER = "layers.0."


class HeadDecoder:
    """The layer of one loaded head.

    hidden_size, vocab_size: the target's. Raises CheckpointError for a checkpoint that is no EAGLE head, or one of
    another target.
    """

    def __init__(
        self,
        path: Path,
        *,
        hidden_size: int,
        vocab_size: int,
        max_model_len: int,
        dtype: str,
    ) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        stored = _load(path)
        _check_target(path, config, hidden_size, vocab_size)
        _check_names(path, stored, _shapes(config))
        number_format = stored["fc.weight"].dtype if dtype == "auto" else getattr(torch, dtype)
        self.weights = {name: weight.to(number_format) for name, weight in stored.items()}
        """By the checkpoint's names."""
        self.dtype = number_format
        self._head_dim: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        self._activate = ACT2FN[config.hidden_act]
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(self.weights["fc.weight"], torch.arange(max_model_len)[None])
        half = self._head_dim // 2
        self._cos, self._sin = cos[0, :, None, :half], sin[0, :, None, :half]

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, step: PackedStep, cache: RowCache
    ) -> torch.Tensor:
        """The next states of the packed pairs of `step`; fills the cache. All [num_tokens, hidden]"""
        cache.step = step
        hidden = F.linear(torch.cat([embedded, states], 1).to(self.dtype), self.weights["fc.weight"])
        query, key, value = (
            self._linear(f"self_attn.{name}_proj", hidden).unflatten(1, (-1, self._head_dim))
            for name in "qkv"
        )
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0)
        mixed = cache.attend_packed(0, query, self._head_dim**-0.5)
        hidden = hidden + self._linear("self_attn.o_proj", mixed.flatten(1))
        norm = self.weights[LAYER + "post_attention_layernorm.weight"]
        normed = F.rms_norm(hidden, norm.shape, norm, self._eps)
        gate, up = self._linear("mlp.gate_proj", normed), self._linear("mlp.up_proj", normed)
        return hidden + self._linear("mlp.down_proj", self._activate(gate) * up)

    def _linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weights[f"{LAYER}{name}.weight"])


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the draft head cannot be loaded ({error}): export it again"
        ) from error
    return weights


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Of the weights of an EAGLE head, by name."""
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "self_attn.q_proj": (queries, size),
        "self_attn.k_proj": (keys, size),
        "self_attn.v_proj": (keys, size),
        "self_attn.o_proj": (size, queries),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {"fc.weight": (size, 2 * size)} | {f"{LAYER}{name}.weight": shape for name, shape in layer.items()}


def _check_target(path: Path, config: LlamaConfig, hidden_size: int, vocab_size: int) -> None:
    for name, own, theirs in (
        ("hidden size", config.hidden_size, hidden_size),
        ("vocabulary size", config.vocab_size, vocab_size),
    ):
        if own != theirs:
            raise CheckpointError(
                f"{path}: the draft head is for a target with {name} {own}, this one has {theirs}: "
                "train a head on this target (paceline drafter train)"
            )


def _check_names(
    path: Path, weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    remedy = "give an EAGLE head (paceline drafter train --method eagle or hass)"
    if unknown := sorted(weights.keys() - expected.keys()):
        raise CheckpointError(
            f"{path}: this draft head has a weight {unknown[0]!r}, an EAGLE head has none: {remedy}"
        )
    for name, shape in expected.items():
        if name not in weights:
            raise CheckpointError(f"{path}: this draft head has no weight {name!r}: {remedy}")
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{path}: weight {name!r} of the draft head has shape {tuple(weights[name].shape)}, by its "
                f"configuration {shape}: export it again"
            )

"""A draft head's forward pass over packed rows: one decoder layer from (token, state) pairs to next states.

The pair of position i is the target's state at token i and the embedding of token i + 1; what the layer makes of it
goes to the target's head, and stands for the state at token i + 1. The same functions as `distillation.networks.Eagle`
and `Eagle3`, with a cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.drafter import read_fused_layers
from paceline.drafting.lean_decoder import rotate
from paceline.drafting.model_cache import PackedStep, RowCache
from paceline.errors import CheckpointError


class HeadDecoder(ABC):
    """The layer of one loaded head.

    hidden_size, vocab_size: the target's. Raises CheckpointError for a checkpoint with other weights, or one of another
    target.
    """

    kind: ClassVar[str]
    layer: ClassVar[str]
    """Before the names of the layer's weights."""

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
        self._fused_layers = read_fused_layers(path)
        self._check_names(path, stored, self._shapes(config))
        number_format = stored["fc.weight"].dtype if dtype == "auto" else getattr(torch, dtype)
        self.weights = {name: weight.to(number_format) for name, weight in stored.items()}
        """By the checkpoint's names."""
        self.dtype = number_format
        self._hidden_size, self._head_dim = hidden_size, int(config.head_dim)
        self._eps: float = config.rms_norm_eps
        self._activate = ACT2FN[config.hidden_act]
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(self.weights["fc.weight"], torch.arange(max_model_len)[None])
        half = self._head_dim // 2
        self._cos, self._sin = cos[0, :, None, :half], sin[0, :, None, :half]

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """What is fed where the target's states are known. [num_tokens, num_states * hidden] -> [num_tokens, hidden]"""

    @abstractmethod
    def forward(self, embedded: Tensor, states: Tensor, step: PackedStep, cache: RowCache) -> Tensor:
        """What the packed pairs of `step` lead to, and may be fed next; fills the cache. All [num_tokens, hidden]"""

    @abstractmethod
    def end(self, outputs: Tensor) -> Tensor:
        """What the target's head is applied to, of what `forward` made. [num_rows, hidden]"""

    @abstractmethod
    def _shapes(self, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        """Of the head's weights, by name."""

    def _run_layer(self, inputs: Tensor, residual: Tensor, step: PackedStep, cache: RowCache) -> Tensor:
        """Attention over `inputs`, and MLP, both added to `residual`. All but `inputs` [num_tokens, hidden]"""
        cache.step = step
        query, key, value = (
            self._linear(f"self_attn.{name}_proj", inputs).unflatten(1, (-1, self._head_dim))
            for name in "qkv"
        )
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0)
        mixed = cache.attend_packed(0, query, self._head_dim**-0.5)
        hidden = residual + self._linear("self_attn.o_proj", mixed.flatten(1))
        normed = self._norm(f"{self.layer}post_attention_layernorm", hidden)
        gate, up = self._linear("mlp.gate_proj", normed), self._linear("mlp.up_proj", normed)
        return hidden + self._linear("mlp.down_proj", self._activate(gate) * up)

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weights[f"{self.layer}{name}.weight"])

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(inputs, weight.shape, weight, self._eps)

    def _layer_shapes(self, config: LlamaConfig, input_size: int) -> dict[str, tuple[int, ...]]:
        size, inner = config.hidden_size, config.intermediate_size
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        layer = {
            "self_attn.q_proj": (queries, input_size),
            "self_attn.k_proj": (keys, input_size),
            "self_attn.v_proj": (keys, input_size),
            "self_attn.o_proj": (size, queries),
            "post_attention_layernorm": (size,),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        return {f"{self.layer}{name}.weight": shape for name, shape in layer.items()}

    def _check_names(
        self, path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        remedy = "give a head that 'paceline drafter export' has written"
        if unknown := sorted(weights.keys() - expected.keys()):
            raise CheckpointError(
                f"{path}: this draft head has a weight {unknown[0]!r}, an {self.kind} head has none: {remedy}"
            )
        for name, shape in expected.items():
            if name not in weights:
                raise CheckpointError(f"{path}: this {self.kind} head has no weight {name!r}: {remedy}")
            if weights[name].shape != shape:
                raise CheckpointError(
                    f"{path}: weight {name!r} of the draft head has shape {tuple(weights[name].shape)}, by its "
                    f"configuration {shape}: export it again"
                )


class EagleDecoder(HeadDecoder):
    """EAGLE (Li and others 2024): reads the target's last state, and makes the next one.

    As published, there is no norm before the attention, and the output goes to the target's head as it is.
    """

    kind, layer = "EAGLE", "layers.0."

    def begin(self, states: Tensor) -> Tensor:
        return states[:, -self._hidden_size :]

    def forward(self, embedded: Tensor, states: Tensor, step: PackedStep, cache: RowCache) -> Tensor:
        hidden = F.linear(torch.cat([embedded, states], 1).to(self.dtype), self.weights["fc.weight"])
        return self._run_layer(hidden, hidden, step, cache)

    def end(self, outputs: Tensor) -> Tensor:
        return outputs

    def _shapes(self, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        size = config.hidden_size
        return {"fc.weight": (size, 2 * size)} | self._layer_shapes(config, size)


class Eagle3Decoder(HeadDecoder):
    """EAGLE-3 (Li and others 2025): fuses inner states of the target, and feeds itself whatever its layer makes."""

    kind, layer = "EAGLE-3", "midlayer."

    def begin(self, states: Tensor) -> Tensor:
        fused = states[:, : len(self._fused_layers) * self._hidden_size]
        return F.linear(fused.to(self.dtype), self.weights["fc.weight"])

    def forward(self, embedded: Tensor, states: Tensor, step: PackedStep, cache: RowCache) -> Tensor:
        tokens = self._norm("midlayer.input_layernorm", embedded.to(self.dtype))
        inputs = torch.cat([tokens, self._norm("midlayer.hidden_norm", states)], 1)
        return self._run_layer(inputs, states, step, cache)

    def end(self, outputs: Tensor) -> Tensor:
        return self._norm("norm", outputs)

    def _shapes(self, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        size = config.hidden_size
        norms = {
            f"{name}.weight": (size,) for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        }
        fuse = {"fc.weight": (size, len(self._fused_layers) * size)}
        return fuse | norms | self._layer_shapes(config, 2 * size)


def load_head(
    path: Path, *, hidden_size: int, vocab_size: int, max_model_len: int, dtype: str
) -> HeadDecoder:
    """The head in a folder: EAGLE-3 if its configuration names layers to fuse. Arguments, errors: `HeadDecoder`."""
    kind = Eagle3Decoder if read_fused_layers(path) else EagleDecoder
    return kind(
        path, hidden_size=hidden_size, vocab_size=vocab_size, max_model_len=max_model_len, dtype=dtype
    )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the draft head cannot be loaded ({error}): export it again"
        ) from error
    return weights


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

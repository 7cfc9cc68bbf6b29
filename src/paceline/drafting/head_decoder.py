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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.drafter import read_fused_layers
from paceline.drafting.head_layer import HeadLayer, LayerShape, LayerWeights, make_layer
from paceline.errors import CheckpointError
from paceline.types import Int64Array


class HeadDecoder(ABC):
    """The layer of one loaded head.

    hidden_size, vocab_size: the target's. dtype: the number format to compute in; "auto": what is fastest, weights in
    bfloat16 or 8 bits, or the checkpoint's where its sizes do not allow that (`head_layer`). Raises CheckpointError for
    a checkpoint with other weights, or one of another target.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]
    """Before the names of the layer's weights."""

    def __init__(
        self,
        path: Path,
        *,
        hidden_size: int,
        vocab_size: int,
        max_model_len: int,
        max_requests: int,
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
        self._hidden_size = hidden_size
        self._native = dtype == "auto"
        angles_in = torch.empty(0) if self._native else self.weights["fc.weight"]
        cos, sin = LlamaRotaryEmbedding(config)(angles_in, torch.arange(max_model_len)[None])
        half = config.head_dim // 2
        self._layer_shape = LayerShape(
            config.head_dim,
            config.rms_norm_eps,
            config.hidden_act,
            cos[0, :, None, :half],
            sin[0, :, None, :half],
            max_requests,
        )
        self.layer = self._make_layer()

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """What is fed where the target's states are known. [num_tokens, num_states * hidden] -> [num_tokens, hidden]"""

    @abstractmethod
    def forward(
        self, embedded: Tensor, states: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        """What the packed pairs (`HeadLayer`) lead to, and may be fed next. All [num_tokens, hidden]"""

    @abstractmethod
    def end(self, outputs: Tensor) -> Tensor:
        """What the target's head is applied to, of what `forward` made. [num_rows, hidden]"""

    @abstractmethod
    def _shapes(self, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        """Of the head's weights, by name."""

    def reload(self, fresh: Mapping[str, Tensor]) -> None:
        """Take over new weights, which have been checked; all rows are void."""
        for name, tensor in fresh.items():
            self.weights[name].copy_(tensor)
        self.layer = self._make_layer()

    def _make_layer(self) -> HeadLayer:
        def weight(name: str) -> Tensor:
            return self.weights[f"{self.prefix}{name}.weight"]

        q, k, v, o = (weight(f"self_attn.{name}_proj") for name in "qkvo")
        gate, up, down = (weight(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        weights = LayerWeights(
            self.weights["fc.weight"], q, k, v, o, weight("post_attention_layernorm"), gate, up, down
        )
        return make_layer(weights, self._layer_shape, native=self._native)

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"].to(self.layer.dtype)
        return F.rms_norm(inputs.to(weight.dtype), weight.shape, weight, self._layer_shape.eps)

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
        return {f"{self.prefix}{name}.weight": shape for name, shape in layer.items()}

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

    kind, prefix = "EAGLE", "layers.0."

    def begin(self, states: Tensor) -> Tensor:
        return states[:, -self._hidden_size :]

    def forward(
        self, embedded: Tensor, states: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        hidden = self.layer.fuse(torch.cat([embedded, states], 1))
        return self.layer.run(hidden, hidden, rows, starts, counts)

    def end(self, outputs: Tensor) -> Tensor:
        return outputs

    def _shapes(self, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        size = config.hidden_size
        return {"fc.weight": (size, 2 * size)} | self._layer_shapes(config, size)


class Eagle3Decoder(HeadDecoder):
    """EAGLE-3 (Li and others 2025): fuses inner states of the target, and feeds itself whatever its layer makes."""

    kind, prefix = "EAGLE-3", "midlayer."

    def begin(self, states: Tensor) -> Tensor:
        return self.layer.fuse(states[:, : len(self._fused_layers) * self._hidden_size])

    def forward(
        self, embedded: Tensor, states: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        tokens = self._norm("midlayer.input_layernorm", embedded)
        inputs = torch.cat([tokens, self._norm("midlayer.hidden_norm", states)], 1)
        return self.layer.run(inputs, states, rows, starts, counts)

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
    path: Path, *, hidden_size: int, vocab_size: int, max_model_len: int, max_requests: int, dtype: str
) -> HeadDecoder:
    """The head in a folder: EAGLE-3 if its configuration names layers to fuse. Arguments, errors: `HeadDecoder`."""
    kind = Eagle3Decoder if read_fused_layers(path) else EagleDecoder
    return kind(
        path,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_requests=max_requests,
        dtype=dtype,
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

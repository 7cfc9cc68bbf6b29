"""A Llama-like decoder's forward pass over packed rows, without the cost of a module call per operation.

transformers spends about 0.3 ms of Python per layer and pass, several times what a small drafter computes in it, and a
draft of 16 tokens is 16 passes. `LeanDecoder` takes the weights of a loaded Llama or Qwen2 model and computes the same
function with one call per operation. Whether it is the same is tried when the drafter is made (`model.py`); everything
else runs through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.drafting.model_cache import PackedStep, RowCache

MODEL_TYPES = ("llama", "qwen2")
"""Rotary positions, RMS norms on the residual stream, SwiGLU without bias."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, projections of the same input in one."""

    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden], the norm's weight in it
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 * intermediate, hidden], the norm's weight in it
    down: torch.Tensor


class LeanDecoder:
    """The forward pass of one loaded model; keeps fused copies of its projections."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.embedding = model.get_input_embeddings().weight
        self.head = model.get_output_embeddings().weight
        size = self.embedding.shape[1]
        self.norm = model.model.norm.weight * size**0.5
        eps = model.config.get_text_config().rms_norm_eps * size
        self.eps = torch.full((1, 1), eps, dtype=torch.float32, device=self.embedding.device)
        attention = model.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.layers = [_fuse(layer) for layer in model.model.layers]
        device, dtype = self.embedding.device, self.embedding.dtype
        positions = torch.arange(max_model_len, device=device).unsqueeze(0)
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1, device=device, dtype=dtype), positions)
        half = self._head_dim // 2
        self.cos, self.sin = cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()

    def logits(
        self, ids: torch.Tensor, step: PackedStep, cache: RowCache, *, last_only: bool
    ) -> torch.Tensor:
        """Run the packed tokens `ids` [num_tokens] of `step` and fill the cache.

        Returns the logits of every token, or with `last_only` of each row's last one. [num_rows, vocab_size]
        """
        hidden = F.embedding(ids, self.embedding)
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        for index, layer in enumerate(self.layers):
            heads = F.linear(self._normed(hidden), layer.qkv, layer.qkv_bias).view(
                len(ids), -1, self._head_dim
            )
            num_kv = cache.num_kv_heads(index)
            turned = rotate(heads[:, : heads.shape[1] - num_kv], cos, sin)
            cache.write(index, turned[:, -num_kv:], heads[:, -num_kv:])
            mixed = cache.attend_packed(index, turned[:, :-num_kv], self.scaling)
            hidden = hidden + F.linear(mixed.reshape(len(ids), -1), layer.output, layer.output_bias)
            gate, up = F.linear(self._normed(hidden), layer.gate_up).chunk(2, dim=1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        if last_only:
            hidden = hidden[step.last]
        return F.linear(self._normed(hidden) * self.norm, self.head)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """RMS norm without its weight, and smaller by sqrt(hidden_size); both are in the weights that follow."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        return hidden * torch.rsqrt(torch.addcmul(self.eps, length, length)).to(hidden.dtype)


def lean_decoder(model: Any, max_model_len: int) -> LeanDecoder | None:
    """The lean form of `model`, None where it has none."""
    config = model.config.get_text_config()
    plain = config.model_type in MODEL_TYPES and config.hidden_act == "silu"
    if not plain or getattr(config, "mlp_bias", False):
        return None
    return LeanDecoder(model, max_model_len)


def _fuse(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [part.bias for part in parts]
    return FusedLayer(
        qkv=fold_norm(torch.cat([part.weight for part in parts]), layer.input_layernorm.weight),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        gate_up=fold_norm(
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), layer.post_attention_layernorm.weight
        ),
        down=mlp.down_proj.weight,
    )


def fold_norm(weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The weight behind an RMS norm, of weight `norm`, as it applies to rows of length 1: an RMS norm scales them to
    sqrt(hidden)."""
    factor = norm.float() * weight.shape[1] ** 0.5
    return (weight.float() * factor).to(weight.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions. heads [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]"""
    first, second = heads.chunk(2, dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

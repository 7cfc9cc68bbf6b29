"""The decoder layer of a draft head, with keys and values of its own: one row per response.

Two forms of the same function. `NativeLayer` is C++ (csrc/decoder.cpp, a small model's too): a level of a draft is a
few tokens, so that it takes as long as reading the weights, which are kept in bfloat16 or, from some millions on, in 8
bits. `TorchLayer` computes in the number format that the user asks for, with any sizes. Either may round as it likes:
drafts decide when a token is computed, never which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from paceline._decoder import Head
from paceline.drafting.lean_decoder import fold_norm, rotate
from paceline.drafting.model_cache import PackedStep, RowCache
from paceline.drafting.native_decoder import MULTIPLE, best_storage, to_array
from paceline.types import Int64Array


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """As in the checkpoint, [outputs, inputs] each; norm: before the MLP, [hidden]."""

    fuse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """cos, sin: rotary positions, [max_model_len, 1, head_dim / 2]."""

    head_dim: int
    eps: float
    activation: str
    cos: Tensor
    sin: Tensor
    max_requests: int

    @property
    def max_model_len(self) -> int:
        return len(self.cos)


class HeadLayer(Protocol):
    """Rows ascend in each call; `counts[i]` packed tokens go to row i, from position `starts[i]` on."""

    dtype: torch.dtype
    """Of what goes in and comes out."""

    def fuse(self, inputs: Tensor) -> Tensor:
        """The head's first product. [num_tokens, inputs] -> [num_tokens, hidden]"""

    def run(
        self, inputs: Tensor, residual: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        """Attention over `inputs`, and MLP, both added to `residual`. All but `inputs` [num_tokens, hidden]"""

    def copy(self, source: int, target: int, known: int, length: int) -> None:
        """Copy the first `length` tokens of one row into another, which has the first `known` of them already."""

    def clear(self, row: int) -> None:
        """Nothing of a row that held NaN stays."""


class TorchLayer:
    """In the weights' number format."""

    def __init__(self, weights: LayerWeights, shape: LayerShape) -> None:
        self.dtype = weights.fuse.dtype
        self._weights, self._shape = weights, shape
        self._activate = ACT2FN[shape.activation]
        self._cache = RowCache(shape.max_requests, shape.max_model_len)

    def fuse(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs.to(self.dtype), self._weights.fuse)

    def run(
        self, inputs: Tensor, residual: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        weights, shape, cache = self._weights, self._shape, self._cache
        step = cache.step = PackedStep(rows, starts, counts, shape.max_model_len, self.dtype)
        query, key, value = (
            F.linear(inputs, weight).unflatten(1, (-1, shape.head_dim))
            for weight in (weights.q, weights.k, weights.v)
        )
        cos, sin = shape.cos[step.positions], shape.sin[step.positions]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0)
        mixed = cache.attend_packed(0, query, shape.head_dim**-0.5)
        hidden = residual + F.linear(mixed.flatten(1), weights.o)
        normed = F.rms_norm(hidden, weights.norm.shape, weights.norm, shape.eps)
        gated = self._activate(F.linear(normed, weights.gate)) * F.linear(normed, weights.up)
        return hidden + F.linear(gated, weights.down)

    def copy(self, source: int, target: int, known: int, length: int) -> None:
        self._cache.copy(source, target, known, length)

    def clear(self, row: int) -> None:
        self._cache.clear_behind(row, 0)


class NativeLayer:
    """Packed copies of the weights; activations are float32."""

    dtype = torch.float32

    def __init__(self, weights: LayerWeights, shape: LayerShape) -> None:
        self._size = len(weights.down)
        products = [
            torch.cat([weights.q, weights.k, weights.v]),
            weights.o,
            fold_norm(torch.cat([weights.gate, weights.up]), weights.norm),
            weights.down,
        ]
        qkv, output, gate_up, down = map(to_array, products)
        self._head = Head(
            to_array(weights.fuse),
            (qkv, None, output, None, gate_up, down),
            to_array(shape.cos[:, 0]),
            to_array(shape.sin[:, 0]),
            shape.eps * self._size,
            shape.head_dim**-0.5,
            len(weights.k) // shape.head_dim,
            shape.max_requests,
            best_storage([weights.fuse, *products]),
        )

    def fuse(self, inputs: Tensor) -> Tensor:
        made = torch.empty(len(inputs), self._size)
        self._head.fuse(to_array(inputs), torch.get_num_threads(), made.numpy())
        return made

    def run(
        self, inputs: Tensor, residual: Tensor, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> Tensor:
        made = residual.float().clone()
        self._head.run(rows, starts, counts, to_array(inputs), torch.get_num_threads(), made.numpy())
        return made

    def copy(self, source: int, target: int, known: int, length: int) -> None:
        self._head.copy_row(source, target, known, length)

    def clear(self, row: int) -> None:
        """What lies behind a row's tokens is not read."""


def make_layer(weights: LayerWeights, shape: LayerShape, *, native: bool) -> HeadLayer:
    """native: if the sizes and the activation allow it."""
    sizes = (*weights.down.shape, shape.head_dim)
    if native and shape.activation == "silu" and not any(size % MULTIPLE for size in sizes):
        return NativeLayer(weights, shape)
    return TorchLayer(weights, shape)

"""A Llama-like decoder's forward pass as one native call: the lean form's weights in csrc/decoder_module.cpp.

A pass of a small drafter over a few tokens costs less than the 50 torch calls of the lean form, and a draft is as many
passes as it has tokens. For float32 weights on the CPU whose sizes are multiples of 16; runs on one thread.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline._decoder import Decoder
from paceline.drafting.lean_decoder import LeanDecoder
from paceline.drafting.model_cache import RowCache
from paceline.types import Float32Array, Int64Array

MULTIPLE = 16
"""Sizes that the native loops take: whole registers of 16 floats."""


class NativeDecoder:
    """The forward pass of one loaded model; keeps packed copies of its weights."""

    def __init__(self, lean: LeanDecoder, vocab_size: int, num_kv_heads: int) -> None:
        """vocab_size: ids of which logits are wanted."""
        self._vocab_size = vocab_size
        self._decoder = Decoder(
            _array(lean.embedding),
            _array(lean.head),
            _array(lean.norm),
            [
                (
                    _array(layer.qkv),
                    None if layer.qkv_bias is None else _array(layer.qkv_bias),
                    _array(layer.output),
                    None if layer.output_bias is None else _array(layer.output_bias),
                    _array(layer.gate_up),
                    _array(layer.down),
                )
                for layer in lean.layers
            ],
            _array(lean.cos[:, 0]),
            _array(lean.sin[:, 0]),
            float(lean.eps),
            lean.scaling,
            num_kv_heads,
        )

    def logits(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array, ids: Int64Array, cache: RowCache
    ) -> torch.Tensor:
        """Feed `counts[i]` tokens to row i from `starts[i]` on, as `PackedStep`, and fill the cache.

        Returns the logits of each row's last token. [num_rows, vocab_size] float32
        """
        last = np.cumsum(counts) - 1
        positions = starts
        if len(ids) > len(rows):
            positions = np.arange(len(ids)) - np.repeat(last + 1 - counts - starts, counts)
            rows = np.repeat(rows, counts)
        made = np.empty((len(last), self._vocab_size), np.float32)
        keys, values = cache.arrays()
        self._decoder.decode(ids, rows, positions, last, keys, values, made)
        return torch.from_numpy(made)


def native_decoder(lean: LeanDecoder, vocab_size: int, cache: RowCache) -> NativeDecoder | None:
    """The native form of a lean decoder, None where it has none."""
    weight = lean.embedding
    sizes = {weight.shape[1], 2 * lean.cos.shape[2], *(layer.down.shape[1] for layer in lean.layers)}
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or any(n % MULTIPLE for n in sizes):
        return None
    return NativeDecoder(lean, vocab_size, cache.num_kv_heads(0))


def _array(tensor: torch.Tensor) -> Float32Array:
    made: Float32Array = tensor.detach().float().contiguous().numpy()
    return made

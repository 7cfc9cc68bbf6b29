"""A Llama-like decoder in C++ that drafts by itself: the lean form's weights in csrc/decoder.cpp.

A pass of a small drafter over a few tokens costs less than the calls that it takes in Python, and a draft is as many
passes as it has tokens, so a whole draft is one native call. Keys and values are kept in bfloat16, weights too or,
where they are too many for a cache, in integers of 8 bits: what has to be read decides the time. Arithmetic is
float32; with weights in 8 bits it is integers', where the processor multiplies those faster. Owns its key/value
rows. On the CPU, for sizes that are multiples of 16.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from paceline._decoder import Decoder, has_octet_dot
from paceline.drafting.lean_decoder import LeanDecoder
from paceline.drafting.proposal import CONFIDENCE_EDGES, MARGIN_EDGES, Draft
from paceline.types import Float32Array, Int64Array

MULTIPLE = 16
"""Sizes that the native loops take: whole registers of 16 floats."""

INT8_WEIGHTS = 1 << 22
"""A model of so many weights keeps them in 8 bits: 8 MiB in bfloat16 stay in no core's own cache beside the target's
steps, and are read again for every draft token (docs/decisions/0026-native-drafter.md)."""

Storage = Literal["bfloat16", "int8", "int8-dot"]
"""How weights are kept: "int8" with a scale for each output of 64 inputs, "int8-dot" the same for the processor's dot
product of octets, for which a token's activations are rounded likewise."""


class NativeDecoder:
    """One loaded model and its key/value rows; keeps packed copies of the weights."""

    def __init__(
        self, lean: LeanDecoder, vocab_size: int, num_kv_heads: int, max_requests: int, *, storage: Storage
    ) -> None:
        """vocab_size: ids of which logits are wanted. Rows are as long as the lean form's positions."""
        self.weight_dtype = torch.bfloat16 if storage == "bfloat16" else torch.int8
        self._vocab_size = vocab_size
        self._decoder = Decoder(
            to_array(lean.embedding),
            to_array(lean.head[:vocab_size]),
            to_array(lean.norm),
            [
                (
                    to_array(layer.qkv),
                    None if layer.qkv_bias is None else to_array(layer.qkv_bias),
                    to_array(layer.output),
                    None if layer.output_bias is None else to_array(layer.output_bias),
                    to_array(layer.gate_up),
                    to_array(layer.down),
                )
                for layer in lean.layers
            ],
            to_array(lean.cos[:, 0]),
            to_array(lean.sin[:, 0]),
            float(lean.eps),
            lean.scaling,
            num_kv_heads,
            max_requests,
            storage,
        )

    def logits(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array, ids: Int64Array
    ) -> torch.Tensor:
        """Feed `counts[i]` tokens to row i from position `starts[i]` on; ids are packed.

        Returns the logits of each row's last token. [num_rows, vocab_size] float32
        """
        made = np.empty((len(rows), self._vocab_size), np.float32)
        self._decoder.feed(rows, starts, counts, ids, torch.get_num_threads(), made)
        return torch.from_numpy(made)

    def copy(self, source: int, target: int, known: int, length: int) -> None:
        """Copy the first `length` tokens of one row into another, which has the first `known` of them already."""
        self._decoder.copy_row(source, target, known, length)

    def grow(
        self,
        draft: Draft,
        requests: Int64Array,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        ids: Int64Array,
    ) -> None:
        """Feed as `logits` does, then grow the drafts of `requests` level by level."""
        query = draft.query
        shape = (len(rows), draft.depth)
        tokens, cells = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        rivals = np.full(shape, -1, np.int32)
        acceptance, num_tokens = np.zeros(shape, np.float32), np.zeros(len(rows), np.int32)
        probes = np.empty((len(rows), len(draft.sharpness_grid)), np.int32)
        failed = np.zeros(len(rows), np.bool_)
        self._decoder.grow(
            rows,
            starts,
            counts,
            ids,
            query.keys[requests],
            query.temperatures[requests],
            draft.limits[requests],
            draft.sharpness,
            draft.sharpness_grid,
            draft.calibration,
            CONFIDENCE_EDGES,
            MARGIN_EDGES,
            draft.floor,
            draft.level_costs,
            torch.get_num_threads(),
            tokens,
            num_tokens,
            acceptance,
            cells,
            rivals,
            probes,
            failed,
        )
        draft.tokens[requests], draft.num_tokens[requests] = tokens, num_tokens
        draft.acceptance[requests], draft.cells[requests] = acceptance, cells
        draft.rivals[requests] = rivals
        draft.probes[requests], draft.failed[requests] = probes, failed


def native_decoder(
    lean: LeanDecoder, vocab_size: int, num_kv_heads: int, max_requests: int
) -> NativeDecoder | None:
    """The native form of a lean decoder, None where it has none."""
    weight = lean.embedding
    sizes = {weight.shape[1], 2 * lean.cos.shape[2], *(layer.down.shape[1] for layer in lean.layers)}
    if weight.device.type != "cpu" or any(size % MULTIPLE for size in sizes):
        return None
    products = [weight[:vocab_size]]
    for layer in lean.layers:
        products += [layer.qkv, layer.output, layer.gate_up, layer.down]
    storage = best_storage(products)
    return NativeDecoder(lean, vocab_size, num_kv_heads, max_requests, storage=storage)


def best_storage(products: list[torch.Tensor]) -> Storage:
    """For a model of these weights."""
    if sum(one.numel() for one in products) < INT8_WEIGHTS:
        return "bfloat16"
    return "int8-dot" if has_octet_dot() else "int8"


def to_array(tensor: torch.Tensor) -> Float32Array:
    """In float32 and without gaps, in place if it is."""
    made: Float32Array = tensor.detach().float().contiguous().numpy()
    return made

"""Drafts that were made through a step under way, put where V2 reads them: on the device, which knows what it decided.

Called by v2/runner.py before a step's inputs are made, when the kernels of the step before have been launched. Nothing
here waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

from paceline.engine.runner import AheadDrafts
from paceline.types import Int32Array

NOTHING = 0
"""Stands where a draft does not go on. Any token may: it is accepted if it is the one that the target draws."""
NUM_NUMBERS = 3
"""Of a draft's row in the table, before its tokens: V2's row, tokens that it was made behind, its own tokens."""


def table_of(
    rows: Int32Array, starts: Int32Array, num_tokens: Int32Array, tokens: Int32Array, most_drafts: int
) -> Int32Array:
    """Drafts as the kernel reads them, of one width in all steps. [num_drafts, NUM_NUMBERS + 1 + 2 * most_drafts]

    Args:
        rows, starts, num_tokens: as in NUM_NUMBERS. [num_drafts]
        tokens: of at most one token that the step under way decides in any case, `most_drafts` drafts of it, and as
            many of the next. [num_drafts, any]
        most_drafts: draft tokens that a request can have in a step.
    """
    table = np.zeros((len(rows), NUM_NUMBERS + 1 + 2 * most_drafts), np.int32)
    for column, values in enumerate((rows, starts, num_tokens)):
        table[:, column] = values
    table[:, NUM_NUMBERS : NUM_NUMBERS + tokens.shape[1]] = tokens
    return table


def put_ahead(drafts: AheadDrafts, states: Any, device: torch.device) -> None:
    """Write each request's drafts behind what the steps since have decided for it. states: V2's RequestState."""
    count, most_drafts = len(drafts.names), states.draft_tokens.shape[1]
    rows = np.fromiter(map(states.req_id_to_index.__getitem__, drafts.names), np.int32, count)
    starts = drafts.starts.astype(np.int32)
    table = table_of(rows, starts, drafts.num_tokens, drafts.tokens, most_drafts)
    _continue(async_tensor_h2d(table, device=device), states)


def prepare_ahead(states: Any, device: torch.device) -> None:
    """Compile the kernel, before the first step."""
    nothing = np.zeros((1, NUM_NUMBERS + 1 + 2 * states.draft_tokens.shape[1]), np.int32)
    _continue(torch.from_numpy(nothing).to(device), states)


def _continue(table: torch.Tensor, states: Any) -> None:
    continue_drafts(states.draft_tokens, table, states.all_token_ids.gpu, states.total_len.gpu)


def continue_drafts(
    target: torch.Tensor, table: torch.Tensor, known: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Write to a request's row what its draft goes on with, NOTHING where it does not.

    Args:
        target: draft tokens of each row. [max_requests, most_drafts] int64
        table: of `table_of`. [num_drafts, NUM_NUMBERS + 1 + 2 * most_drafts] int32
        known: tokens of each row, those decided since included. [max_requests, max_len] int32
        lengths: how many they are. [max_requests] int32
    """
    most_drafts = target.shape[1]
    _continue_kernel[(len(table),)](
        target,
        target.stride(0),
        table,
        known,
        known.stride(0),
        lengths,
        NOTHING=NOTHING,
        NUM_NUMBERS=NUM_NUMBERS,
        MOST_DRAFTS=most_drafts,
        BLOCK_SIZE=triton.next_power_of_2(1 + 2 * most_drafts),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _continue_kernel(  # type: ignore[no-untyped-def]
    target_ptr,
    target_stride,
    table_ptr,
    known_ptr,
    known_stride,
    lengths_ptr,
    NOTHING: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    draft_ptr = table_ptr + tl.program_id(0) * (NUM_NUMBERS + 1 + 2 * MOST_DRAFTS)
    row = tl.load(draft_ptr).to(tl.int64)
    start = tl.load(draft_ptr + 1)
    num_tokens = tl.load(draft_ptr + 2)
    num_decided = tl.load(lengths_ptr + row) - start
    offset = tl.arange(0, BLOCK_SIZE)
    draft = tl.load(draft_ptr + NUM_NUMBERS + offset, mask=offset < num_tokens, other=-1)
    is_decided = offset < num_decided
    decided = tl.load(known_ptr + row * known_stride + start + offset, mask=is_decided, other=-2)
    wrong = tl.where(is_decided, (draft != decided).to(tl.int32), 0)
    end = tl.where(tl.max(wrong, axis=0) > 0, 0, num_tokens)
    place = num_decided + offset
    rest = tl.load(draft_ptr + NUM_NUMBERS + place, mask=place < end, other=NOTHING)
    tl.store(target_ptr + row * target_stride + offset, rest.to(tl.int64), mask=offset < MOST_DRAFTS)

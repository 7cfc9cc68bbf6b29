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

NOTHING = 0
"""Stands where a draft does not go on. Any token may: it is accepted if it is the one that the target draws."""


def put_ahead(drafts: AheadDrafts, states: Any, device: torch.device) -> None:
    """Write each request's drafts behind what the steps since have decided for it. states: V2's RequestState."""
    rows = np.fromiter(map(states.req_id_to_index.__getitem__, drafts.names), np.int64, len(drafts.names))
    columns = (rows, drafts.starts, drafts.num_tokens.astype(np.int64))
    rows_there, starts, num_tokens = (async_tensor_h2d(column, device=device) for column in columns)
    continue_drafts(
        states.draft_tokens,
        async_tensor_h2d(np.ascontiguousarray(drafts.tokens), device=device),
        rows_there,
        starts,
        num_tokens,
        states.all_token_ids.gpu,
        states.total_len.gpu,
    )


def continue_drafts(
    target: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    num_tokens: torch.Tensor,
    known: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Write to a request's row what its draft goes on with, NOTHING where it does not.

    Args:
        target: draft tokens of each row. [max_requests, most_drafts] int64
        tokens: drafts. [num_requests, most] int32
        rows, starts, num_tokens: of each draft its row, how many tokens it was made behind, how many it has.
            [num_requests] int64
        known: tokens of each row, those decided since included. [max_requests, max_len] int32
        lengths: how many they are. [max_requests] int32
    """
    most_drafts = target.shape[1]
    _continue_kernel[(len(rows),)](
        target,
        target.stride(0),
        most_drafts,
        tokens,
        tokens.stride(0),
        rows,
        starts,
        num_tokens,
        known,
        known.stride(0),
        lengths,
        NOTHING=NOTHING,
        BLOCK_SIZE=triton.next_power_of_2(max(most_drafts, tokens.shape[1])),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _continue_kernel(  # type: ignore[no-untyped-def]
    target_ptr,
    target_stride,
    most_drafts,
    tokens_ptr,
    tokens_stride,
    rows_ptr,
    starts_ptr,
    num_tokens_ptr,
    known_ptr,
    known_stride,
    lengths_ptr,
    NOTHING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    start = tl.load(starts_ptr + request)
    num_tokens = tl.load(num_tokens_ptr + request)
    num_decided = tl.load(lengths_ptr + row).to(tl.int64) - start
    offset = tl.arange(0, BLOCK_SIZE)
    draft = tl.load(tokens_ptr + request * tokens_stride + offset, mask=offset < num_tokens, other=-1)
    is_decided = offset < num_decided
    decided = tl.load(known_ptr + row * known_stride + start + offset, mask=is_decided, other=-2)
    wrong = tl.where(is_decided, (draft != decided).to(tl.int32), 0)
    end = tl.where(tl.max(wrong, axis=0) > 0, 0, num_tokens)
    place = num_decided + offset
    rest = tl.load(tokens_ptr + request * tokens_stride + place, mask=place < end, other=NOTHING)
    tl.store(target_ptr + row * target_stride + offset, rest.to(tl.int64), mask=offset < most_drafts)

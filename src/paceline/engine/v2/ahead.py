"""Drafts that were made through a step under way, put where V2 reads them: on the device, which knows what it decided.

Called by v2/runner.py before a step's inputs are made, when the kernels of the step before have been launched. Nothing
here waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

from paceline.engine.runner import AheadDrafts
from paceline.types import Int32Array

NOTHING = 0
"""Stands where a draft does not go on. Any token may: it is accepted if it is the one that the target draws."""
NUM_NUMBERS = 3
"""Of a request's row in the table, before its paths: V2's row, tokens that they were made behind, whether what is there
stays where none goes on."""


def table_of(
    rows: Int32Array,
    starts: Int32Array,
    keeps: NDArray[np.bool_],
    num_tokens: Int32Array,
    tokens: Int32Array,
    most_drafts: int,
    num_paths: int,
) -> Int32Array:
    """Drafts as the kernel reads them, of one width in all steps. [num_requests, row_width(most_drafts, num_paths)]

    Args:
        rows, starts, keeps: as in NUM_NUMBERS. [num_requests]
        num_tokens: of each path. [num_requests, up to num_paths]
        tokens: of at most one token that the step under way decides in any case, `most_drafts` drafts of it, and as
            many of the next. [num_requests, up to num_paths, any]
        most_drafts: draft tokens that a request can have in a step.
        num_paths: that a request can have.
    """
    table = np.zeros((len(rows), row_width(most_drafts, num_paths)), np.int32)
    table[:, 0], table[:, 1], table[:, 2] = rows, starts, keeps
    paths = table[:, NUM_NUMBERS:].reshape(len(rows), num_paths, -1)  # a view
    count = num_tokens.shape[1]
    paths[:, :count, 0] = num_tokens
    paths[:, :count, 1 : 1 + tokens.shape[2]] = tokens
    return table


def row_width(most_drafts: int, num_paths: int) -> int:
    """Numbers of a request in the table: of each path how many tokens it has, and so many."""
    return NUM_NUMBERS + num_paths * (2 + 2 * most_drafts)


def put_ahead(drafts: AheadDrafts, num_paths: int, states: Any, device: torch.device) -> None:
    """Write each request's drafts behind what the steps since have decided for it. states: V2's RequestState."""
    count, most_drafts = len(drafts.names), states.draft_tokens.shape[1]
    rows = np.fromiter(map(states.req_id_to_index.__getitem__, drafts.names), np.int32, count)
    starts = drafts.starts.astype(np.int32)
    table = table_of(rows, starts, drafts.keeps, drafts.num_tokens, drafts.tokens, most_drafts, num_paths)
    _continue(async_tensor_h2d(table, device=device), num_paths, states)


def prepare_ahead(num_paths: int, states: Any, device: torch.device) -> None:
    """Compile the kernel, before the first step."""
    nothing = np.zeros((1, row_width(states.draft_tokens.shape[1], num_paths)), np.int32)
    _continue(torch.from_numpy(nothing).to(device), num_paths, states)


def _continue(table: torch.Tensor, num_paths: int, states: Any) -> None:
    known, lengths = states.all_token_ids.gpu, states.total_len.gpu
    continue_drafts(states.draft_tokens, table, known, lengths, num_paths)


def continue_drafts(
    target: torch.Tensor, table: torch.Tensor, known: torch.Tensor, lengths: torch.Tensor, num_paths: int
) -> None:
    """Write to a request's row what the first of its paths that goes on goes on with; NOTHING where none does, unless
    what is there is kept.

    Args:
        target: draft tokens of each row. [max_requests, most_drafts] int64
        table: of `table_of`. [num_requests, row_width(most_drafts, num_paths)] int32
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
        NUM_PATHS=num_paths,
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
    NUM_PATHS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    PATH_WIDTH: tl.constexpr = 2 + 2 * MOST_DRAFTS
    request_ptr = table_ptr + tl.program_id(0) * (NUM_NUMBERS + NUM_PATHS * PATH_WIDTH)
    row = tl.load(request_ptr).to(tl.int64)
    start = tl.load(request_ptr + 1)
    is_written = tl.load(request_ptr + 2) == 0
    num_decided = tl.load(lengths_ptr + row) - start
    offset = tl.arange(0, BLOCK_SIZE)
    place = num_decided + offset
    is_decided = offset < num_decided
    decided = tl.load(known_ptr + row * known_stride + start + offset, mask=is_decided, other=-2)
    rest = tl.full((BLOCK_SIZE,), NOTHING, tl.int32)
    goes_on = False
    for path in tl.static_range(NUM_PATHS):
        path_ptr = request_ptr + NUM_NUMBERS + path * PATH_WIDTH
        num_tokens = tl.load(path_ptr)
        draft = tl.load(path_ptr + 1 + offset, mask=offset < num_tokens, other=-1)
        wrong = tl.where(is_decided, (draft != decided).to(tl.int32), 0)
        is_next = (tl.max(wrong, axis=0) == 0) & (num_tokens > num_decided) & (goes_on == False)  # noqa: E712
        end = tl.where(is_next, num_tokens, 0)
        rest = tl.where(is_next, tl.load(path_ptr + 1 + place, mask=place < end, other=NOTHING), rest)
        goes_on = goes_on | is_next
    is_place = (offset < MOST_DRAFTS) & (goes_on | is_written)
    tl.store(target_ptr + row * target_stride + offset, rest.to(tl.int64), mask=is_place)

"""Exact verification on model runner V2, on the device alone.

V2 draws a token by Gumbel noise that is a function of (seed, position, token id): our dice, with the key for a seed. So
vLLM's own sampler serves every step without drafts, and of its verification the test of probability ratios alone is
replaced: each row is drawn as it would be without drafts, and a draft is accepted while it equals its row's token.
Invariant: the token of a row depends on that row's logits, the request's sampling options, its seed and the position
alone, which makes plain vLLM on V2 with `seed=key` generate the same tokens.

A row of NaN, or one whose options leave no token, has no next token, and vLLM draws some number, on a GPU even beyond
the vocabulary. Which requests took one of those is noted on the device, and read when the step's tokens are
(v2/outputs.py). Until then a step that overlaps and the draft model read token 0 in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


def has_no_token(logits: torch.Tensor) -> torch.Tensor:
    """Rows of processed logits from which nothing can be drawn: with a NaN, or all -inf. [num_rows] bool"""
    return ~(logits.amax(-1) > -torch.inf)


class CheckedSampler:
    """Mixin over vLLM's sampler, which draws for steps without drafts."""

    missing: list[torch.Tensor]
    """Of the present step, in parts: which requests' last token is none. [num_requests] bool"""

    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        drawn, processed = super().sample(*args, **kwargs)  # type: ignore[misc]
        without = has_no_token(processed)
        self.missing.append(without)
        return drawn.masked_fill_(without, 0), processed


class ExactVerifier(RejectionSampler):  # type: ignore[misc]
    """vLLM's verification of drafts, its chunks and log-probabilities included, with exact matching for its test."""

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        drawn = gumbel_sample(
            processed,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
        )
        tokens, num_tokens, missing = accept(
            drawn, has_no_token(processed), verify_draft_sampled, cu_num_logits, self.num_speculative_steps
        )
        self.sampler.missing.append(missing)
        return processed, tokens, num_tokens


def accept(
    drawn: torch.Tensor,
    without: torch.Tensor,
    inputs: torch.Tensor,
    first_rows: torch.Tensor,
    most_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept each request's draft tokens up to the first that differs from the token drawn before it.

    Args:
        drawn: token that each row decides. [num_rows] int64
        without: rows that have no token; acceptance ends there. [num_rows] bool
        inputs: token that each row was computed from: a request's last token, then its drafts, -1 for one that may not
            be accepted. [num_rows] int
        first_rows: [num_requests + 1] int32
        most_drafts: draft tokens that a request can have.

    Returns:
        (tokens [num_requests, 1 + most_drafts] int64, 0 for one that is none, undefined behind the first rejection;
        their numbers [num_requests] int32; whether the last one is of a row without a token [num_requests] bool)
    """
    num_requests = len(first_rows) - 1
    tokens = drawn.new_empty(num_requests, 1 + most_drafts)
    num_tokens = first_rows.new_empty(num_requests)
    missing = without.new_empty(num_requests)
    _accept_kernel[(num_requests,)](
        tokens,
        tokens.stride(0),
        num_tokens,
        missing,
        drawn,
        without,
        inputs,
        first_rows,
        BLOCK_SIZE=triton.next_power_of_2(1 + most_drafts),
    )
    return tokens, num_tokens, missing


@triton.jit  # type: ignore[untyped-decorator]
def _accept_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tokens_stride,
    num_tokens_ptr,
    missing_ptr,
    drawn_ptr,
    without_ptr,
    inputs_ptr,
    first_rows_ptr,
    BLOCK_SIZE: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(first_rows_ptr + request)
    num_rows = tl.load(first_rows_ptr + request + 1) - start
    offset = tl.arange(0, BLOCK_SIZE)
    drawn = tl.load(drawn_ptr + start + offset, mask=offset < num_rows, other=0)
    draft = tl.load(inputs_ptr + start + offset + 1, mask=offset + 1 < num_rows, other=-1)
    without = tl.load(without_ptr + start + offset, mask=offset < num_rows, other=0) != 0
    drawn = tl.where(without, 0, drawn)
    last = tl.min(tl.where((drawn == draft) & ~without, BLOCK_SIZE, offset), axis=0)
    tl.store(tokens_ptr + request * tokens_stride + offset, drawn, mask=offset <= last)
    tl.store(num_tokens_ptr + request, last + 1)
    tl.store(missing_ptr + request, tl.max((without & (offset == last)).to(tl.int32), axis=0) != 0)

"""Attention of a draft head that feeds itself: training-time test (EAGLE-3 3.2; HASS 3.2) over packed documents.

Every token of a document begins a chain of drafts, all in one pass. In step k the chain that began at token i attends
to what verification leaves behind, the keys of step 0 up to i, and to its own keys of steps 1 to k: just what the
head's cache holds when it drafts in an engine. Of the later steps' keys only the diagonal counts, so they add one
product per token, not a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.distillation.packing import Pack, attend, same_lengths

KeysValues = tuple[Tensor, Tensor]
"""Of one step, each [num_tokens, num_kv_heads, head_dim]."""


class ChainAttention(nn.Module):  # type: ignore[misc]
    """Self-attention with rotary positions; names as in a Llama checkpoint.

    config: transformers' LlamaConfig of the head. input_size: features of what queries, keys and values are made of.
    """

    def __init__(self, config: Any, input_size: int) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        query_size, kv_size = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], pack: Pack, past: list[KeysValues]
    ) -> Tensor:
        """hidden: [num_tokens, input_size]. past: keys and values of the steps before; this step's are added to it."""
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        past.append((k, v))
        scaling = self.head_dim**-0.5
        mixed = (
            attend(q, k, v, pack.lengths, scaling)
            if len(past) == 1
            else attend_chains(q, past, pack.lengths, scaling)
        )
        made: Tensor = self.o_proj(mixed.flatten(1))
        return made


def attend_chains(
    query: Tensor, past: Sequence[KeysValues], lengths: Sequence[int], scaling: float
) -> Tensor:
    """Attention of a later step. query: [num_tokens, num_heads, head_dim]; past: of all steps, this one's last."""
    (keys, values), *own = [
        (
            k.repeat_interleave(query.shape[1] // k.shape[1], 1),
            v.repeat_interleave(query.shape[1] // v.shape[1], 1),
        )
        for k, v in past
    ]
    query = query * scaling
    own_scores = torch.stack(
        [(query * k).sum(-1) for k, _ in own], -1
    )  # [num_tokens, num_heads, num_steps - 1]
    mixed, own_weights = [], []
    for start, count, length in same_lengths(lengths):
        rows = slice(start, start + count * length)
        q, k, v, s = (
            x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (query, keys, values, own_scores)
        )
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT).masked_fill(later, -torch.inf)  # [count, num_heads, length, length]
        weights = torch.cat([scores, s], -1).softmax(-1)
        mixed.append((weights[..., :length] @ v).transpose(1, 2).flatten(0, 1))
        own_weights.append(weights[..., length:].transpose(1, 2).flatten(0, 1))
    result, weights = torch.cat(mixed), torch.cat(own_weights)
    for step, (_, v) in enumerate(own):
        result = result + weights[..., step, None] * v
    return result

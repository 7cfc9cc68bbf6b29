"""Attention of a bfloat16 target on CPUs whose linear layers use the bfloat16 dot product (linear.py): faster.

vLLM's CPU kernel takes about as long for each query of a request as for the first; what verifies drafts has several.
Here the queries of a request that see the same KV head share a pass over its context, and a block holds keys and values
as the dot product takes them. What a query gets depends on its context alone, so the bits are the same in any batch.
Layers with sliding windows, sinks, ALiBi, capped scores, cross or encoder attention or a quantised cache keep vLLM's
kernel. (docs/decisions/0039-attention.md)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline._attention import PANEL_TOKENS, attend, store_tokens
from paceline.engine.compat import cpu_attention
from paceline.errors import UnsupportedError

CpuAttentionBackend, CpuAttentionImpl = cpu_attention()
MAX_HEAD_SIZE = 512


class SharedPassAttention(CpuAttentionImpl):  # type: ignore[misc, valid-type]
    """vLLM's implementation of a layer, with this kernel where the layer allows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_own = (
            torch.get_default_dtype() is torch.bfloat16
            and self.attn_type == "decoder"
            and self.kv_cache_dtype in ("auto", "bfloat16")
            and self.sliding_window == -1
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
            and self.kv_sharing_target_layer_name is None
            and self.head_size % PANEL_TOKENS == 0
            and self.head_size <= MAX_HEAD_SIZE
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.is_own:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        store(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None or not self.is_own:
            return super().forward(  # type: ignore[no-any-return]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata.causal is not True:
            raise UnsupportedError(
                "a decoder layer without causal attention: set linear_kernel='vllm', its attention is vLLM's own"
            )
        rows = attn_metadata.num_actual_tokens
        attend_all(
            query[:rows],
            output[:rows],
            kv_cache,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            self.scale,
        )
        return output


def store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values [num_tokens, num_kv_heads, head_size] into a layer's cache.

    kv_cache: [num_blocks, num_kv_heads, block_tokens, 2 * head_size], a block's inside as the kernel likes it.
    slots: of each token, block * block_tokens + place, negative: none. [num_tokens] int64
    """
    _, num_kv_heads, block_tokens, width = kv_cache.shape
    _check_block(block_tokens, kv_cache)
    key, value = _rows(key), _rows(value)
    store_tokens(
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slots.data_ptr(),
        len(slots),
        kv_cache.data_ptr(),
        num_kv_heads,
        width // 2,
        block_tokens,
        torch.get_num_threads(),
    )


def attend_all(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
) -> None:
    """Write causal attention of `query` [num_tokens, num_heads, head_size] into `output`, which may have gaps nowhere.

    starts: first token of each request and their end. [num_requests + 1] int32
    contexts: tokens that a request's last token sees. [num_requests] int32
    tables: blocks of each request. [num_requests, most] int32
    """
    _, num_kv_heads, block_tokens, width = kv_cache.shape
    query = query.contiguous()
    attend(
        query.data_ptr(),
        output.data_ptr(),
        kv_cache.data_ptr(),
        starts.data_ptr(),
        contexts.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        len(contexts),
        query.shape[1],
        num_kv_heads,
        width // 2,
        block_tokens,
        scale,
        torch.get_num_threads(),
    )


@contextmanager
def replacing_attention() -> Iterator[None]:
    """While inside, layers that vLLM's CPU backend builds get this kernel where they allow it."""
    chosen = CpuAttentionBackend.get_impl_cls
    CpuAttentionBackend.get_impl_cls = staticmethod(lambda: SharedPassAttention)
    try:
        yield
    finally:
        CpuAttentionBackend.get_impl_cls = chosen


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same with each token's heads in one piece."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def _check_block(block_tokens: int, kv_cache: torch.Tensor) -> None:
    if block_tokens % PANEL_TOKENS or not kv_cache.is_contiguous():
        raise UnsupportedError(
            f"KV blocks of {block_tokens} tokens, strides {kv_cache.stride()}: this attention kernel takes "
            f"multiples of {PANEL_TOKENS} without gaps; set block_size to one, or linear_kernel='vllm'"
        )

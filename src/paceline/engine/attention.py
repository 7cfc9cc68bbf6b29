"""Attention of a bfloat16 target on CPUs whose linear layers use the bfloat16 dot product (linear.py): faster.

vLLM's CPU kernel takes about as long for each query of a request as for the first; what verifies drafts has several.
Here the queries of a request that see the same KV head share a pass over its context, and a block holds keys and values
as the dot product takes them. What a query gets depends on its context alone, so the bits are the same in any batch.
Layers with sliding windows, sinks, ALiBi, capped scores, cross or encoder attention, a quantised cache or a head size
that 32 does not divide keep vLLM's kernel. (docs/decisions/0039-attention.md)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from paceline._attention import IS_SUPPORTED, PANEL_SIZE, PANEL_TOKENS, serve_torch
from paceline.engine.compat import cpu_attention
from paceline.engine.installed import torch_library
from paceline.errors import UnsupportedError

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("store(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slots) -> ()")
_LIBRARY.define(
    "attend(Tensor query, Tensor(a!) output, Tensor kv_cache, Tensor starts, Tensor contexts, Tensor tables, "
    "float scale) -> ()"
)
if IS_SUPPORTED:
    serve_torch(torch_library())

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
            and self.head_size % PANEL_SIZE == 0
            and self.head_size <= MAX_HEAD_SIZE
        )
        self._known_cache: torch.Tensor | None = None
        if self.kv_sharing_target_layer_name is not None:
            self._check_shared()

    def _check_shared(self) -> None:
        """A layer that reads another one's cache reads it as that one has written it."""
        layers = get_current_vllm_config().compilation_config.static_forward_context
        writer = layers[self.kv_sharing_target_layer_name].impl
        if getattr(writer, "is_own", False) != self.is_own:
            raise UnsupportedError(
                f"a layer shares the KV cache of {self.kv_sharing_target_layer_name}, and Paceline's attention kernel "
                "can serve only one of the two: set linear_kernel='vllm'"
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
        if kv_cache is not self._known_cache:
            check_cache(kv_cache)
            self._known_cache = kv_cache
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
        if attn_metadata.causal is not True or output_scale is not None:
            raise UnsupportedError(
                "Paceline's attention kernel has causal attention and plain outputs alone, a layer wants others: set "
                "linear_kernel='vllm'"
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

    kv_cache: [num_blocks, num_kv_heads, block_tokens, 2 * head_size], a block's inside as the kernel likes it;
    `check_cache` has passed it. slots: of each token, block * block_tokens + place, negative: none. [num_tokens] int64
    Raises ValueError for what does not fit together.
    """
    torch.ops.paceline.store(_rows(key), _rows(value), kv_cache, slots)


def attend_all(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
) -> None:
    """Write causal attention of `query` into `output`, both [num_tokens, num_heads, head_size], that without gaps.

    kv_cache: that `store` has filled. starts: first token of each request and their end. [num_requests + 1] int32
    contexts: tokens that a request's last token sees. [num_requests] int32
    tables: blocks of each request. [num_requests, most] int32
    Raises ValueError for what does not fit together.
    """
    torch.ops.paceline.attend(query.contiguous(), output, kv_cache, starts, contexts, tables, scale)


@contextmanager
def replacing_attention() -> Iterator[None]:
    """While inside, layers that vLLM's CPU backend builds get this kernel where they allow it."""
    chosen = CpuAttentionBackend.__dict__["get_impl_cls"]
    CpuAttentionBackend.get_impl_cls = staticmethod(lambda: SharedPassAttention)
    try:
        yield
    finally:
        CpuAttentionBackend.get_impl_cls = chosen


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same with each token's heads in one piece."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def check_cache(kv_cache: torch.Tensor) -> None:
    """Raises UnsupportedError for a layer's cache that the kernel cannot take."""
    _, _, block_tokens, width = kv_cache.shape
    inside = (block_tokens * width, width, 1)
    if block_tokens % PANEL_TOKENS or kv_cache.stride()[1:] != inside or kv_cache.dtype is not torch.bfloat16:
        raise UnsupportedError(
            f"KV blocks of {block_tokens} tokens in {kv_cache.dtype}, strides {kv_cache.stride()}: this attention "
            f"kernel takes multiples of {PANEL_TOKENS} in bfloat16, without gaps; set block_size to one, or "
            "linear_kernel='vllm'"
        )

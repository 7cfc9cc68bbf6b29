"""An engine's KV cache as bytes: whole blocks, all layers together, as they lie in memory.

How a block is laid out inside is the attention kernel's own business (on the CPU backend keys are transposed,
[head_dim, block_tokens]), so blocks go whole, a partly filled one too; `describe` names what must be equal in the
engine that takes them over. What lies behind the last token of a partly filled block is never counted: attention ends
there, and the next token is written over it. Used by connector.py, in the worker.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UnsupportedError


class KvBlocks:
    """The caches of all layers. Blocks are dimension 0 of each."""

    def __init__(self, kv_caches: dict[str, torch.Tensor], num_blocks: int) -> None:
        """Raises UnsupportedError for a cache whose dimension 0 is not its blocks."""
        layers = sorted(kv_caches.items())
        shared = {
            cache.data_ptr(): (name, cache) for name, cache in reversed(layers)
        }  # by layers that share one
        self._layers = sorted(shared.values(), key=lambda layer: layer[0])
        for name, cache in self._layers:
            if cache.shape[0] != num_blocks:
                raise UnsupportedError(
                    f"the KV pool does not know the cache of {name}: {tuple(cache.shape)} does not begin with the "
                    f"{num_blocks} blocks; leave kv_pool unset on this attention backend"
                )
        self.block_bytes = sum(cache[0].numel() * cache.element_size() for _, cache in self._layers)

    def describe(self) -> list[tuple[Any, ...]]:
        """What a block consists of."""
        return [(name, tuple(cache.shape[1:]), str(cache.dtype)) for name, cache in self._layers]

    def read(self, block: int) -> list[memoryview]:
        """The bytes of a block, layer by layer; on the CPU a view of the cache itself."""
        return [_as_bytes(cache[block]) for _, cache in self._layers]

    def write(self, block: int, data: memoryview) -> None:
        """Fill a block with what `read` gave elsewhere. [block_bytes]"""
        start = 0
        for _, cache in self._layers:
            own = cache[block]
            count = own.numel() * own.element_size()
            theirs = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start)
            own.copy_(theirs.view(cache.dtype).view(own.shape))
            start += count


def _as_bytes(block: torch.Tensor) -> memoryview:
    flat = block.contiguous().cpu().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())

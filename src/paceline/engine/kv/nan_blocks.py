"""Keeps NaN out of KV blocks that somebody else will read.

A response that ends in NaN leaves NaN keys and values behind. Attention gives weight zero to what lies behind a
sequence's last token in its last block, and zero times NaN is NaN: a block that is used again would take the NaN to a
response that has none of its own. So would what a rejected draft leaves behind. Called by the model runner, in the
worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from paceline.engine.multipath.layout import PathPlan


class NanBlocks:
    """Blocks of responses that ended in NaN, until they are given to somebody else; usually none."""

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], num_blocks: int, block_sizes: Sequence[int]
    ) -> None:
        """kv_caches: of all layers, blocks in dimension 0. block_sizes: tokens per block of each KV cache group."""
        self._caches = [cache for cache in kv_caches if cache.shape[0] % num_blocks == 0]
        self._num_blocks, self._block_sizes = num_blocks, block_sizes
        self._stained: set[int] = set()

    def leave(self, groups: Iterable[Sequence[int]]) -> None:
        """A response ends in NaN, with these blocks of each group. Others may share them: they stay as they are."""
        self._stained.update(*groups)

    def clear_from(self, groups: Iterable[Sequence[int]], position: int) -> None:
        """Clear NaN from a position of a request on; what its blocks hold before it is not NaN."""
        for part in self._parts(self._behind(groups, position)):
            torch.nan_to_num_(part, nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def clear_before(self, scheduler_output: Any, paths: PathPlan | None) -> None:
        """Clear what the coming step gives to somebody else; blocks of the prefix cache are given as they are.

        paths: the step's alternatives, which borrow blocks too.
        """
        if not self._stained:
            return
        given: set[int] = set()
        for new in scheduler_output.scheduled_new_reqs:
            given.update(self._behind(new.block_ids, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for name, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if groups is not None:
                given.update(self._behind(groups, computed if name in cached.resumed_req_ids else 0))
        if paths is not None:
            given.update(*paths.blocks)  # what is accepted of an alternative is copied out of them
        for part in self._parts(given & self._stained):
            part.zero_()
        self._stained -= given

    def _behind(self, groups: Iterable[Sequence[int]], num_tokens: int) -> Iterator[int]:
        """Blocks that a request computes itself."""
        for blocks, size in zip(groups, self._block_sizes, strict=True):
            yield from blocks[num_tokens // size :]

    def _parts(self, blocks: Iterable[int]) -> Iterator[torch.Tensor]:
        for block in blocks:
            for cache in self._caches:
                width = cache.shape[0] // self._num_blocks
                yield cache[block * width : (block + 1) * width]

"""KV telemetry: how many blocks an engine has, and how they are used. Read by the fleet's workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV cache of one engine at a moment."""

    num_blocks: int
    """Blocks that requests may fill; drafts in flight need none beyond a request's own limit of tokens."""
    block_tokens: int
    num_used: int
    num_preemptions: int
    """Requests that were thrown out for want of blocks since the engine started."""


def read_kv_use(scheduler: Any) -> KvUse:
    """What a Paceline scheduler can tell. Blocks kept for the prefix cache alone count as free: they can be taken."""
    pool = scheduler.kv_cache_manager.block_pool
    num_blocks = pool.num_gpu_blocks - 1  # vLLM keeps one, the null block
    return KvUse(
        num_blocks=num_blocks,
        block_tokens=scheduler.block_size,
        num_used=num_blocks - pool.get_num_free_blocks(),
        num_preemptions=scheduler.num_preemptions,
    )

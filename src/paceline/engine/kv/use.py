"""KV telemetry: how many blocks an engine has, and how they are used. Read by the fleet's workers."""

from __future__ import annotations

from typing import Any

from paceline.types import KvUse


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

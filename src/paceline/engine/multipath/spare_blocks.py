"""The KV blocks that the scheduler lends to alternative draft paths."""

from __future__ import annotations

from typing import Any


class SpareBlocks:
    """KV blocks lent from vLLM's pool for the alternatives' private copies.

    Held from step to step, because taking a block evicts what the prefix cache keeps in it; given back as soon as
    requests may need it, so that no request is preempted or kept waiting for a draft.
    """

    def __init__(self, pool: Any, wanted: int) -> None:
        """Args: vLLM's block pool; blocks wanted, at most an eighth of the pool."""
        self._pool = pool
        self._wanted = min(wanted, pool.num_gpu_blocks // 8)
        self._held: list[Any] = []

    def hold(self, demand: int) -> int:
        """Hold the blocks if the pool then still has `demand` free ones, else give them back; the number held."""
        free = self._pool.get_num_free_blocks() + len(self._held)
        if free - self._wanted < demand:
            self.release()
        elif not self._held:
            self._held = self._pool.get_new_blocks(self._wanted)
        return len(self._held)

    def release(self) -> None:
        """Give all blocks back."""
        held, self._held = self._held, []
        self._pool.free_blocks(held)

    @property
    def ids(self) -> list[int]:
        """Ids of the blocks held."""
        return [block.block_id for block in self._held]

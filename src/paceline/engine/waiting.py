"""What of vLLM's waiting requests the coming step will admit: tokens that the draft budget has to leave room for.

Looks and changes nothing. Costs what an engine has seats for, however many requests wait. Called by the scheduler.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

from paceline.engine.compat import PauseState, PriorityRequestQueue, Request


def num_admissible_tokens(scheduler: Any, room: int, longest: int) -> int:
    """Tokens of waiting requests that the coming step can admit, as far as free seats and KV blocks tell.

    Those that hold blocks go first, as in vLLM; those that wait for a grammar or for more input do not count.

    Args:
        scheduler: the `PacelineScheduler`.
        room: tokens that the step has left.
        longest: most tokens of one prompt in a step.
    """
    seats = scheduler.max_num_active_reqs - len(scheduler.running) - scheduler.num_waiting_for_streaming_input
    if seats <= 0:
        return 0
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_pool
    is_paused = scheduler.pause_state is not PauseState.UNPAUSED  # then no new ones
    queues = (scheduler.kv_holding_waiting, *(() if is_paused else (scheduler.waiting,)))
    front = itertools.chain(*(front_of(queue, scheduler.max_num_active_reqs) for queue in queues))
    ready = (r for r in front if not scheduler._is_blocked_waiting_status(r.status))
    blocks, tokens = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks, 0
    for request in itertools.islice(ready, seats):
        is_new = request.num_computed_tokens == 0
        known = _num_cached_tokens(manager, request) if is_new else request.num_computed_tokens
        blocks -= scheduler.blocks_for(request.num_tokens - known)
        if blocks < 0 or tokens >= room:
            break
        if (
            pool is not None and is_new
        ):  # after the blocks: what is found stays in memory until it is admitted
            known += pool.get_num_new_matched_tokens(request, known)[0]
        tokens += min(request.num_tokens - known, longest)
    return tokens


def _num_cached_tokens(manager: Any, request: Request) -> int:
    """Tokens in the prefix cache, without `get_computed_blocks`, which tells listeners to KV events of each hit."""
    if not manager.prefix_cache_lookup_enabled(request):
        return 0
    found: int = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
    return found


def front_of(queue: Any, count: int) -> Iterator[Request]:
    """The first `count` requests of a queue, in its order.

    vLLM's own iteration over a priority queue copies the heap, O(waiting); a walk down the heap is O(count log count).
    """
    if not isinstance(queue, PriorityRequestQueue):
        yield from itertools.islice(queue, count)
        return
    heap = queue._heap
    ahead = [(request, at) for at, request in enumerate(heap[:1])]
    for _ in range(min(count, len(heap))):
        request, at = heapq.heappop(ahead)
        yield request
        for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))

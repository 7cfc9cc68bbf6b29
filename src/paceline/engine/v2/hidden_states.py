"""Hidden states on V2: copied to the host while the step goes on, sorted out when they have arrived.

A step's rows are known before it is known how many of its draft tokens stand. So the rows of rejected ones are copied
too, and dropped on the host. They are gathered before the drafter runs, whose graphs may write over the target's
states, and copied beside it. Invariant: nothing here waits for the device but `settle`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from paceline.drafting.model_cache import ranges
from paceline.drafting.token_states import TokenStates
from paceline.engine.state_collector import StateCollector
from paceline.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class _Seen:
    """The chosen requests of a step; what is on the host, from `rejected` on, is valid once `copied` has happened."""

    responses: Int64Array  # [num_requests]
    num_prompt_tokens: Int64Array  # [num_requests]
    scheduled: Int64Array  # [num_requests] tokens in the step
    rejected: Int32Array  # [num_requests] of these
    starts: Int64Array  # [num_requests] position of the first
    ids: Int32Array  # [sum(scheduled)]
    states: torch.Tensor  # [sum(scheduled), num_states * hidden]
    gathered: tuple[torch.Tensor, ...]
    """On the device: not to be given to somebody else before they are copied."""
    copied: Any

    @property
    def has_arrived(self) -> bool:
        """Whether it is on the host. Waits for nothing."""
        query = getattr(self.copied, "query", None)  # without a device there is nothing to wait for
        return query is None or bool(query())


class DeviceCollector(StateCollector):
    """Takes what it keeps from the device, a step or two behind."""

    def __init__(self, share: float, max_bytes: int) -> None:
        super().__init__(share, max_bytes)
        self._seen = deque[_Seen]()

    def see(self, runner: Any, step: Any, rejected: torch.Tensor) -> None:
        """Start copying what a step shows of the chosen responses, and keep what earlier steps have shown.

        step: vLLM's ExecuteModelState. rejected: draft tokens of each request. [num_requests] int, on the device
        """
        started_s = time.perf_counter()
        batch, states = step.input_batch, runner.req_states
        rows = batch.idx_mapping_np
        keys = runner.sampler.sampling_states.seeds.np[rows].view(np.uint64)
        chosen = np.flatnonzero(self.chosen(keys))
        if len(chosen):
            scheduled = batch.num_scheduled_tokens[chosen].astype(np.int64)
            first = batch.query_start_loc_np[chosen].astype(np.int64)
            indices = chosen, first, ranges(first, scheduled)
            requests, begins, places = (async_tensor_h2d(x, device=runner.device) for x in indices)
            layers = [*(step.aux_hidden_states or []), step.hidden_states]
            kept = torch.cat([layer[places] for layer in layers], 1)
            gathered = rejected[requests], batch.positions[begins], batch.input_ids[places], kept
            main, beside = runner.main_stream, runner.output_copy_stream
            with stream(beside, main):
                beside.wait_stream(main)
                num_rejected, starts, ids = map(async_copy_to_np, gathered[:-1])
                on_host = kept.to("cpu", non_blocking=True, copy=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record(beside)
            prompts = states.prompt_len.np[rows[chosen]].astype(np.int64)
            responses = runner.responses[rows[chosen]]
            self._seen.append(
                _Seen(responses, prompts, scheduled, num_rejected, starts, ids, on_host, gathered, copied)
            )
        while self._seen and self._seen[0].has_arrived:
            self._keep(self._seen.popleft())
        self.seconds += time.perf_counter() - started_s

    def settle(self) -> None:
        while self._seen:
            self._seen[0].copied.synchronize()
            self._keep(self._seen.popleft())

    def _keep(self, seen: _Seen) -> None:
        counts = seen.scheduled - seen.rejected
        begins = np.cumsum(seen.scheduled) - seen.scheduled
        places = ranges(begins, counts)
        ids, states = seen.ids[places], seen.states[torch.from_numpy(places)]
        step = TokenStates(seen.responses, seen.starts.astype(np.int64), counts, ids, ids[:0], states)
        self.add(step, seen.num_prompt_tokens)

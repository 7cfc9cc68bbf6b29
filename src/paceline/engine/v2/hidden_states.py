"""Hidden states on V2: copied to the host while the step goes on, sorted out when they have arrived.

A step's rows are known before it is known how many of its draft tokens stand. So the rows of rejected ones are copied
too, and dropped on the host. Invariant: nothing here waits for the device but `settle`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from paceline.drafting.model_cache import ranges
from paceline.drafting.token_states import TokenStates
from paceline.engine.state_collector import StateCollector
from paceline.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class _Seen:
    """The chosen requests of a step; the arrays from `rejected` on are valid once `copied` has happened."""

    responses: Int64Array  # [num_requests]
    num_prompt_tokens: Int64Array  # [num_requests]
    scheduled: Int64Array  # [num_requests] tokens in the step
    rejected: Int32Array  # [num_requests] of these
    starts: Int64Array  # [num_requests] position of the first
    ids: Int32Array  # [sum(scheduled)]
    states: torch.Tensor  # [sum(scheduled), num_states * hidden]
    copied: Any


class DeviceCollector(StateCollector):
    """Takes what it keeps from the device, one step behind."""

    def __init__(self, share: float, max_bytes: int) -> None:
        super().__init__(share, max_bytes)
        self._seen: list[_Seen] = []

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
            places = async_tensor_h2d(ranges(first, scheduled), device=runner.device)
            layers = [*(step.aux_hidden_states or []), step.hidden_states]
            kept = torch.cat([layer[places] for layer in layers], 1).to("cpu", non_blocking=True, copy=True)
            requests, begins = (async_tensor_h2d(x, device=runner.device) for x in (chosen, first))
            arrays = rejected[requests], batch.positions[begins], batch.input_ids[places]
            num_rejected, starts, ids = map(async_copy_to_np, arrays)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
            prompts = states.prompt_len.np[rows[chosen]].astype(np.int64)
            responses = runner.responses[rows[chosen]]
            seen = _Seen(responses, prompts, scheduled, num_rejected, starts, ids, kept, copied)
            self._seen.append(seen)
        self._keep(all_but=1)
        self.seconds += time.perf_counter() - started_s

    def settle(self) -> None:
        self._keep(all_but=0)

    def _keep(self, all_but: int) -> None:
        """Keep what steps have shown, but for so many of the last ones, which may still be under way."""
        count = max(len(self._seen) - all_but, 0)
        arrived, self._seen = self._seen[:count], self._seen[count:]
        for seen in arrived:
            seen.copied.synchronize()
            counts = seen.scheduled - seen.rejected
            begins = np.cumsum(seen.scheduled) - seen.scheduled
            places = ranges(begins, counts)
            ids = seen.ids[places]
            step = TokenStates(
                seen.responses,
                seen.starts.astype(np.int64),
                counts,
                ids,
                ids[:0],
                seen.states[torch.from_numpy(places)],
            )
            self.add(step, np.arange(len(counts)), seen.num_prompt_tokens)

"""The runner: vLLM's model runner V2, verifying the scheduler's drafts by the shared dice.

A mixin: the worker exchanges the runner's class for a subclass of itself. V2 reads draft tokens from the device and
takes of the scheduler's message only how many there are; here their values are put where V2 reads them. A step waits
for nothing that is on the device.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from paceline.engine import compiled, invariance
from paceline.engine.arguments import fused_layers, read_settings
from paceline.engine.keys import signed
from paceline.engine.kv.nan_blocks import NanBlocks
from paceline.engine.runner import FreshDrafts, Runner, order_of
from paceline.engine.v2.ahead import prepare_ahead, put_ahead
from paceline.engine.v2.buffers import grammar_worker, keep_texts_on_host
from paceline.engine.v2.graphs import graphs_for_ragged_steps
from paceline.engine.v2.hidden_states import DeviceCollector
from paceline.engine.v2.outputs import Missing, check, has_arrived
from paceline.engine.v2.sampler import CheckedSampler, ExactVerifier
from paceline.engine.v2.speculator import LateDrafts, NoSpeculator, couple
from paceline.errors import UnsupportedError
from paceline.types import Int64Array


def adopt(runner: Any) -> Runner:
    """Make vLLM's runner, which has no model yet, a subclass of its own class with Paceline's part in it."""
    runner.__class__ = type("PacelineRunner", (KeyedRunnerV2, runner.__class__), {})
    runner.adopt()
    return runner  # type: ignore[no-any-return]


class KeyedRunnerV2:
    """Mixin over vLLM's model runner V2; the interface is `engine.runner.Runner`."""

    responses: Int64Array  # [max_num_reqs] the scheduler's number of the response in each of V2's rows
    num_paths: int  # that a request may have through a step under way
    drafted: dict[str, list[int]]  # draft tokens of the present step, by request
    nan_blocks: NanBlocks
    missing: Missing  # of the present step
    collector: DeviceCollector | None
    step: Any  # vLLM's ExecuteModelState of the present step
    late: LateDrafts | None  # made after the step before, where steps overlap

    def adopt(self: Any) -> None:
        """Finish the change of class: say where drafts come from."""
        self.responses = np.zeros(self.max_num_reqs, np.int64)
        self.num_paths = read_settings(self.vllm_config).num_paths
        self.collector = self.step = self.late = None
        self.nan_blocks = NanBlocks([], 1, [])  # a GPU's memory is profiled before there is a KV cache
        if isinstance(self.speculator, DraftModelSpeculator):
            self.speculator = couple(self.speculator, self.req_states)
        else:
            self.speculator = NoSpeculator(self.req_states.draft_tokens)
            keep_texts_on_host(self.req_states)
        self.drafter = self.speculator

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if layers := fused_layers(read_settings(self.vllm_config)):
            config = self.speculative_config.draft_model_config.hf_config
            config.eagle_aux_hidden_state_layer_ids = list(
                layers
            )  # a head may name them where V1 alone looks
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if type(self.rejection_sampler) is not RejectionSampler:
            raise UnsupportedError(
                f"{type(self.model).__name__} brings a sampler of its own: run it without Paceline"
            )
        if isinstance(self.speculator, NoSpeculator):
            self.structured_outputs_worker = grammar_worker(self)
        self.sampler.__class__ = type("PacelineSampler", (CheckedSampler, self.sampler.__class__), {})
        self.sampler.missing = []
        self.rejection_sampler = ExactVerifier(self.sampler, self.speculative_config, self.device)
        if self.speculator.num_extra_query_per_req:
            compile_for_draft_slots(
                self.vllm_config.compilation_config, self.max_num_tokens + self.max_num_reqs
            )
        self.seal_model()

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        if not (kwargs.get("is_profiling") or any(args)):  # that cache is freed before the real one is made
            sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            self.nan_blocks = NanBlocks(self.kv_caches, kv_cache_config.num_blocks, sizes)
        self.cudagraph_manager = graphs_for_ragged_steps(self)
        if self.scheduler_config.async_scheduling:
            prepare_ahead(self.num_paths, self.req_states, self.device)

    def seal_model(self: Any) -> None:
        """Put batch invariance onto the loaded model; run again after a reload."""
        if compiled.is_invariant(self.vllm_config):
            invariance.pad_single_rows(self.get_model())

    def add_requests(self: Any, scheduler_output: Any) -> None:
        """vLLM's own, for which tokens that a resumed response carries in its prompt are output.

        On the way to another process a seed of -1 has become none.
        """
        begun = scheduler_output.scheduled_new_reqs
        for request in begun:
            extra = _extra_args(request)
            carried, key = extra.get("paceline_generated"), extra.get("paceline_key")
            if carried or key is not None:
                request.sampling_params = params = copy.copy(request.sampling_params)
            if key is not None:
                params.seed = signed(key)
            if carried:
                request.prompt_token_ids = request.prompt_token_ids[:-carried]
                if params.min_tokens:  # the scheduler counts from behind them
                    params.min_tokens += carried
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for request in begun:
            row = self.req_states.req_id_to_index[request.req_id]
            self.responses[row] = _extra_args(request).get("paceline_response", -1)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = order_of(scheduler_output)
        self.speculator.order = order.drafts
        self.drafted = scheduler_output.scheduled_spec_decode_tokens
        self.nan_blocks.leave(order.stained)
        self.nan_blocks.clear_before(scheduler_output, None)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampler.missing.clear()
        sampled = super().sample(*args, **kwargs)  # type: ignore[misc]
        self.missing = Missing(torch.cat(self.sampler.missing))
        return sampled

    def make_collector(self, share: float, max_bytes: int) -> DeviceCollector:
        return DeviceCollector(share, max_bytes)

    def postprocess_sampled(
        self: Any, idx_mapping: Any, sampled: Any, num_sampled: Any, num_rejected: torch.Tensor, *args: Any
    ) -> None:
        super().postprocess_sampled(idx_mapping, sampled, num_sampled, num_rejected, *args)  # type: ignore[misc]
        if self.collector is not None and self.step is not None:  # the drafter comes next
            self.collector.see(self, self.step, num_rejected)

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = self.execute_model_state
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self.step = None
        if isinstance(output, AsyncOutput):
            if not self.scheduler_config.async_scheduling:
                if not has_arrived(output):
                    self.speculator.forgive_launch()
                return check(output, self.missing, self.drafted)
            late, self.late = self.late, self.speculator.hand_over(self)
            return check(output, self.missing, self.drafted, late)
        return output

    def prepare_inputs(
        self: Any, scheduler_output: Any, batch: Any, graph: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's own. A graph of ragged steps is replayed with attention metadata for its longest query, not for the
        step's: FlashAttention's plan of a step without drafts, queries of one token, is none for that graph.
        """
        if (ahead := order_of(scheduler_output).ahead) is not None:
            put_ahead(ahead, self.num_paths, self.req_states, self.device)
        elif not self.scheduler_config.async_scheduling:
            self.put_drafts(scheduler_output.scheduled_spec_decode_tokens)
        made = super().prepare_inputs(scheduler_output, batch, graph, *args, **kwargs)  # type: ignore[misc]
        if graph.max_query_len is not None:
            made.max_query_len = graph.max_query_len
        return made

    def put_drafts(self: Any, drafts: dict[str, list[int]]) -> None:
        """Scatter the step's draft tokens, by request, to where V2 reads them."""
        if not drafts:
            return
        lengths = np.fromiter(map(len, drafts.values()), np.int64, len(drafts))
        table = np.zeros((len(drafts), int(lengths.max())), np.int64)
        tokens = np.fromiter(chain.from_iterable(drafts.values()), np.int64, int(lengths.sum()))
        table[np.arange(table.shape[1]) < lengths[:, None]] = tokens
        rows = np.fromiter(map(self.req_states.req_id_to_index.__getitem__, drafts), np.int64, len(drafts))
        target = self.req_states.draft_tokens[:, : table.shape[1]]
        target.index_copy_(
            0, async_tensor_h2d(rows, device=self.device), async_tensor_h2d(table, device=self.device)
        )

    def take_draft_token_ids(self: Any) -> FreshDrafts | None:
        return self.speculator.take(self)  # type: ignore[no-any-return]


def compile_for_draft_slots(config: Any, num_tokens: int) -> None:
    """Let compiled code take steps of `num_tokens`: a draft model reads a token more of each request than the target.

    vLLM compiles for `max_num_batched_tokens`, and its own draft model fails in a step that exceeds them.

    config: vLLM's CompilationConfig, which target and draft model share; after both have been loaded, as loading the
    draft model computes it anew, and before either is compiled.
    """
    ends = config.compile_ranges_endpoints
    if ends and not config.compile_mm_encoder:  # with it vLLM insists on the range that it made
        ends[-1] = max(ends[-1], num_tokens)


def _extra_args(request: Any) -> dict[str, Any]:
    """Those of a new request; vLLM's warm-up has requests without."""
    return getattr(request.sampling_params, "extra_args", None) or {}

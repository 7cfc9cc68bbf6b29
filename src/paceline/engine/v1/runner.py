"""The runner: vLLM's model runner V1, sampling with the shared dice and drafting with the model drafter.

For the CPU alone. A mixin: the worker exchanges the runner's class for a subclass of itself, which keeps everything
else of vLLM's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from paceline.drafting.token_states import TokenStates
from paceline.engine import compiled, invariance
from paceline.engine.arguments import fused_layers, read_settings
from paceline.engine.compat import SamplerOutput, SpecDecodeMetadata, all_logits_processors
from paceline.engine.keys import key_of
from paceline.engine.kv.nan_blocks import NanBlocks
from paceline.engine.runner import Runner, order_of, report_undrawable, report_withdrawn
from paceline.engine.state_collector import StateCollector
from paceline.engine.v1.hidden_states import Told, num_carried, show, show_layers
from paceline.engine.v1.proposer import Proposer
from paceline.engine.v1.sampler import PLACEHOLDER, KeyedSampler, Rows, Verdict
from paceline.types import Int64Array, UInt64Array

_NAN = "the model gave NaN for its next token; check the weights and the prompt"
_NOTHING_LEFT = (
    "its sampling options leave no token to draw; loosen allowed_token_ids, bad_words or min_tokens"
)


def adopt(runner: Any, vllm_config: Any) -> Runner:
    """Make vLLM's runner, which has no model yet, a subclass of its own class with Paceline's part in it.

    Raises UnsupportedError for an engine on which the settings' draft paths were not tried.
    """
    mixins: tuple[type, ...] = (KeyedRunner,)
    if read_settings(vllm_config).num_paths > 1:
        from paceline.engine.v1.path_runner import MultiPathRunner, check_multipath

        check_multipath(vllm_config)
        mixins = (MultiPathRunner, KeyedRunner)
    runner.__class__ = type("PacelineRunner", (*mixins, runner.__class__), {})
    runner.adopt()
    return runner  # type: ignore[no-any-return]


class KeyedRunner:
    """Mixin over vLLM's model runner: samples with the dice and hands model drafts to the scheduler."""

    keyed_sampler: KeyedSampler
    drafter: Proposer
    undrawable: dict[str, str]  # requests of the present step that have no next token, and why
    withdrawn: list[str]  # those whose drafts gave NaN: the step does not count for them
    step: Any  # vLLM's ExecuteModelState of the present step; None outside of its sampling
    decided: tuple[Rows, Verdict]  # of the present step
    collector: StateCollector | None
    told: Told | None  # all requests of the batch
    collected: Told | None  # those that the collector has chosen
    nan_blocks: NanBlocks

    def adopt(self: Any) -> None:
        """Finish the change of class: build what vLLM left out because speculation is on."""
        self.keyed_sampler = KeyedSampler(self.model_config.logprobs_mode)
        self.input_batch.logitsprocs = all_logits_processors(self.vllm_config, self.device)
        self.input_batch.sampling_metadata.logitsprocs = self.input_batch.logitsprocs
        self.drafter.attach(self)
        self.undrawable, self.withdrawn = {}, []
        self.step, self.collector, self.told, self.collected = None, None, None, None

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if layers := fused_layers(read_settings(self.vllm_config)):
            show_layers(self.get_model(), layers, self.model_config.get_total_num_hidden_layers())
            self.use_aux_hidden_state_outputs = True
        self.seal_model()

    def seal_model(self: Any) -> None:
        """Put batch invariance and the live weight update onto the loaded model; run again after a reload."""
        if compiled.is_invariant(self.vllm_config):
            invariance.pad_single_rows(self.get_model())

    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiled.is_compiled(self.vllm_config) and compiled.is_invariant(self.vllm_config):
            kwargs["num_tokens"] = max(kwargs["num_tokens"], compiled.MIN_TOKENS)
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _input_fits_in_drafter(self, metadata: Any) -> bool:
        """Drafters end each request's drafts where its context ends; vLLM drops all for one that is near its end."""
        return metadata is not None

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self.nan_blocks = NanBlocks(self.kv_caches, kv_cache_config.num_blocks, sizes)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = order_of(scheduler_output)
        self.nan_blocks.leave(order.stained)
        self.nan_blocks.clear_before(scheduler_output, order.paths)
        self.drafter.order = order.drafts
        self.drafter.forget(scheduler_output.finished_req_ids)
        if scheduler_output.finished_req_ids:  # another request may come by the same name
            self.told = self.collected = None
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _sample(
        self: Any, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        batch = self.input_batch
        metadata = batch.sampling_metadata
        rows, drafts = self.lay_out_rows(spec_decode_metadata)
        outputs: list[list[int]] = []
        if metadata.bad_words_token_ids or not metadata.no_penalties:
            outputs = [_output_tokens(self.requests[name]) for name in batch.req_ids]
        result, verdict = self.keyed_sampler.sample(
            logits, rows, drafts, self.batch_keys(), metadata, outputs
        )
        if len(verdict.failed):
            self.set_aside(verdict, rows, logits)
        self.decided = rows, verdict
        self.settle(verdict)
        return result

    def set_aside(self: Any, verdict: Verdict, rows: Rows, logits: torch.Tensor) -> None:
        """Have vLLM take no token for requests that have none, and remember them for the scheduler.

        Where drafts were verified NaN may be theirs: attention gives weight zero to what lies behind a row, and zero
        times NaN is NaN. Such a step is withdrawn, and the request computes its next token alone.
        A response that ends between its draft tokens for another reason keeps those that were accepted and has no token
        one step later.
        """
        without = self.discard_request_mask.np  # of unfinished prompts, which need no token yet
        owners = rows.requests[verdict.failed]
        for request in np.unique(owners[~without[owners]]).tolist():
            state = self.requests[self.input_batch.req_ids[request]]
            nan = bool(logits[torch.from_numpy(verdict.failed[owners == request])].isnan().any())
            if nan and rows.num_drafts[rows.owners == request].any():
                self.withdraw(request, state, verdict, int(rows.positions[rows.first[request]]) - 1)
                without[request] = True
            elif verdict.table[request, 0] == PLACEHOLDER:
                self.undrawable[state.req_id] = _NAN if nan else _NOTHING_LEFT
                without[request] = True

    def withdraw(self: Any, request: int, state: Any, verdict: Verdict, start: int) -> None:
        """Undo a request's step, whose first token stood at position `start`."""
        self.withdrawn.append(state.req_id)
        verdict.winners[request], verdict.accepted[request] = request, 0
        self.nan_blocks.clear_from(state.block_ids, start)
        self.nan_blocks.leave([self.lent_blocks(request)])

    def lent_blocks(self, request: int) -> list[int]:
        """KV blocks that the request's further draft paths have written to in this step; here there are none."""
        return []

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = self.execute_model_state
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self.collector is not None and self.step is not None:
            self.collect(self.collector)
        self.step = None
        if self.undrawable:
            report_undrawable(output, self.undrawable)
            self.undrawable = {}
        if self.withdrawn:
            report_withdrawn(output, self.withdrawn)
            self.withdrawn = []
        return output

    def make_collector(self: Any, share: float, max_bytes: int) -> StateCollector:
        self.collected = None  # another share may choose others
        return StateCollector(share, max_bytes)

    def collect(self: Any, collector: StateCollector) -> None:
        """Keep the step's hidden states of the responses that the collector has chosen."""
        started_s = time.perf_counter()
        names = self.input_batch.req_ids
        if self.collected is None or self.collected.names != names:
            chosen = np.flatnonzero(collector.chosen(self.batch_keys()))
            self.collected = Told.of(names, self.requests, chosen)
        if len(self.collected.requests):
            collector.add(self.show(self.collected), self.collected.num_prompt_tokens)
        collector.seconds += time.perf_counter() - started_s

    def token_states(self: Any) -> TokenStates:
        """What the present step has shown of all requests, once its tokens are decided."""
        names = self.input_batch.req_ids
        if self.told is None or self.told.names != names:
            self.told = Told.of(names, self.requests, np.arange(len(names)))
        states: TokenStates = self.show(self.told)
        return states

    def show(self: Any, told: Told) -> TokenStates:
        """`hidden_states.show`; of a step that is withdrawn or has no token, nothing counts."""
        stands = told.stand
        if without := {*self.withdrawn, *self.undrawable}:
            stands = np.array([told.names[request] not in without for request in told.requests], np.bool_)
        return show(told, stands, self.step, self.input_batch, *self.decided)

    def lay_out_rows(self: Any, metadata: SpecDecodeMetadata | None) -> tuple[Rows, Int64Array]:
        """The rows of the step's logits and the draft tokens that they verify, [num_draft_tokens] int64."""
        batch, count = self.input_batch, self.input_batch.num_reqs
        rows = Rows.of(_num_drafts(metadata, count), batch.num_tokens_no_spec[:count].astype(np.int64))
        if metadata is None:
            return rows, np.empty(0, dtype=np.int64)
        return rows, metadata.draft_token_ids.numpy().astype(np.int64)

    def settle(self, verdict: Verdict) -> None:
        """Called with every verdict before the next step; here nothing is left to do."""

    def batch_keys(self: Any) -> UInt64Array:
        """Dice keys of the batch. [num_requests] uint64"""
        names = self.input_batch.req_ids
        requests = self.requests
        return np.fromiter(
            (key_of(requests[name].sampling_params) for name in names), dtype=np.uint64, count=len(names)
        )

    def take_draft_token_ids(self: Any) -> Any:
        return self.drafter.take()


def _num_drafts(metadata: SpecDecodeMetadata | None, num_requests: int) -> Int64Array:
    if metadata is None:
        return np.zeros(num_requests, dtype=np.int64)
    return np.asarray(metadata.num_draft_tokens, dtype=np.int64)


def _output_tokens(state: Any) -> list[int]:
    """What a request has generated, with the tokens that a resumed request carried in its prompt."""
    carried = num_carried(state)
    if not carried:
        return state.output_token_ids  # type: ignore[no-any-return]
    return [*state.prompt_token_ids[-carried:], *state.output_token_ids]

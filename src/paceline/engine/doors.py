"""The doors: every private name of vLLM that Paceline relies on, per class, and whether it is still there.

Invariant: what a module imports from vLLM, overrides in it, sets in it or reads of it stands in `DOORS`, and `use` says
what for (the contract tests compare; TRL's private names stand in tests/contracts/test_trl_doors.py). Imports vLLM
inside `check_doors` alone, and never `compat`, which cannot be imported when a door has moved. Callers: `paceline
doctor`, tests/contracts/test_vllm_doors.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULER_OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"
REQUEST = "vllm.v1.request:Request"
KV_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
KV_BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheBlocks"
POOL = "vllm.v1.core.block_pool:BlockPool"
BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
KV_CONFIG = "vllm.v1.kv_cache_interface:KVCacheConfig"
KV_GROUP = "vllm.v1.kv_cache_interface:KVCacheGroupSpec"
KV_SPEC = "vllm.v1.kv_cache_interface:FullAttentionSpec"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
REQUEST_STATE = "vllm.v1.worker.gpu_input_batch:CachedRequestState"
BLOCK_TABLE = "vllm.v1.worker.block_table:BlockTable"
BUFFER = "vllm.v1.utils:CpuGpuBuffer"
ATTENTION_GROUP = "vllm.v1.worker.utils:AttentionGroup"
ATTENTION_METADATA = "vllm.v1.attention.backend:CommonAttentionMetadata"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
STATES_V2 = "vllm.v1.worker.gpu.states:RequestState"
BATCH_V2 = "vllm.v1.worker.gpu.input_batch:InputBatch"
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler:Sampler"
SAMPLING_V2 = "vllm.v1.worker.gpu.sample.states:SamplingStates"
GRAPHS_V2 = "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager"
VERIFIER_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
SPECULATOR_V2 = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
OUTPUT_V2 = "vllm.v1.worker.gpu.async_utils:AsyncOutput"
MODEL_SPECULATOR_V2 = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator"
HEAD_SPECULATOR_V2 = (
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
)
BASE_SPECULATOR_V2 = "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator"
RUNNER_OUTPUT = "vllm.v1.outputs:ModelRunnerOutput"
SAMPLING_METADATA = "vllm.v1.sample.metadata:SamplingMetadata"
DRAFT_METADATA = "vllm.v1.spec_decode.metadata:SpecDecodeMetadata"
PROCESSORS = "vllm.v1.sample.logits_processor:LogitsProcessors"
BUILTIN = "vllm.v1.sample.logits_processor.builtin"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
CLIENT = "vllm.v1.engine.core_client:InprocClient"
CORE = "vllm.v1.engine.core:EngineCore"
EXECUTOR = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
WORKER_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
CORE_OUTPUTS = "vllm.v1.engine:EngineCoreOutputs"
CORE_OUTPUT = "vllm.v1.engine:EngineCoreOutput"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
CONFIG = "vllm.config.vllm:VllmConfig"
MODEL_CONFIG = "vllm.config.model:ModelConfig"
CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl"
CONNECTOR = f"{CONNECTOR_BASE}:KVConnectorBase_V1"
TRANSFER = "vllm.distributed.kv_transfer"


@dataclass(frozen=True, slots=True)
class Door:
    """A name of vLLM and what must be true of it."""

    target: str
    """"module:name", the name with dots below a class."""
    use: str
    """What Paceline does with it."""
    overrides: str = ""
    """Methods and attributes of a class that Paceline replaces, in a subclass or in place."""
    members: str = ""
    """Attributes, methods or fields of a class that it reads, calls or fills."""
    parameters: str = ""
    """Parameters that a function must take."""
    mentions: tuple[str, ...] = ()
    """Words that its source must contain, where nothing else can be asked."""


DOORS: tuple[Door, ...] = (
    # -- the scheduler's process
    Door(
        SCHEDULER,
        "PacelineScheduler: drafts before a step, learning after it; telemetry (kv/use.py)",
        overrides="add_request _free_request _preempt_request reset_prefix_cache shutdown schedule "
        "update_draft_token_ids update_from_output dynamic_sd_lookup",
        members="running waiting kv_holding_waiting num_waiting_for_streaming_input max_num_active_reqs "
        "_is_blocked_waiting_status requests num_spec_tokens max_model_len max_num_scheduled_tokens block_size "
        "adaptive_long_prefill_threshold get_request_counts scheduler_config kv_cache_manager connector "
        "grammar_compile_error_reqs pause_state",
    ),
    Door(
        f"{SCHEDULER}.schedule",
        "takes a request's spec_token_ids for its drafts; a table of its own switches off drafts of -1",
        mentions=("spec_token_ids", "self.dynamic_sd_lookup is None"),
    ),
    Door(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "beneath OverlappingScheduler: counts what a step under way may bring as placeholders",
        mentions=(
            "request.num_output_placeholders += (",
            "request.spec_token_ids = self._spec_token_placeholders",
        ),
    ),
    Door(
        f"{SCHEDULER}._preempt_request",
        "drops what a step under way computes for a request whose step before did not count",
        parameters="request timestamp drop_stale_output",
        mentions=("request.num_stale_output_tokens = request.num_in_flight_tokens",),
    ),
    Door(
        f"{SCHEDULER}._update_request_with_output",
        "cuts the runner's own list of a request's new tokens where the response ends",
        mentions=("del new_token_ids[num_new:]",),
    ),
    Door(
        f"{SCHEDULER}.update_from_output",
        "where a step is scored",
        parameters="scheduler_output model_runner_output",
    ),
    Door(
        f"{SCHEDULER}._connector_finished",
        "hands the connector all blocks of a request that has ended",
        mentions=("request_finished_all_groups", "get_block_ids_for_computed_tokens"),
    ),
    Door(
        SCHEDULER_OUTPUT,
        "what was scheduled; carries Paceline's order to the runner (runner.py)",
        members="scheduled_spec_decode_tokens num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs "
        "scheduled_cached_reqs finished_req_ids",
    ),
    Door(
        "vllm.v1.core.sched.output:NewRequestData",
        "blocks that a new request is given (kv/nan_blocks.py); where its output begins (v2/runner.py)",
        members="req_id sampling_params prompt_token_ids prompt_len block_ids num_computed_tokens",
    ),
    Door(
        "vllm.v1.core.sched.output:CachedRequestData",
        "blocks that a running request is given (kv/nan_blocks.py)",
        members="req_ids resumed_req_ids new_block_ids num_computed_tokens",
    ),
    Door(
        QUEUE, "waiting requests, for what the coming step can admit", members="peek_request __iter__ __len__"
    ),
    Door(
        "vllm.v1.core.sched.request_queue:PriorityRequestQueue",
        "a look at its front without a copy of it (waiting.py)",
        members="_heap",
    ),
    Door(
        "vllm.config.scheduler:SchedulerConfig",
        "limits of a step and its prefills",
        members="max_num_seqs max_num_batched_tokens long_prefill_token_threshold async_scheduling",
    ),
    Door(
        REQUEST,
        "a request's tokens and state; the scheduler fills its drafts and sampling parameters",
        members="request_id sampling_params prompt_token_ids output_token_ids spec_token_ids all_token_ids num_tokens "
        "num_prompt_tokens num_computed_tokens block_hashes num_output_tokens num_output_placeholders "
        "num_in_flight_tokens num_stale_output_tokens drop_stale_output is_finished "
        "is_prefill_chunk max_tokens use_structured_output status resumable lora_request mm_features cache_salt",
    ),
    Door(
        "vllm.v1.request:RequestStatus",
        "how a response was cut (kv/connector.py) or ended (scheduler.py)",
        members="FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_STOPPED",
    ),
    Door(
        "vllm.v1.core.sched.interface:PauseState",
        "whether requests that wait are admitted (waiting.py)",
        members="UNPAUSED",
    ),
    Door(
        KV_MANAGER,
        "free blocks, what a prompt has cached, and blocks of a step that is withdrawn",
        members="block_pool coordinator prefix_cache_lookup_enabled get_blocks evict_blocks watermark_blocks",
    ),
    Door(
        COORDINATOR,
        "what a prompt has cached, without events for listeners (waiting.py)",
        members="find_longest_cache_hit",
    ),
    Door(
        f"{COORDINATOR}.find_longest_cache_hit",
        "called by position",
        parameters="block_hashes max_cache_hit_length",
    ),
    Door(
        KV_BLOCKS,
        "blocks of a request (kv/connector.py, scheduler.py)",
        members="get_block_ids",
    ),
    Door(
        POOL,
        "spare blocks for draft paths; telemetry",
        members="get_new_blocks free_blocks get_num_free_blocks num_gpu_blocks",
    ),
    Door(BLOCK, "the number of a spare block", members="block_id"),
    Door(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        "tells prefixes of different policies apart by cache_salt",
        mentions=("cache_salt",),
    ),
    Door(KV_CONFIG, "number and kinds of KV blocks", members="num_blocks kv_cache_groups"),
    Door(KV_GROUP, "what a kind of KV block is", members="kv_cache_spec"),
    Door(
        KV_SPEC,
        "the one kind that draft paths and the KV pool are for, if it has no limit",
        members="block_size sliding_window attention_chunk_size",
    ),
    # -- model runner V1
    Door(
        RUNNER,
        "KeyedRunner, MultiPathRunner (v1/): sampling, drafting and the rows of draft paths",
        overrides="load_model initialize_kv_cache initialize_metadata_builders execute_model sample_tokens _sample "
        "_prepare_inputs _preprocess _get_slot_mappings _determine_batch_execution_and_padding _prepare_padding_mask "
        "_input_fits_in_drafter take_draft_token_ids use_aux_hidden_state_outputs",
        members="get_model input_batch requests drafter model_config vllm_config device discard_request_mask "
        "attn_groups kv_caches positions input_ids execute_model_state",
    ),
    Door(
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState",
        "hidden states of a step (v1/hidden_states.py)",
        members="scheduler_output hidden_states aux_hidden_states",
    ),
    Door(
        "vllm.model_executor.models.interfaces:supports_eagle3",
        "whether a target hands out inner states (compat.py)",
        parameters="model",
    ),
    Door(
        "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers",
        "has it hand them out (v1/hidden_states.py)",
        parameters="layers",
    ),
    Door(
        f"{RUNNER}.execute_model",
        "keeps them apart from the last states",
        mentions=("hidden_states, aux_hidden_states = model_output",),
    ),
    Door(
        f"{RUNNER}.load_model",
        "hands the proposer the target (v1/proposer.py)",
        mentions=("self.drafter.load_model(self.model)",),
    ),
    Door(f"{RUNNER}._sample", "overridden with them", parameters="logits spec_decode_metadata"),
    Door(
        f"{RUNNER}._bookkeeping_sync",
        "takes no token for requests of the discard mask, which those without a next token join",
        mentions=("self.discard_request_mask.np", "discard_sampled_tokens_req_indices"),
    ),
    Door(f"{RUNNER}._determine_batch_execution_and_padding", "called with keywords", parameters="num_tokens"),
    Door(
        f"{RUNNER}._get_slot_mappings",
        "called with keywords",
        parameters="num_tokens_unpadded num_tokens_padded",
    ),
    Door(
        f"{RUNNER}._prepare_padding_mask",
        "overridden with them",
        parameters="num_tokens_unpadded num_tokens_padded",
    ),
    Door(
        f"{RUNNER}.initialize_kv_cache",
        "shows the connector the caches (kv/connector.py)",
        parameters="kv_cache_config",
        mentions=("register_kv_caches",),
    ),
    Door(
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        "has the connector load before the forward pass",
        mentions=("has_sync_kv_loads", "start_load_kv"),
    ),
    Door(
        BATCH,
        "the requests of a step in their rows",
        members="req_ids req_id_to_index num_reqs num_tokens_no_spec num_computed_tokens_cpu token_ids_cpu "
        "block_table logitsprocs sampling_metadata",
    ),
    Door(
        REQUEST_STATE,
        "what the runner knows of a request",
        members="req_id sampling_params prompt_token_ids output_token_ids block_ids",
    ),
    Door("vllm.v1.worker.block_table:MultiGroupBlockTable", "block tables by kind", members="__getitem__"),
    Door(
        BLOCK_TABLE, "blocks of each request, for the rows of draft paths", members="block_table block_size"
    ),
    Door(BUFFER, "inputs of a step on either side", members="np gpu"),
    Door(ATTENTION_GROUP, "builders that see draft paths as requests", members="metadata_builders"),
    Door(
        ATTENTION_METADATA,
        "requests cut into rows (invariance.py), draft paths as requests (v1/path_runner.py)",
        members="seq_lens query_start_loc query_start_loc_cpu block_table_tensor num_reqs num_actual_tokens "
        "max_query_len max_seq_len causal seq_lens_cpu_upper_bound is_prefilling replace",
    ),
    Door(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        "asked for the implementation of each layer, ours while a model loads (attention.py)",
        overrides="get_impl_cls",
    ),
    Door(
        CPU_ATTENTION,
        "subclassed: attention of a layer, and what it writes into the cache (attention.py)",
        overrides="forward do_kv_cache_update",
        members="attn_type kv_cache_dtype sliding_window logits_soft_cap alibi_slopes sinks "
        "kv_sharing_target_layer_name head_size scale",
    ),
    Door(
        f"{CPU_ATTENTION}.forward",
        "as above",
        parameters="layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    Door(
        f"{CPU_ATTENTION}.do_kv_cache_update",
        "as above",
        parameters="layer key value kv_cache slot_mapping",
        mentions=("(num_blocks, num_kv_heads, block_size * 2, -1)",),
    ),
    Door(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata",
        "the step's, as attention gets it",
        members="num_actual_tokens query_start_loc seq_lens block_table causal",
    ),
    Door(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        "replaced: long queries are cut (invariance.py)",
        overrides="build",
        members="vllm_config layer_names",
    ),
    Door(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "replaced with them",
        parameters="common_prefix_len common_attn_metadata fast_build",
    ),
    Door(
        RUNNER_OUTPUT,
        "what a step decided; carries requests without a next token (runner.py)",
        members="sampled_token_ids req_id_to_index prompt_logprobs_dict prompt_token_id_logprobs_dict",
    ),
    Door(
        "vllm.v1.outputs:DraftTokenIds",
        "FreshDrafts (runner.py): the model drafter's work",
        members="req_ids draft_token_ids",
    ),
    Door(
        "vllm.v1.outputs:SamplerOutput",
        "made by the keyed sampler",
        members="sampled_token_ids logprobs_tensors",
    ),
    Door(
        "vllm.v1.outputs:LogprobsTensors",
        "made by the keyed sampler, in this order",
        members="logprob_token_ids logprobs selected_token_ranks",
    ),
    Door(
        "vllm.config.speculative:SpeculativeConfig",
        "V1 loads v1/proposer.py by its name in `model`; V2 has its own draft model, or one of its methods",
        members="model method max_num_new_slots_for_drafting",
        mentions=("custom_class", "ngram_gpu", "draft_model"),
    ),
    # -- model runner V2
    Door(
        RUNNER_V2,
        "KeyedRunnerV2 (v2/): verification, and drafts where V2 reads them",
        overrides="load_model initialize_kv_cache cudagraph_manager add_requests execute_model prepare_inputs "
        "sample sample_tokens postprocess_sampled take_draft_token_ids speculator rejection_sampler "
        "structured_outputs_worker",
        members="execute_model_state get_model model req_states sampler speculative_config vllm_config device "
        "max_num_reqs max_num_tokens vocab_size decode_query_len "
        "attn_groups model_state fast_prefill kv_caches scheduler_config",
    ),
    Door(
        f"{RUNNER_V2}.initialize_kv_cache",
        "lists the graphs to capture; full ones for ragged steps are its own adaptive verification's",
        mentions=("varlen_decode=self.adaptive_verification is not None",),
    ),
    Door(
        "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker",
        "made for one row a request (v2/buffers.py)",
        members="num_bonus_tokens",
        parameters="max_num_logits vocab_size device mask_stride num_bonus_tokens",
    ),
    Door(
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor",
        "texts in host memory, as where no n-grams are searched on the GPU",
        parameters="size dtype device uva_instead_of_gpu",
    ),
    Door(
        GRAPHS_V2,
        "full graphs for ragged steps (v2/graphs.py)",
        members="cudagraph_mode decode_query_len lora_capture_cases ubatch_runner",
        parameters="vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner",
    ),
    Door(
        "vllm.v1.worker.gpu.attn_utils:get_varlen_cudagraph_unsupported_backend",
        "who cannot replay them",
        parameters="attn_groups vllm_config max_query_len",
    ),
    Door("vllm.v1.attention.backend:AttentionCGSupport", "likewise", members="ALWAYS"),
    Door(
        "vllm.v1.worker.gpu.model_states.interface:ModelState.get_additional_cg_support",
        "asked for attention that is not among `attn_groups`",
    ),
    Door(
        f"{RUNNER_V2}.prepare_inputs",
        "reads draft tokens from the device, when all requests of the step have their rows",
        parameters="scheduler_output",
        mentions=("combine_sampled_and_draft_tokens", "self.req_states.draft_tokens"),
    ),
    Door(
        f"{RUNNER_V2}.add_requests",
        "counts what lies behind `prompt_len` as output",
        parameters="scheduler_output",
        mentions=("new_req_data.prompt_len", "all_token_ids=new_req_data.prefill_token_ids"),
    ),
    Door(
        f"{RUNNER_V2}.sample",
        "takes its sampler without drafts and its verification with drafts",
        mentions=("input_batch.num_draft_tokens == 0", "self.rejection_sampler("),
    ),
    Door(
        f"{RUNNER_V2}.sample_tokens",
        "has the speculator draft; its message is on the way to the host",
        mentions=("self.speculator.propose(", "async_output = AsyncOutput("),
    ),
    Door(
        f"{RUNNER_V2}.postprocess_sampled",
        "hears how many drafts were rejected",
        parameters="idx_mapping sampled_tokens num_sampled num_rejected",
    ),
    Door(
        "vllm.v1.worker.gpu.model_runner:ExecuteModelState",
        "what a step leaves for sampling (v2/hidden_states.py)",
        members="input_batch hidden_states aux_hidden_states",
    ),
    Door(OUTPUT_V2, "requests without a next token (v2/outputs.py)", overrides="get_output"),
    Door(
        f"{OUTPUT_V2}.__init__",
        "its event says whether a step's tokens are on the host",
        mentions=("self.copy_event = torch.cuda.Event(",),
    ),
    Door(
        f"{OUTPUT_V2}.get_output",
        "gives the scheduler lists",
        mentions=("self.model_runner_output.sampled_token_ids = sampled_token_ids",),
    ),
    Door(
        STATES_V2,
        "what V2 keeps of each request",
        members="draft_tokens req_id_to_index total_len prompt_len",
    ),
    Door(
        BATCH_V2,
        "the requests of a step",
        members="req_ids num_reqs idx_mapping idx_mapping_np num_scheduled_tokens query_start_loc_np positions "
        "input_ids",
    ),
    Door(
        SAMPLER_V2,
        "all sampling options; what it drew from (CheckedSampler)",
        overrides="sample",
        members="apply_sampling_params sampling_states",
    ),
    Door(
        f"{SAMPLER_V2}.sample",
        "draws with the seed, and with no other sampler, where a request has one",
        mentions=("self.sampling_states.any_explicit_seed(idx_mapping_np)",),
    ),
    Door(f"{SAMPLER_V2}._sample_random", "draws with it", mentions=("is_drafting=False",)),
    Door(SAMPLING_V2, "key and temperature of each request", members="seeds temperature"),
    Door(
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
        "throws the dice",
        parameters="logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting",
    ),
    Door(
        VERIFIER_V2,
        "ExactVerifier (v2/sampler.py)",
        overrides="_verify",
        members="sampler num_speculative_steps",
    ),
    Door(
        f"{VERIFIER_V2}._verify",
        "replaced with them",
        parameters="logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
        "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
    ),
    Door(BASE_SPECULATOR_V2, "NoSpeculator", overrides="init_cudagraph_manager capture propose"),
    Door(
        SPECULATOR_V2,
        "CoupledSpeculator (v2/speculator.py)",
        overrides="load_model propose sample_draft num_speculative_steps",
        members="compute_draft_logits max_num_reqs device draft_model_config model speculative_config vllm_config",
    ),
    Door(
        f"{SPECULATOR_V2}.sample_draft",
        "replaced with them",
        parameters="hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits "
        "spec_step_idx",
    ),
    Door(MODEL_SPECULATOR_V2, "CoupledModel", overrides="_multi_step_decode"),
    Door(
        f"{MODEL_SPECULATOR_V2}._multi_step_decode",
        "drafts as deep as it is told, and for as many of the first requests",
        parameters="input_batch num_rejected num_reqs",
        mentions=("range(1, self.num_speculative_steps)", "input_batch.idx_mapping\n", "[:num_reqs]"),
    ),
    Door(
        HEAD_SPECULATOR_V2,
        "CoupledHead: levels one by one, so that there may be fewer of them",
        overrides="_configure_decode_metadata_update supports_decode_metadata_update init_cudagraph_manager "
        "prefill_cudagraph_manager",
        members="vllm_config device num_speculative_steps",
    ),
    Door(
        f"{HEAD_SPECULATOR_V2}.propose",
        "drafts as deep as it is told",
        parameters="num_speculative_tokens",
        mentions=("if self.supports_decode_metadata_update\n            else self._multi_step_decode",),
    ),
    Door(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager",
        "CoupledHead: piecewise graphs for the first level",
        parameters="vllm_config device cudagraph_mode decode_query_len",
    ),
    Door("vllm.config:CUDAGraphMode", "likewise", members="PIECEWISE NONE mixed_mode"),
    Door("vllm.config:set_current_vllm_config", "new weights for a drafter", parameters="vllm_config"),
    Door("vllm.v1.worker.gpu.async_utils:stream", "copies beside the step"),
    Door(
        f"{HEAD_SPECULATOR_V2}._prefill",
        "draws with the noise of the position at which the target will draw",
        mentions=("sample_src_positions = positions + 1", "self.sample_draft("),
    ),
    Door(
        "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
        "new weights for a drafter: its layers wait for their own",
    ),
    Door(
        "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
        "those without, which are the target's, get back what they had",
        parameters="args",
    ),
    Door("vllm.v1.worker.gpu.async_utils:async_copy_to_np", "starts a copy to the host"),
    Door("vllm.utils.torch_utils:async_tensor_h2d", "starts a copy to the device", parameters="device"),
    Door("vllm.triton_utils:tl", "the language of a kernel"),
    Door("vllm.triton_utils:triton", "compiles it"),
    Door("vllm.triton_utils:HAS_TRITON", "what V2 needs"),
    # -- the keyed sampler
    Door(
        SAMPLING_METADATA,
        "the sampling options of a batch",
        members="temperature all_greedy top_p top_k max_num_logprobs logprob_token_ids no_penalties prompt_token_ids "
        "frequency_penalties presence_penalties repetition_penalties allowed_token_ids_mask bad_words_token_ids "
        "logitsprocs",
    ),
    Door(DRAFT_METADATA, "the draft tokens of a step", members="draft_token_ids num_draft_tokens"),
    Door("vllm.v1.sample.ops.bad_words:apply_bad_words", "called row by row"),
    Door("vllm.v1.sample.ops.penalties:apply_all_penalties", "called row by row"),
    Door(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch",
        "called row by row",
        parameters="allow_cpu_sync",
    ),
    Door(
        "vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS",
        "all of them are made, under speculation too",
    ),
    Door(
        "vllm.v1.sample.logits_processor:LOGITSPROCS_GROUP",
        "plug-ins of this group would be left out, so an engine with some is refused",
    ),
    Door(PROCESSORS, "made anew for the batch", members="argmax_invariant non_argmax_invariant"),
    Door(f"{BUILTIN}:MinPLogitsProcessor", "its option, row by row", members="min_p min_p_count"),
    Door(
        f"{BUILTIN}:MinTokensLogitsProcessor",
        "its option, row by row",
        members="min_toks neg_inf_tensor _device_tensor _mask_stop_token_logits",
    ),
    Door(f"{BUILTIN}:LogitBiasLogitsProcessor", "its option, row by row", members="biases"),
    Door("vllm.utils.torch_utils:PIN_MEMORY", "what logits processors are made with"),
    Door(
        "vllm.sampling_params:SamplingParams",
        "what exact drafting does not do is refused (compat.py); keys travel in extra_args, on V2 as the seed",
        members="extra_args clone skip_clone seed min_tokens thinking_token_budget logprob_token_ids prompt_logprobs "
        "prompt_logprob_token_ids bad_words bad_words_token_ids update_from_tokenizer",
    ),
    Door("vllm.exceptions:VLLMValidationError", "what is refused, for a server's clients (compat.py)"),
    Door(
        "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_ALLOWED_TOKEN_IDS",
        "V2's room for tokens of a request, which it has to be held to before its worker ends (compat.py)",
    ),
    Door("vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_LOGIT_BIAS_TOKENS", "likewise"),
    Door("vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_STOP_TOKEN_IDS", "likewise"),
    Door(
        "vllm.v1.engine.input_processor:InputProcessor",
        "what speculation forbids and exact drafting does not (compat.py)",
        overrides="_validate_params speculative_config",
        members="vllm_config tokenizer",
        mentions=("self.speculative_config,",),
    ),
    Door(
        "vllm.v1.engine.input_processor:InputProcessor._validate_params",
        "replaced with it",
        parameters="params",
    ),
    Door("vllm.sampling_params:RequestOutputKind", "new tokens alone, step by step", members="DELTA"),
    Door(
        "vllm.sampling_params:StructuredOutputsParams",
        "TRL's regex, and structured outputs given as fields (integrations/trl/generation.py)",
        parameters="regex",
    ),
    # -- the worker, weights and batch invariance
    Door(
        CPU_WORKER,
        "PacelineWorker: weight updates, the compile cache, the runner's exchange",
        overrides="init_device load_model determine_available_memory execute_model reload_weights update_weights "
        "model_runner",
        members="vllm_config is_driver_worker",
    ),
    Door(
        GPU_WORKER,
        "PacelineWorker, on a GPU",
        overrides="init_device load_model determine_available_memory execute_model reload_weights update_weights "
        "model_runner",
        members="vllm_config",
    ),
    Door(
        "vllm.envs",
        "keeps the kernel from splitting contexts over threads; which model runner and which kernels are wanted; "
        "V2's room for bad words",
        mentions=(
            "VLLM_CPU_ATTN_SPLIT_KV",
            "VLLM_USE_V2_MODEL_RUNNER",
            "VLLM_BATCH_INVARIANT",
            "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
        ),
    ),
    Door(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "packs a tied head again; its `cpu_linear` is wrapped (invariance.py), or it is replaced (linear.py)",
        parameters="layer remove_weight",
        mentions=("cpu_linear",),
    ),
    Door(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
        "packs experts at the first load alone; wrapped, so that it does after a reload too (compat.py)",
        mentions=("if not is_weight_update", "fused_experts.process_weights_after_loading(layer)"),
    ),
    Door(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "its method is replaced while weights are reloaded",
        members="_setup_kernel",
    ),
    Door(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        "pads and packs what the layer holds",
        mentions=("cpu_prepack_moe_weight(layer.w13_weight", "cpu_prepack_moe_weight(layer.w2_weight"),
    ),
    Door(
        "vllm.model_executor.layers:utils",
        "its function above, which layers look up when called, is replaced while weights are packed (linear.py)",
        members="dispatch_cpu_unquantized_gemm",
    ),
    Door(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        "packs a layer's weights",
        mentions=("utils import dispatch_cpu_unquantized_gemm", "remove_weight=True"),
    ),
    Door(
        "vllm.model_executor.layers.vocab_parallel_embedding:"
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        "packs the head's weights",
        mentions=("utils import dispatch_cpu_unquantized_gemm", "remove_weight=False"),
    ),
    # -- compiled mode on the CPU
    Door("vllm.config:get_current_vllm_config", "the layers that a model has so far (attention.py)"),
    Door("vllm.config:CompilationMode", "whether code is compiled", members="NONE"),
    Door(
        "vllm.config.compilation:CompilationConfig",
        "whether code is compiled, and for steps of how many tokens",
        members="mode compile_ranges_endpoints compile_mm_encoder static_forward_context",
    ),
    Door(
        "vllm.compilation.caching:aot_compile_hash_factors",
        "asks for the config's key, which is replaced while the model compiles",
        mentions=("vllm_config.compute_hash()",),
    ),
    Door(
        "vllm.compilation.decorators:_try_load_aot_compiled_fn",
        "ends loading with a method that compiled code for the CPU lacks and is given",
        mentions=("compiled_fn.finalize_loading(model.vllm_config)",),
    ),
    Door("torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable", "is given that method"),
    Door(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        "compiles with dynamic threads and sets them by the environment, which torch has read",
        mentions=('"cpp.dynamic_threads": True', '"TORCHINDUCTOR_CPP_DYNAMIC_THREADS"'),
    ),
    Door("torch._inductor.config:cpp", "set to the same", members="dynamic_threads"),
    Door("torch._C:set_num_threads", "leaves a core to the draft worker; vLLM makes torch's own do nothing"),
    # -- the KV pool's connector
    Door(
        CONNECTOR,
        "PoolConnector",
        overrides="requires_kv_delivery register_kv_caches start_load_kv wait_for_layer_load save_kv_layer "
        "wait_for_save on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
        "reset_cache shutdown",
        members="role _get_connector_metadata",
    ),
    Door(f"{CONNECTOR}.__init__", "called with keywords", parameters="vllm_config role kv_cache_config"),
    Door(
        f"{CONNECTOR}.get_num_new_matched_tokens",
        "overridden with them",
        parameters="request num_computed_tokens",
    ),
    Door(
        f"{CONNECTOR}.update_state_after_alloc",
        "overridden with them",
        parameters="request blocks num_external_tokens",
    ),
    Door(
        f"{CONNECTOR_BASE}:SupportsHMA",
        "PoolConnector: the end of a response, of which vLLM tells connectors of this kind alone",
        overrides="request_finished_all_groups",
    ),
    Door(
        f"{CONNECTOR_BASE}:SupportsHMA.request_finished_all_groups",
        "overridden with them",
        parameters="request block_ids",
    ),
    Door(f"{CONNECTOR_BASE}:KVConnectorMetadata", "Loads: what the worker has to fill"),
    Door(f"{CONNECTOR_BASE}:KVConnectorRole", "which end it is", members="SCHEDULER WORKER"),
    Door(f"{TRANSFER}:get_kv_transfer_group", "the worker's end in this process"),
    Door(f"{TRANSFER}:has_kv_transfer_group", "whether there is one"),
    Door(
        f"{TRANSFER}.kv_transfer_state:ensure_kv_transfer_initialized",
        "makes the worker's end once per process",
        mentions=("_KV_CONNECTOR_AGENT", "KVConnectorRole.WORKER"),
    ),
    Door(
        f"{TRANSFER}.kv_connector.factory",
        "knows the connectors for clusters (kv/backend.py)",
        mentions=("LMCacheMPConnector", "MooncakeStoreConnector"),
    ),
    Door(
        "vllm.config.kv_transfer:KVTransferConfig",
        "names the connector",
        members="kv_connector kv_role kv_connector_module_path",
    ),
    # -- how an engine is started and driven
    Door("vllm.platforms:current_platform", "CPU or not", members="is_cpu"),
    Door(
        ARGUMENTS,
        "Paceline's arguments (arguments.py); PACELINE=1 fills them in (plugin.py)",
        overrides="create_engine_config",
        members="scheduler_cls worker_cls speculative_config additional_config async_scheduling enforce_eager "
        "logprobs_mode kv_cache_memory_bytes kv_transfer_config max_num_seqs max_num_batched_tokens block_size "
        "cudagraph_capture_sizes max_cudagraph_capture_size compilation_config enable_lora runner create_model_config",
    ),
    Door(
        CONFIG,
        "carries Paceline's settings to every process; says what the engine is",
        overrides="compute_hash",
        members="additional_config model_config scheduler_config parallel_config cache_config device_config "
        "lora_config compilation_config speculative_config kv_transfer_config watermark_config use_v2_model_runner",
    ),
    Door(
        "vllm.config.parallel:ParallelConfig",
        "engines of several workers; the seed of a data-parallel engine",
        members="data_parallel_index data_parallel_size pipeline_parallel_size world_size distributed_executor_backend "
        "decode_context_parallel_size "
        "enable_batch_sharded_sampling",
    ),
    Door(
        MODEL_CONFIG,
        "the target: what it is, and what it may not be",
        members="model dtype seed revision quantization hf_config max_model_len logprobs_mode get_vocab_size "
        "get_hidden_size get_total_num_hidden_layers use_mla "
        "enable_prompt_embeds is_multimodal_model is_encoder_decoder uses_mrope use_fp64_gumbel enable_trace_replay",
    ),
    Door(
        "vllm.config.cache:CacheConfig",
        "what a KV block holds",
        members="cache_dtype kv_sharing_fast_prefill",
    ),
    Door("vllm.config.device:DeviceConfig", "where the model is", members="device device_type"),
    Door(
        ENGINE,
        "RolloutEngine",
        members="from_engine_args add_request abort_request collective_rpc reset_prefix_cache engine_core "
        "output_processor model_config vllm_config model_executor",
    ),
    Door(
        "vllm.v1.engine.exceptions:EngineDeadError", "an engine whose process has ended (rollout_engine.py)"
    ),
    Door(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "whether a worker's process has ended (rollout_engine.py)",
        members="is_failed",
    ),
    Door(EXECUTOR, "the runner, to time it on a GPU (commands/doctor/gpu_parts.py)", members="driver_worker"),
    Door(WORKER_WRAPPER, "the same", members="worker"),
    Door(f"{ENGINE}.abort_request", "by vLLM's own ids", parameters="request_ids internal"),
    Door(
        CLIENT,
        "steps are read from it as token ids (token_outputs.py)",
        members="engine_core shutdown get_output abort_requests",
    ),
    Door(CORE, "the scheduler in the same process", members="scheduler"),
    Door(CORE_OUTPUTS, "what a step brought", members="outputs"),
    Door(
        CORE_OUTPUT,
        "what it brought to a request",
        members="request_id new_token_ids new_logprobs finish_reason",
    ),
    Door("vllm.v1.outputs:LogprobsLists", "log-probabilities, the sampled token's first", members="logprobs"),
    Door(
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        "reads that order too",
        mentions=("# Sampler puts the sampled logprob in first.",),
    ),
    Door(
        OUTPUT_PROCESSOR,
        "looks for stop texts alone, and forgets the other requests",
        members="process_outputs abort_requests",
    ),
    Door(f"{OUTPUT_PROCESSOR}.process_outputs", "called", parameters="engine_core_outputs"),
    Door(f"{OUTPUT_PROCESSOR}.abort_requests", "called", parameters="request_ids internal"),
    Door(
        f"{OUTPUT_PROCESSOR}._trim_surplus_tokens",
        "cuts tokens behind a stop text in place",
        mentions=("del output.new_token_ids[num_kept:]", "output.new_logprobs ="),
    ),
    Door(
        "vllm.v1.engine.output_processor:OutputProcessorOutput",
        "where a stop text was found",
        members="request_outputs reqs_to_abort",
    ),
    Door(
        "vllm.v1.engine:FinishReason",
        "how a response ended (rollout_engine.py)",
        members="STOP LENGTH ABORT ERROR REPETITION",
    ),
)


@dataclass(frozen=True, slots=True)
class DoorCheck:
    """What was found behind one door."""

    door: Door
    problem: str | None
    """What is wrong; None when the door fits."""

    @property
    def name(self) -> str:
        return self.door.target

    @property
    def ok(self) -> bool:
        return self.problem is None


def check_doors(doors: tuple[Door, ...] = DOORS) -> list[DoorCheck]:
    """Look behind every door. Never raises; imports vLLM."""
    return [DoorCheck(door, _problem(door)) for door in doors]


def _problem(door: Door) -> str | None:
    module, _, path = door.target.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        return f"module {module} cannot be imported ({type(error).__name__}: {error})"
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            return f"{module} has no {path}"
        found = getattr(found, part)
    for parameter in door.parameters.split():
        if parameter not in inspect.signature(found).parameters:
            return f"{path} takes no parameter {parameter}"
    for member in [*door.overrides.split(), *door.members.split()]:
        if not has_member(found, member):
            return f"{path} has no {member}"
    for word in door.mentions:
        if word not in inspect.getsource(found):
            return f"{path or module} no longer knows {word}"
    return None


def has_member(found: Any, name: str) -> bool:
    """Whether an object has an attribute, a dataclass field, or sets it on `self` in its own or a base's source."""
    if hasattr(found, name):
        return True
    if not inspect.isclass(found):
        return False
    if dataclasses.is_dataclass(found) and name in {field.name for field in dataclasses.fields(found)}:
        return True
    return any(_declares(base, name) for base in found.__mro__[:-1])


def _declares(owner: type, name: str) -> bool:
    if name in inspect.get_annotations(owner):
        return True
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        return False
    return any(f"self.{name}{end}" in source for end in (" =", ": ", ",", ")"))

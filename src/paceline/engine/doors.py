"""The doors: every private name of vLLM that the engine relies on, and whether it is still there.

Invariant: what an `engine/` module imports from vLLM, overrides in it or reads of it stands in `DOORS` (the contract
tests compare). Imports vLLM inside `check_doors` alone, and never `compat`, which cannot be imported when a door has
moved. Callers: `paceline doctor`, tests/contracts/test_vllm_doors.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

CORE = "vllm.v1.core.sched.scheduler:Scheduler"
REQUEST = "vllm.v1.request:Request"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
BUILTIN = "vllm.v1.sample.logits_processor.builtin"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

CONNECTOR_METHODS = (
    "role",
    "requires_kv_delivery",
    "register_kv_caches",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "reset_cache",
    "shutdown",
    "_get_connector_metadata",
)
"""Methods of vLLM's KV connector that ours overrides or calls."""


@dataclass(frozen=True, slots=True)
class Door:
    """A name of vLLM and what must be true of it."""

    target: str
    """"module:name", the name with dots below a class."""
    parameters: tuple[str, ...] = ()
    """Parameters that a function must take."""
    members: tuple[str, ...] = ()
    """Attributes, methods or fields that a class must have."""
    mentions: tuple[str, ...] = ()
    """Words that its source must contain, where nothing else can be asked."""


DOORS: tuple[Door, ...] = (
    # what the scheduler subclass overrides and reads
    Door(
        CORE,
        members=(
            "schedule",
            "add_request",
            "_free_request",
            "_preempt_request",
            "reset_prefix_cache",
            "shutdown",
            "update_draft_token_ids",
            "update_from_output",
            "_update_request_with_output",
            "running",
            "waiting",
            "num_spec_tokens",
            "dynamic_sd_lookup",
            "max_model_len",
            "max_num_scheduled_tokens",
            "adaptive_long_prefill_threshold",
            "get_request_counts",
            "scheduler_config",
            "kv_cache_manager",
            "block_size",
            "requests",
            "grammar_compile_error_reqs",
            "connector",
        ),
    ),
    Door(f"{CORE}._update_request_with_output", parameters=("request", "new_token_ids")),
    Door(f"{CORE}.update_from_output", parameters=("scheduler_output", "model_runner_output")),
    Door(f"{CORE}.schedule", mentions=("spec_token_ids", "dynamic_sd_lookup")),
    Door(
        REQUEST,
        members=(
            "request_id",
            "sampling_params",
            "prompt_token_ids",
            "spec_token_ids",
            "num_tokens",
            "num_computed_tokens",
            "num_output_tokens",
            "num_output_placeholders",
            "is_prefill_chunk",
            "max_tokens",
            "use_structured_output",
            "status",
            "all_token_ids",
            "num_prompt_tokens",
            "num_in_flight_tokens",
            "resumable",
            "lora_request",
            "mm_features",
            "cache_salt",
        ),
    ),
    Door(
        "vllm.v1.core.sched.output:SchedulerOutput",
        members=(
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
        ),
    ),
    Door("vllm.v1.outputs:ModelRunnerOutput", members=("sampled_token_ids", "req_id_to_index")),
    Door("vllm.v1.outputs:DraftTokenIds", members=("req_ids", "draft_token_ids")),
    Door("vllm.v1.outputs:LogprobsTensors"),
    Door("vllm.v1.outputs:SamplerOutput"),
    # what the runner subclass overrides and reads
    Door(
        RUNNER,
        members=(
            "_sample",
            "load_model",
            "execute_model",
            "sample_tokens",
            "discard_request_mask",
            "take_draft_token_ids",
            "get_model",
            "input_batch",
            "requests",
            "drafter",
            "model_config",
            "vllm_config",
            "device",
            "initialize_kv_cache",
            "initialize_metadata_builders",
            "_prepare_inputs",
            "_determine_batch_execution_and_padding",
            "_get_slot_mappings",
            "_preprocess",
            "_prepare_padding_mask",
            "attn_groups",
            "kv_caches",
            "positions",
            "input_ids",
        ),
    ),
    Door(f"{RUNNER}._sample", parameters=("logits", "spec_decode_metadata")),
    Door(
        f"{RUNNER}._bookkeeping_sync",
        mentions=("self.discard_request_mask.np", "discard_sampled_tokens_req_indices"),
    ),
    Door(
        BATCH,
        members=(
            "num_tokens_no_spec",
            "token_ids_cpu",
            "req_ids",
            "num_reqs",
            "logitsprocs",
            "sampling_metadata",
            "block_table",
            "num_computed_tokens_cpu",
            "req_id_to_index",
        ),
    ),
    Door(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        members=("sampling_params", "prompt_token_ids", "output_token_ids"),
    ),
    Door(
        CPU_WORKER,
        members=(
            "init_device",
            "load_model",
            "determine_available_memory",
            "execute_model",
            "reload_weights",
            "model_runner",
            "update_weights",
        ),
    ),
    Door(
        GPU_WORKER,
        members=(
            "init_device",
            "load_model",
            "execute_model",
            "reload_weights",
            "model_runner",
            "update_weights",
        ),
    ),
    Door("vllm.config.speculative:SpeculativeConfig", mentions=("custom_class",)),
    # what the keyed sampler calls
    Door(
        "vllm.v1.sample.metadata:SamplingMetadata",
        members=(
            "temperature",
            "all_greedy",
            "top_p",
            "top_k",
            "max_num_logprobs",
            "logprob_token_ids",
            "no_penalties",
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
        ),
    ),
    Door("vllm.v1.spec_decode.metadata:SpecDecodeMetadata", members=("draft_token_ids", "num_draft_tokens")),
    Door("vllm.v1.sample.ops.bad_words:apply_bad_words"),
    Door("vllm.v1.sample.ops.penalties:apply_all_penalties"),
    Door("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch", parameters=("allow_cpu_sync",)),
    Door("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS"),
    Door(
        "vllm.v1.sample.logits_processor:LogitsProcessors",
        members=("argmax_invariant", "non_argmax_invariant"),
    ),
    Door(f"{BUILTIN}:MinPLogitsProcessor", members=("min_p", "min_p_count")),
    Door(
        f"{BUILTIN}:MinTokensLogitsProcessor",
        members=("min_toks", "neg_inf_tensor", "_device_tensor", "_mask_stop_token_logits"),
    ),
    Door(f"{BUILTIN}:LogitBiasLogitsProcessor", members=("biases",)),
    Door(
        "vllm.sampling_params:SamplingParams",
        members=("_validate_spec_decode", "extra_args", "clone", "thinking_token_budget"),
    ),
    Door("vllm.sampling_params:RequestOutputKind", members=("DELTA",)),
    # batch invariance and weight updates on the CPU
    Door(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        parameters=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Door(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        members=(
            "seq_lens",
            "query_start_loc",
            "query_start_loc_cpu",
            "block_table_tensor",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "causal",
            "seq_lens_cpu_upper_bound",
            "is_prefilling",
            "replace",
        ),
    ),
    # several draft paths per request
    Door("vllm.v1.core.kv_cache_manager:KVCacheManager", members=("block_pool",)),
    Door(
        "vllm.v1.core.block_pool:BlockPool",
        members=("get_new_blocks", "free_blocks", "get_num_free_blocks", "num_gpu_blocks"),
    ),
    Door("vllm.v1.worker.block_table:BlockTable", members=("block_table", "block_size")),
    Door(f"{RUNNER}._determine_batch_execution_and_padding", parameters=("num_tokens",)),
    Door(
        f"{RUNNER}._get_slot_mappings",
        parameters=("num_tokens_unpadded", "num_tokens_padded"),
    ),
    Door(
        f"{RUNNER}._prepare_padding_mask",
        parameters=("num_tokens_unpadded", "num_tokens_padded"),
    ),
    Door("vllm.v1.kv_cache_interface:FullAttentionSpec", members=("block_size",)),
    Door("vllm.v1.core.sched.output:NewRequestData", members=("block_ids", "num_computed_tokens")),
    Door(
        "vllm.v1.core.sched.output:CachedRequestData",
        members=("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    # the KV pool: the connector that vLLM builds, and when it calls it
    Door(
        "vllm.config.kv_transfer:KVTransferConfig",
        members=("kv_connector", "kv_role", "kv_connector_module_path"),
    ),
    Door(CONNECTOR, members=CONNECTOR_METHODS),
    Door(f"{CONNECTOR}.__init__", parameters=("vllm_config", "role", "kv_cache_config")),
    Door(f"{CONNECTOR}.get_num_new_matched_tokens", parameters=("request", "num_computed_tokens")),
    Door(f"{CONNECTOR}.update_state_after_alloc", parameters=("request", "blocks", "num_external_tokens")),
    Door("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata"),
    Door(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole", members=("SCHEDULER", "WORKER")
    ),
    Door(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups",
        parameters=("request", "block_ids"),
    ),
    Door("vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA"),
    Door("vllm.distributed.kv_transfer:get_kv_transfer_group"),
    Door("vllm.distributed.kv_transfer:has_kv_transfer_group"),
    Door(
        "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
        mentions=("_KV_CONNECTOR_AGENT", "KVConnectorRole.WORKER"),
    ),
    Door(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        mentions=("LMCacheMPConnector", "MooncakeStoreConnector"),
    ),
    Door("vllm.v1.request:RequestStatus", members=("FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")),
    Door("vllm.v1.core.kv_cache_manager:KVCacheBlocks", members=("get_block_ids",)),
    Door(
        f"{CORE}._connector_finished",
        mentions=("request_finished_all_groups", "get_block_ids_for_computed_tokens"),
    ),
    Door(f"{RUNNER}.initialize_kv_cache", mentions=("register_kv_caches",)),
    Door(
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        mentions=("has_sync_kv_loads", "start_load_kv"),
    ),
    Door("vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys", mentions=("cache_salt",)),
    Door("vllm.envs", mentions=("VLLM_CPU_ATTN_SPLIT_KV",)),
    Door(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        parameters=("layer", "remove_weight"),
        mentions=("cpu_linear",),
    ),
    # how an engine is started and driven
    Door(
        ARGUMENTS,
        members=(
            "create_engine_config",
            "scheduler_cls",
            "worker_cls",
            "speculative_config",
            "additional_config",
            "async_scheduling",
            "logprobs_mode",
            "kv_cache_memory_bytes",
            "kv_transfer_config",
        ),
    ),
    Door(
        "vllm.config.vllm:VllmConfig",
        members=(
            "use_v2_model_runner",
            "additional_config",
            "compilation_config",
            "model_config",
            "compute_hash",
        ),
    ),
    Door(
        "vllm.config.parallel:ParallelConfig",
        members=(
            "data_parallel_index",
            "pipeline_parallel_size",
            "world_size",
            "decode_context_parallel_size",
        ),
    ),
    Door(
        "vllm.config.model:ModelConfig",
        members=(
            "seed",
            "enable_prompt_embeds",
            "model",
            "max_model_len",
            "quantization",
            "use_mla",
            "hf_config",
        ),
    ),
    # compiled mode on the CPU
    Door("vllm.config:CompilationMode", members=("NONE",)),
    Door("vllm.compilation.caching:aot_compile_hash_factors", mentions=("vllm_config.compute_hash()",)),
    Door(
        "vllm.compilation.decorators:_try_load_aot_compiled_fn",
        mentions=("compiled_fn.finalize_loading(model.vllm_config)",),
    ),
    Door("torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable"),
    Door(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        mentions=('"cpp.dynamic_threads": True', '"TORCHINDUCTOR_CPP_DYNAMIC_THREADS"'),
    ),
    Door("torch._inductor.config:cpp", members=("dynamic_threads",)),
    Door(
        ENGINE,
        members=(
            "from_engine_args",
            "add_request",
            "abort_request",
            "collective_rpc",
            "reset_prefix_cache",
            "engine_core",
            "output_processor",
        ),
    ),
    Door(f"{ENGINE}.abort_request", parameters=("request_ids", "internal")),
    Door(
        "vllm.v1.engine.core_client:InprocClient",
        members=("engine_core", "shutdown", "get_output", "abort_requests"),
    ),
    # what is read of a step without vLLM's output processor, and with it where stop texts are looked for
    Door("vllm.v1.engine:EngineCoreOutputs", members=("outputs",)),
    Door(
        "vllm.v1.engine:EngineCoreOutput",
        members=("request_id", "new_token_ids", "new_logprobs", "finish_reason"),
    ),
    Door("vllm.v1.outputs:LogprobsLists", members=("logprobs",)),
    Door(
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        mentions=("# Sampler puts the sampled logprob in first.",),
    ),
    Door(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs", parameters=("engine_core_outputs",)
    ),
    Door(
        "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
        parameters=("request_ids", "internal"),
    ),
    Door(
        "vllm.v1.engine.output_processor:OutputProcessor._trim_surplus_tokens",
        mentions=("del output.new_token_ids[num_kept:]", "output.new_logprobs ="),
    ),
    Door(
        "vllm.v1.engine.output_processor:OutputProcessorOutput", members=("request_outputs", "reqs_to_abort")
    ),
    Door("vllm.v1.engine:FinishReason", members=("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION")),
    Door("vllm.v1.engine.core:EngineCore", members=("scheduler",)),
    Door("vllm.platforms:current_platform", members=("is_cpu",)),
    Door("vllm.utils.torch_utils:PIN_MEMORY"),
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
    for parameter in door.parameters:
        if parameter not in inspect.signature(found).parameters:
            return f"{path} takes no parameter {parameter}"
    for member in door.members:
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

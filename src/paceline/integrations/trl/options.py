"""What becomes of each option of TRL's configurations: honoured, left to the trainer, or refused. None is ignored.

TRL starts an engine of its own from some of its options; with `engine=` there is one already, so those would do
nothing. Called before anything is built, by trainers.py and by recipes. tests/contracts/test_trl_doors.py fails when
TRL or vLLM adds an option that is in no table here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from paceline.errors import ConfigError

HONOURED = frozenset(
    [
        "use_vllm",
        "vllm_mode",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "max_completion_length",
        "vllm_structured_outputs_regex",
    ]
)
"""Options that generation.py acts on."""

TRAINERS = frozenset(
    [
        "model_init_kwargs",
        "router_aux_loss_coef",
        "disable_dropout",
        "cast_lm_head_to_fp32",
        "num_generations",
        "num_generations_eval",
        "shuffle_dataset",
        "trust_remote_code",
        "pad_to_multiple_of",
        "generation_batch_size",
        "steps_per_generation",
        "chat_template_kwargs",
        "beta",
        "num_iterations",
        "epsilon",
        "delta",
        "epsilon_high",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
        "importance_sampling_level",
        "reward_weights",
        "multi_objective_aggregation",
        "scale_rewards",
        "loss_type",
        "mask_truncated_completions",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "top_entropy_quantile",
        "entropy_coef",
        "use_adaptive_entropy",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "entropy_target",
        "max_tool_calling_iterations",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "off_policy_mask_threshold",
        "use_bias_correction_kl",
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
        "normalize_advantages",
        "reward_clip_range",
    ]
)
"""Options that TRL's trainer acts on by itself, whatever generates."""

ENGINES = {
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len",
    "vllm_model_impl": "model_impl",
}
"""Options of an engine that TRL would start, and the argument that a RolloutEngine has for each."""

_SERVER = "there is no vLLM server: the engine runs in this process"
_TRANSFORMERS = "transformers does not generate here: the engine does"
REFUSED = {
    "vllm_enable_sleep_mode": "the engine keeps its weights while TRL trains: lower its gpu_memory_utilization, or "
    "its kv_cache_bytes on a CPU, to leave memory for training",
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_group_port": _SERVER,
    "ds3_gather_for_generation": _TRANSFORMERS,
    "cache_implementation": _TRANSFORMERS,
    "use_transformers_continuous_batching": _TRANSFORMERS,
    "transformers_continuous_batching_config": _TRANSFORMERS,
    "use_transformers_paged": _TRANSFORMERS,
}
"""Options that cannot be had, and why."""

SAMPLING = frozenset(
    [
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "skip_special_tokens",
        "bad_words",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "structured_outputs",
        "logit_bias",
        "allowed_token_ids",
        "extra_args",
        "skip_reading_prefix_cache",
        "repetition_detection",
    ]
)
"""Sampling options that `generation_kwargs` may hold."""

_NOT_RETURNED = "TRL asks for the sampled token's log-probability alone, nothing else would come back"
_TOKENS_ONLY = "TRL reads token ids, once a response is complete"
NOT_SAMPLING = {
    "n": "TRL repeats each prompt num_generations times by itself",
    "seed": "the dice keys of all responses derive from run_seed, set that",
    "logprobs": _NOT_RETURNED,
    "prompt_logprobs": _NOT_RETURNED,
    "prompt_logprob_token_ids": _NOT_RETURNED,
    "prompt_logprob_start": _NOT_RETURNED,
    "logprob_token_ids": _NOT_RETURNED,
    "flat_logprobs": _NOT_RETURNED,
    "routed_experts_prompt_start": _NOT_RETURNED,
    "detokenize": _TOKENS_ONLY,
    "output_kind": _TOKENS_ONLY,
    "stream_interval": _TOKENS_ONLY,
    "output_text_buffer_length": _TOKENS_ONLY,
    "skip_clone": _TOKENS_ONLY,
    "watermarking": "tokens are drawn by their dice keys, a watermark would draw others",
    "thinking_token_budget": "tokens would depend on more than weights, prefix and key",
    "trace_decode_token_ids": "tokens are drawn by their dice keys, not replayed",
}
"""Sampling options that it may not, and why."""


def check_options(config: Any) -> None:
    """Raise ConfigError for an option of a GRPOConfig or RLOOConfig that would do nothing."""
    kind = type(config).__name__
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value == default:
            continue
        if (argument := ENGINES.get(field.name)) is not None:
            raise ConfigError(
                f"{field.name}={value!r} in {kind}: TRL starts no engine here; give the engine {argument}={value!r} "
                f"(RolloutEngine(..., {argument}=...), in a recipe capacity.vllm) and leave {field.name} away"
            )
        if (why := REFUSED.get(field.name)) is not None:
            raise ConfigError(f"{field.name}={value!r} in {kind}: {why}; leave it away")
    check_generation(config.generation_kwargs or {})


def check_generation(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of `generation_kwargs` that rollouts cannot honour."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"generation_kwargs = {options!r}: it must map vLLM's sampling options to values")
    for name, value in options.items():
        if name in SAMPLING or (name == "n" and value == 1) or (name == "logprobs" and not value):
            continue
        why = NOT_SAMPLING.get(name, "vLLM's SamplingParams has no such option")
        raise ConfigError(f"generation_kwargs[{name!r}] = {value!r}: {why}; leave it away")
    reserved = [name for name in options.get("extra_args") or {} if name.startswith("paceline_")]
    if reserved:
        raise ConfigError(
            f"generation_kwargs['extra_args'] has {', '.join(reserved)}: keys and groups of responses are set by the "
            "trainer from run_seed, step and prompt; leave them away"
        )

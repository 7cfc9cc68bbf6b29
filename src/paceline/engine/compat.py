"""Imports from below `vllm.v1`, behind the version gate, and the changes that Paceline makes to vLLM's own functions.

doors.py lists every name of vLLM that the package relies on; the contract tests (tests/contracts/test_vllm_doors.py)
fail when one has moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

from paceline.engine.installed import require_vllm
from paceline.engine.keys import check_options
from paceline.errors import RequestError, UnsupportedError

require_vllm()

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.torch_utils import PIN_MEMORY  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.request_queue import PriorityRequestQueue  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutputs  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors  # noqa: E402
from vllm.v1.sample.logits_processor.builtin import (  # noqa: E402
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops.bad_words import apply_bad_words  # noqa: E402
from vllm.v1.sample.ops.penalties import apply_all_penalties  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "AsyncScheduler",
    "DraftTokenIds",
    "EngineCoreOutputs",
    "FullAttentionSpec",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "LogitBiasLogitsProcessor",
    "LogitsProcessors",
    "LogprobsTensors",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "ModelRunnerOutput",
    "PauseState",
    "PriorityRequestQueue",
    "Request",
    "RequestStatus",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
    "SpecDecodeMetadata",
    "SupportsHMA",
    "apply_all_penalties",
    "apply_bad_words",
    "apply_top_k_top_p_pytorch",
    "cpu_attention",
    "cpu_attention_builder",
    "current_platform",
    "engine_args_class",
    "is_cpu",
    "platform_worker",
    "shows_inner_states",
    "uses_v2",
    "worker_connector",
]


def is_cpu() -> bool:
    """Whether vLLM runs on its CPU backend here."""
    return bool(current_platform.is_cpu())


def platform_worker() -> type[Any]:
    """The worker class that vLLM itself would use on this platform."""
    if is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return cast(type[Any], CPUWorker)
    from vllm.v1.worker.gpu_worker import Worker

    return cast(type[Any], Worker)


def cpu_attention() -> tuple[Any, Any]:
    """The CPU backend's attention, and its implementation of a layer."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    return CPUAttentionBackend, CPUAttentionBackendImpl


def cpu_attention_builder() -> type[Any]:
    """The class that turns the common attention metadata of a step into the CPU kernel's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    return cast(type[Any], CPUAttentionMetadataBuilder)


def shows_inner_states(model: Any) -> bool:
    """Whether a loaded model can hand out the inputs of its layers, as vLLM's own EAGLE-3 drafts need them."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def worker_connector() -> Any:
    """The KV connector of the worker that lives in this process; None if there is none."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def repack_tied_head(model: Any) -> bool:
    """Pack the output head of a tied-embedding model again from the embedding's present weights.

    vLLM's CPU backend packs linear weights for its kernels when a model is loaded; `reload_weights` renews the packed
    copy of every layer but that of a tied head. Returns whether there was one.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is None or not getattr(model.config, "tie_word_embeddings", False) or not is_cpu():
        return False
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return True


@contextmanager
def repacking_experts() -> Iterator[None]:
    """While weights are reloaded on the CPU: pack fused experts again, which vLLM does at the first load alone."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_anew(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        set_up(self, layer, *args, **kwargs)
        if is_update and is_cpu():
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_anew
    try:
        yield
    finally:
        UnquantizedFusedMoEMethod._setup_kernel = set_up


def uses_v2() -> bool:
    """Whether vLLM takes its model runner V2 for the next engine: on GPUs, unless the environment says otherwise."""
    import vllm.envs
    from vllm.triton_utils import HAS_TRITON

    wanted = vllm.envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(HAS_TRITON if wanted is None else wanted)


def is_batch_invariant_gpu() -> bool:
    """Whether vLLM's batch-invariant kernels are asked for, which it has on GPUs."""
    import vllm.envs

    return bool(vllm.envs.VLLM_BATCH_INVARIANT) and not is_cpu()


MOST_ENDS = 8
"""Tokens that end a response by the model's own configuration, and come to those of the request: at most so many."""


class RefusedRequest(RequestError, VLLMValidationError):  # type: ignore[misc]
    """A RequestError that clients of vLLM's server hear of too: it tells them the words of vLLM's own errors alone."""


class RefusedOption(UnsupportedError, VLLMValidationError):  # type: ignore[misc]
    """An UnsupportedError that they hear of too."""


def allow_exact_options() -> None:
    """Let requests to Paceline's engines use min-p and logit bias, which vLLM refuses under speculation.

    vLLM refuses them because its rejection sampler would need them in the drafter's distribution too; ours needs no
    such distribution. What ours does not know is refused. Requests to any other engine are checked as before.
    Idempotent.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    check = InputProcessor._validate_params
    if getattr(check, "_paceline", False):
        return

    def validate(self: Any, params: Any, *args: Any) -> Any:
        if isinstance(params, SamplingParams) and "paceline" in (self.vllm_config.additional_config or {}):
            try:
                _check_exact(params, self.vllm_config, self.tokenizer)
            except RequestError as error:
                raise RefusedRequest(str(error)) from error
            except UnsupportedError as error:
                raise RefusedOption(str(error)) from error
            self.speculative_config = None  # what vLLM's check goes by, and nothing else here
        return check(self, params, *args)

    validate._paceline = True  # type: ignore[attr-defined]
    InputProcessor._validate_params = validate


def _check_exact(params: SamplingParams, vllm_config: Any, tokenizer: Any = None) -> None:
    """Raise RequestError or UnsupportedError for what exact drafting cannot do. tokenizer: the engine's."""
    check_options(params)
    unsupported = {"thinking_token_budget": "leave it unset, or bound the response by max_tokens"}
    if vllm_config.use_v2_model_runner:
        unsupported["logprob_token_ids"] = (
            "model runner V2 does not return them under speculation; ask for logprobs"
        )
        if (params.extra_args or {}).get("paceline_generated"):
            whole = "score the prompt in a request that is not resumed"
            unsupported |= {"prompt_logprobs": whole, "prompt_logprob_token_ids": whole}
        _check_tables(params)
        if params.bad_words and tokenizer is not None:
            _check_bad_words(params, tokenizer)
    for name, remedy in unsupported.items():
        if (value := getattr(params, name)) is not None:
            raise UnsupportedError(f"{name}={value} is not supported under exact drafting: {remedy}")


def _check_tables(params: SamplingParams) -> None:
    """Raise UnsupportedError for more than V2 has room for, which would end its worker."""
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    rooms = {"allowed_token_ids": MAX_NUM_ALLOWED_TOKEN_IDS, "logit_bias": MAX_NUM_LOGIT_BIAS_TOKENS}
    if params.min_tokens:
        rooms["stop_token_ids"] = MAX_NUM_STOP_TOKEN_IDS - MOST_ENDS
    for name, room in rooms.items():
        if (count := len(getattr(params, name) or ())) > room:
            raise UnsupportedError(
                f"{name} has {count} tokens, and model runner V2 has room for {room} of a request: give fewer"
            )


def _check_bad_words(params: SamplingParams, tokenizer: Any) -> None:
    """Raise UnsupportedError for bad words of more tokens than V2 has room for; too many words vLLM refuses itself."""
    import vllm.envs

    encoded = copy(params)  # the caller's stay as they are
    encoded.update_from_tokenizer(tokenizer)
    room = vllm.envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    count = sum(map(len, encoded.bad_words_token_ids or ()))
    if count > room:
        raise UnsupportedError(
            f"bad_words has {count} tokens in all, and model runner V2 has room for {room} of a request: give fewer, "
            "or set VLLM_MAX_BAD_WORDS_TOTAL_TOKENS in the environment before the engine starts"
        )


def all_logits_processors(vllm_config: Any, device: Any) -> LogitsProcessors:
    """vLLM's built-in logits processors, min-p and logit bias included although speculation is on."""
    return LogitsProcessors(make(vllm_config, device, PIN_MEMORY) for make in BUILTIN_LOGITS_PROCESSORS)


def engine_args_class() -> type[Any]:
    """vLLM's EngineArgs, whose `create_engine_config` every way to start an engine goes through."""
    from vllm.engine.arg_utils import EngineArgs

    return cast(type[Any], EngineArgs)

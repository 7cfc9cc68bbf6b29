"""Engine arguments: how Paceline's settings reach vLLM, and how the engine's processes read them back.

`engine_arguments()` is what a vLLM user passes: `LLM(model, **engine_arguments())`. The settings travel in
`additional_config["paceline"]`, a plain dict that vLLM carries to every process of the engine.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config import MTP, EngineSettings, describe
from paceline.engine.compiled import check_compiler
from paceline.errors import ConfigError, UnsupportedError
from paceline.planning.captures import LARGEST, captures_for

SCHEDULER = "paceline.engine.scheduler.PacelineScheduler"
WORKER = "paceline.engine.worker.PacelineWorker"
PROPOSER = "paceline.engine.v1.proposer.Proposer"


def engine_arguments(settings: EngineSettings | None = None, **fields: Any) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`, `EngineArgs` or `AsyncEngineArgs` that switch Paceline on.

    Args:
        settings: the settings; or give single fields of EngineSettings as keywords.

    Raises ConfigError for an unknown field or a value out of range, InstallError for a KV pool's backend that is not
    installed.
    """
    if settings is None:
        settings = parse_settings(fields)
    elif fields:
        raise ConfigError(f"give either settings or single fields, not both: {', '.join(fields)}")
    from paceline.engine.compat import is_cpu, uses_v2

    invariant = settings.batch_invariant if settings.batch_invariant is not None else is_cpu()
    if invariant and not is_cpu():
        raise ConfigError(
            "batch_invariant=True is the CPU backend's mode; on a GPU leave it unset and start vLLM with "
            "VLLM_BATCH_INVARIANT=1"
        )
    if is_cpu():
        from paceline.engine.linear import check_kernel

        check_kernel(settings.linear_kernel)
    arguments: dict[str, Any] = {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "speculative_config": _speculation(settings, uses_v2()),
        "additional_config": {
            "paceline": settings.model_dump(),
            "paceline_invariant": invariant,
            "paceline_linear": settings.linear_kernel if is_cpu() else "vllm",
        },
        "async_scheduling": False,
    }
    if settings.compiled is not None or is_cpu():
        arguments["enforce_eager"] = not settings.compiled
    if settings.compiled:
        check_compiler()
    _check_head(settings)
    if settings.model_drafter == MTP and not uses_v2():
        raise UnsupportedError(
            f"model_drafter={MTP!r} is for GPUs, with vLLM's model runner V2: on the CPU give the folder of a small "
            "model or of a draft head"
        )
    if uses_v2() and settings.model_drafter is not None:
        arguments["sleep_preserve_parameter_names"] = [
            "draft.*"
        ]  # nobody loads them again after a deep sleep
    if settings.kv_pool is not None:
        from paceline.engine.kv.backend import transfer_config

        arguments["kv_transfer_config"] = transfer_config(settings.kv_pool)
    return arguments


BLOCK_TOKENS = 32
"""Tokens of a KV cache block on the CPU, the fewest that vLLM takes there (for MLA models it takes its own number). The
responses to one prompt share its whole blocks and compute the rest of it each: with vLLM's default of 128, all of a
short prompt."""


def cache_arguments() -> dict[str, Any]:
    """Arguments of vLLM's engine for its KV cache, where the user gives none. On GPUs vLLM's own blocks are short."""
    from paceline.engine.compat import is_cpu

    return {"block_size": BLOCK_TOKENS} if is_cpu() else {}


GRAPH_ARGUMENTS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config")
"""What says which CUDA graphs are captured: if users give one of them, they have chosen."""


def graph_arguments(settings: EngineSettings, max_num_seqs: int | None) -> dict[str, Any]:
    """Arguments of vLLM's engine that have it capture CUDA graphs of the sizes that the budget's steps will have.

    max_num_seqs: None: vLLM's default. Nothing for an engine without CUDA graphs, on the CPU or eager.
    """
    from paceline.engine.compat import is_cpu

    if is_cpu() or settings.compiled is False:
        return {}
    most = LARGEST if max_num_seqs is None else max_num_seqs
    memory_bytes = settings.graph_memory_bytes
    if _method(settings) not in (None, "draft_model"):
        memory_bytes //= 2  # a head is captured too, for its first level and for the others
    sizes = captures_for(settings.budget, settings.max_draft_tokens, most, memory_bytes)
    return {"cudagraph_capture_sizes": list(sizes)}


def overlap_obstacle(settings: EngineSettings, is_v2: bool) -> str | None:
    """Why steps cannot overlap (vLLM's async scheduling); None if they can."""
    if not is_v2:
        return "on model runner V1 drafts are made from the tokens of the step before"
    if settings.draft_worker or settings.draft_help or settings.adopt_leads:
        return "draft workers and racers draft behind tokens that are known"
    if settings.budget.policy == "bandit":
        return "the bandit is paid for the step before the one that it chose for"
    if settings.kv_pool is not None:
        return "the KV pool saves what has been computed, and a step under way may be taken back"
    return None


def check_vllm_arguments(names: Iterable[str], shown: str) -> None:
    """Raise ConfigError for a name that vLLM's EngineArgs lack, or that Paceline's settings have under another one.

    shown: where the names stand, for the message.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in names:
        if name == "enforce_eager":
            raise ConfigError(
                f"{shown}.enforce_eager: set EngineSettings.compiled (recipe: engine.compiled) instead"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ": see EngineArgs in vLLM's documentation"
            raise ConfigError(f"{shown}.{name} is no argument of vLLM's engine{hint}")


def parse_settings(fields: dict[str, Any]) -> EngineSettings:
    """Build EngineSettings, or raise ConfigError that names the field, the value and the limit."""
    try:
        return EngineSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"Paceline engine settings: {describe(error)}") from error


def read_settings(vllm_config: Any) -> EngineSettings:
    """The settings that an engine process was started with. Raises ConfigError when there are none."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict) or "paceline" not in extra:
        raise ConfigError(
            "Paceline's scheduler or worker was named without its settings: start the engine with "
            "LLM(model, **paceline.engine_arguments()) or with PACELINE=1 in the environment"
        )
    return parse_settings(extra["paceline"])


def check_engine(vllm_config: Any) -> None:
    """Raise UnsupportedError for an engine mode in which sampling by key cannot work. Before the model is loaded."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    from paceline.engine.compat import is_cpu

    settings = read_settings(vllm_config)
    obstacle = overlap_obstacle(settings, vllm_config.use_v2_model_runner)
    remedies = {
        f"async_scheduling=False ({obstacle})": bool(
            vllm_config.scheduler_config.async_scheduling and obstacle
        ),
        "EngineSettings.draft_worker=True or False ('auto' moves threads between target and drafter: for model runner "
        "V1, with the target in the engine's own process)": (
            settings.draft_worker == "auto"
            and (vllm_config.use_v2_model_runner or vllm_config.parallel_config.world_size > 1)
        ),
        "pipeline_parallel_size=1": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "enable_prompt_embeds=False": vllm_config.model_config.enable_prompt_embeds,
        "distributed_executor_backend='mp' (with external_launcher each rank schedules by its own clock)": (
            vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
            and vllm_config.parallel_config.world_size > 1
        ),
    }
    if names := [one.name for one in entry_points(group=LOGITSPROCS_GROUP)]:
        raise UnsupportedError(
            f"vLLM's plug-ins {names} process logits, which sampling by key would leave out: uninstall them, or run "
            "this engine without Paceline"
        )
    if vllm_config.use_v2_model_runner:
        remedies |= _v2_remedies(vllm_config, settings)
    for remedy, is_needed in remedies.items():
        if is_needed:
            raise UnsupportedError(f"Paceline does not run on this engine: start it with {remedy}")
    if vllm_config.use_v2_model_runner:
        return
    if not is_cpu():
        raise UnsupportedError(
            "on a GPU Paceline needs vLLM's model runner V2, and this engine has V1: unset VLLM_USE_V2_MODEL_RUNNER, "
            "or remove the option that vLLM's warning names"
        )
    if vllm_config.speculative_config.method != "custom_class":
        raise UnsupportedError(
            "vLLM has fallen back to its model runner V1, its warning says why: remove that option, or choose V1 "
            "yourself with VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _v2_remedies(vllm_config: Any, settings: EngineSettings) -> dict[str, bool]:
    """What would change the dice, or was never tried, on model runner V2."""
    from paceline.engine.compat import is_cpu

    model = vllm_config.model_config
    return {
        "use_fp64_gumbel=False": model.use_fp64_gumbel,
        "no watermark_config": vllm_config.watermark_config is not None,
        "enable_trace_replay=False": model.enable_trace_replay,
        "enable_batch_sharded_sampling=False": vllm_config.parallel_config.enable_batch_sharded_sampling,
        "EngineSettings.draft_worker=True (further_drafters inside the engine are for model runner V1)": (
            settings.chooses_drafter
        ),
        "EngineSettings.num_paths=1 (on model runner V2 more are for async_scheduling=True)": (
            settings.num_paths > 1 and not vllm_config.scheduler_config.async_scheduling
        ),
        "EngineSettings.compiled unset (on the CPU it is for model runner V1)": is_cpu()
        and bool(settings.compiled),
        "EngineSettings.model_drafter_dtype='auto' (on model runner V2 it is the target's)": (
            settings.model_drafter_dtype != "auto" and _method(settings) is not None
        ),
        "data_parallel_size=1 (each engine drafts as deep as it pays, and models of experts want the same number of "
        "passes everywhere), or without model_drafter": (
            vllm_config.parallel_config.data_parallel_size > 1 and _method(settings) is not None
        ),
    }


def _check_head(settings: EngineSettings) -> None:
    """Raise ConfigError where a draft head is to draft away from the target's states."""
    heads = [name for name in settings.drafter_folders if _method_of(Path(name)) != "draft_model"]
    if heads and (settings.draft_worker or settings.draft_help or settings.further_drafters):
        raise ConfigError(
            f"the drafter {heads[0]!r} is a draft head, which needs the target's hidden states and drafts in the "
            "engine, as the only model: switch draft_worker and draft_help off, without further_drafters, or give a "
            "small language model"
        )


def fused_layers(settings: EngineSettings) -> tuple[int, ...]:
    """The target's layers whose inputs the model drafter reads; () unless that is an EAGLE-3 head.

    Raises CheckpointError for one whose configuration cannot be.
    """
    from paceline.drafting.drafter import is_draft_head, read_fused_layers

    folder = settings.model_drafter
    return read_fused_layers(Path(folder)) if folder is not None and is_draft_head(Path(folder)) else ()


def _method_of(folder: Path) -> str:
    """What vLLM calls speculation with the drafter in a folder.

    Published heads name their kind in `architectures` where their weights are in a file that is not read here.
    """
    from paceline.drafting.drafter import is_draft_head, read_architectures, read_fused_layers

    is_head, kind = is_draft_head(folder), " ".join(read_architectures(folder)).lower()
    if "eagle3" in kind or (is_head and read_fused_layers(folder)):
        return "eagle3"
    return "eagle" if is_head or "eagle" in kind else "draft_model"


def _method(settings: EngineSettings) -> str | None:
    """The same for the model that drafts inside the engine; None where there is none."""
    if settings.model_drafter is None or not settings.drafts_inside:
        return None
    return MTP if settings.model_drafter == MTP else _method_of(Path(settings.model_drafter))


def _speculation(settings: EngineSettings, is_v2: bool) -> dict[str, Any]:
    """vLLM's speculative method: on V1 our proposer; on V2 vLLM's own for such a drafter, or else one that V2 can run,
    whose speculator v2/runner.py takes away."""
    method = {"method": _method(settings) or "ngram_gpu"}
    if not is_v2:
        method = {"method": "custom_class", "model": PROPOSER}
    elif settings.model_drafter is not None and method["method"] not in ("ngram_gpu", MTP):
        method["model"] = settings.model_drafter
    return {**method, "num_speculative_tokens": settings.max_draft_tokens}

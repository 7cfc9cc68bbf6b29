"""vLLM's plug-in entry point: with PACELINE=1 in the environment every vLLM engine is a Paceline engine.

vLLM calls `register()` in each of its processes. Nothing happens unless the environment asks for it:

    PACELINE=1                           switch on, with default settings
    PACELINE_SETTINGS='{"run_seed": 7}'  fields of EngineSettings as JSON (docs/engine.md)

Engines that already name a scheduler, a worker or a speculative method of their own are refused with a clear error
rather than changed silently. Trainer code (TRL, veRL, OpenRLHF) needs no change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from paceline import __version__
from paceline.errors import ConfigError, InstallError, UnsupportedError

SWITCH = "PACELINE"
SETTINGS = "PACELINE_SETTINGS"
_WHY = {
    "async_scheduling": "overlapping steps are new here: say async_scheduling=True to have them",
    "enforce_eager": "EngineSettings.compiled decides",
}
"""Engine arguments that are changed, and why."""
_PRESERVED = "sleep_preserve_parameter_names"
_LOGGER = logging.getLogger("vllm.paceline")  # below vLLM's own, so that its settings hold


def is_switched_on() -> bool:
    """Whether the environment asks for Paceline. Raises ConfigError for a value that is neither yes nor no."""
    value = os.environ.get(SWITCH, "0").strip().lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"", "0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{SWITCH}={value!r} in the environment: use 1 or 0")


def settings_from_environment() -> Any:
    """EngineSettings from PACELINE_SETTINGS. Raises ConfigError when it is not JSON or has an unknown field."""
    from paceline.engine.arguments import parse_settings

    text = os.environ.get(SETTINGS, "{}")
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{SETTINGS} is not JSON ({error.msg} at character {error.pos}): write it as '{{\"run_seed\": 7}}'"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{SETTINGS}={text!r} must be a JSON object of EngineSettings fields")
    return parse_settings(fields)


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Idempotent.

    Without PACELINE=1 it only lets requests to engines that were given Paceline by engine arguments use every sampling
    option, and never fails: a vLLM that does not fit is no error for somebody who does not ask for Paceline.
    """
    if not is_switched_on():
        with contextlib.suppress(InstallError, ImportError):
            from paceline.engine.compat import allow_exact_options

            allow_exact_options()
        return
    from paceline.engine.compat import allow_exact_options, engine_args_class

    allow_exact_options()
    args_class = engine_args_class()
    create = args_class.create_engine_config
    if getattr(create, "_paceline", False):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if pools(self):
            _LOGGER.info("%s=1 leaves an engine that pools as it is", SWITCH)
            return create(self, *args, **kwargs)
        switch_on(self)
        try:
            return create(self, *args, **kwargs)
        except ValueError:
            if not self.enable_lora or not shorten_drafts(self):
                raise
            return create(self, *args, **kwargs)

    create_engine_config._paceline = True  # type: ignore[attr-defined]
    args_class.create_engine_config = create_engine_config


def pools(engine_args: Any) -> bool:
    """Whether an engine gives embeddings, classes or rewards, and generates nothing."""
    if engine_args.runner != "auto":
        return bool(engine_args.runner == "pooling")
    return bool(engine_args.create_model_config().runner_type == "pooling")


def shorten_drafts(engine_args: Any) -> bool:
    """With LoRA vLLM wants room in a step for the longest draft of every request: bound drafts by that.

    engine_args: Paceline's, of which vLLM has filled in what was not given. Returns whether there is room for any, and
    drafts were longer.
    """
    from paceline.engine.arguments import engine_arguments, parse_settings

    given = engine_args.additional_config["paceline"]
    room, requests = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    if room is None or requests is None:
        return False
    longest = room // requests - 1
    if not 0 < longest < given["max_draft_tokens"]:
        return False
    made = engine_arguments(parse_settings({**given, "max_draft_tokens": longest}))
    _LOGGER.warning(
        "drafts have at most %d tokens: with LoRA vLLM wants max_num_batched_tokens=%d to have room for those of all "
        "max_num_seqs=%d requests; lower max_num_seqs for longer ones",
        longest,
        room,
        requests,
    )
    engine_args.speculative_config = made["speculative_config"]
    engine_args.additional_config = {**engine_args.additional_config, **made["additional_config"]}
    return True


def switch_on(engine_args: Any) -> None:
    """Fill Paceline into vLLM's EngineArgs in place; engines that are Paceline's already are left alone.

    Raises UnsupportedError when the engine already has a speculative method or classes of another plug-in.
    """
    from paceline.engine.arguments import (
        SCHEDULER,
        cache_arguments,
        engine_arguments,
        graph_arguments,
        overlap_obstacle,
    )
    from paceline.engine.compat import uses_v2

    if engine_args.scheduler_cls == SCHEDULER:
        return
    taken = {
        "scheduler_cls": engine_args.scheduler_cls,
        "speculative_config": engine_args.speculative_config,
    }
    for name, value in taken.items():
        if value is not None:
            raise UnsupportedError(
                f"{SWITCH}=1 is set, but the engine already has {name}={value!r}: remove it, or unset {SWITCH}"
            )
    if engine_args.worker_cls != "auto":
        raise UnsupportedError(
            f"{SWITCH}=1 is set, but the engine already has worker_cls={engine_args.worker_cls!r}: "
            f"remove it, or unset {SWITCH}"
        )
    settings, why = settings_from_environment(), dict(_WHY)
    arguments = engine_arguments(settings)
    if (obstacle := overlap_obstacle(settings, uses_v2())) is not None:
        why["async_scheduling"] = obstacle
    elif engine_args.async_scheduling:
        del arguments["async_scheduling"]
    if "kv_transfer_config" in arguments and engine_args.kv_transfer_config is not None:
        raise UnsupportedError(
            f"{SETTINGS} sets kv_pool, but the engine already has kv_transfer_config="
            f"{engine_args.kv_transfer_config!r}: remove one of the two"
        )
    arguments["additional_config"] = {
        **(engine_args.additional_config or {}),
        **arguments["additional_config"],
    }
    if engine_args.block_size is None:
        arguments |= cache_arguments()
    if not _chooses_graphs(engine_args):
        arguments |= graph_arguments(settings, engine_args.max_num_seqs)
    if _PRESERVED in arguments:
        own = getattr(engine_args, _PRESERVED)
        arguments[_PRESERVED] = [*own, *(name for name in arguments[_PRESERVED] if name not in own)]
    for name, value in arguments.items():
        before = getattr(engine_args, name)
        if name in why and value != before:
            _LOGGER.warning("%s=1 sets %s=%r instead of %r: %s", SWITCH, name, value, before, why[name])
        setattr(engine_args, name, value)
    _LOGGER.info(
        "Paceline %s is on: drafter %s, budget %s, run seed %d (%s=1)",
        __version__,
        settings.model_drafter or settings.drafter,
        settings.budget.policy,
        settings.run_seed,
        SWITCH,
    )


def _chooses_graphs(engine_args: Any) -> bool:
    """Whether the user says which CUDA graphs are captured."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    owners = (engine_args, engine_args.compilation_config)
    return any(getattr(owner, name) is not None for owner in owners for name in names)

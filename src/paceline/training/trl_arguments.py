"""From a recipe to TRL's arguments: what each algorithm means, what a recipe owns, what `trl:` may add."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.integrations.trl.options import check_generation, check_options
from paceline.training.recipe import AlgorithmSection, Recipe

CLIPS = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "rloo": (0.2, 0.2),
}
"""Lower and upper clip of the importance ratio: DeepSeekMath 4.1, DAPO 3.1, Dr. GRPO, GSPO 5.1, TRL (rloo)."""
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
FOREIGN = {
    "num_iterations": "a resumed run repeats a rollout exactly only if each is used once; use batch.updates",
    "generation_batch_size": "it follows from batch.prompts and batch.group_size",
    "eval_strategy": "held-out evaluation is set by the recipe's evaluation section",
    "vllm_importance_sampling_cap": "it is deprecated; use vllm_importance_sampling_clip_max",
    "resume_from_checkpoint": "use --resume",
    "num_train_epochs": "it follows from steps",
    "sync_ref_model": "checkpoints do not hold the reference model, so no run could be resumed exactly",
    "save_only_model": "--resume needs all of a checkpoint",
    "ignore_data_skip": "a resumed run would begin the prompts anew",
    "eval_on_start": "held-out evaluation is set by the recipe's evaluation section",
}
"""TRL fields that a recipe can set neither way, with the reason."""
OWNED_SAMPLING = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "max_tokens": "lengths.response_tokens",
}
"""Keys that `trl.generation_kwargs` may not hold, and the recipe's own."""


def trainer_arguments(recipe: Recipe, folder: Path, on_cpu: bool) -> Any:
    """GRPOConfig or RLOOConfig of a recipe, checkpoints below `folder`.

    Raises ConfigError for a `trl:` key that TRL does not have or that the recipe owns, and for a value that TRL
    refuses.
    """
    from trl import GRPOConfig, RLOOConfig

    kind = RLOOConfig if recipe.algorithm.name == "rloo" else GRPOConfig
    owned = _owned(recipe, folder, on_cpu) | _algorithm(recipe.algorithm)
    preset = {"gradient_checkpointing": not on_cpu, "report_to": "none", "dataloader_pin_memory": not on_cpu}
    _check_extra(recipe.trl, set(owned), {field.name for field in fields(kind)}, kind.__name__)
    try:
        made = kind(**{**preset, **recipe.trl, **owned})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TRL refuses the recipe: {' '.join(str(error).split())}") from error
    check_options(made)
    return made


def computes_bfloat16(on_cpu: bool) -> bool:
    """Whether this machine has bfloat16 arithmetic, not an emulation of it."""
    import torch

    if not on_cpu:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def emulates_bfloat16(arguments: Any) -> bool:
    """Whether passes are to be in a number format that this processor has no arithmetic for: they take tens of times
    as long.
    """
    return bool(arguments.bf16 and arguments.use_cpu) and not computes_bfloat16(on_cpu=True)


def _owned(recipe: Recipe, folder: Path, on_cpu: bool) -> dict[str, Any]:
    batch, optimizer, sampling = recipe.batch, recipe.optimizer, recipe.sampling
    return {
        "output_dir": str(folder),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "use_cpu": on_cpu,
        "per_device_train_batch_size": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "steps_per_generation": batch.accumulation * batch.updates,
        "num_generations": batch.group_size,
        "max_completion_length": recipe.lengths.response_tokens,
        "max_steps": recipe.steps * batch.updates,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": SCHEDULES[optimizer.schedule],
        "warmup_steps": optimizer.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "adam_beta2": optimizer.beta2,
        "bf16": optimizer.precision == "bfloat16"
        or (optimizer.precision == "auto" and computes_bfloat16(on_cpu)),
        "use_vllm": True,
        "vllm_mode": "colocate",
        "remove_unused_columns": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": recipe.output.save_every * batch.updates,
        "save_total_limit": None,  # ours to choose: transformers goes by their times (checkpoints.py)
    }


def _algorithm(algorithm: AlgorithmSection) -> dict[str, Any]:
    name = algorithm.name
    low, high = CLIPS[name]
    given: dict[str, Any] = {
        "beta": algorithm.kl,
        "epsilon": algorithm.clip_low or low,
        "epsilon_high": algorithm.clip_high or algorithm.clip_low or high,
        "mask_truncated_completions": name == "dapo"
        if algorithm.mask_truncated is None
        else algorithm.mask_truncated,
    }
    if name == "rloo":
        return given
    return given | {
        "loss_type": name if name in {"dapo", "dr_grpo"} else "grpo",
        "scale_rewards": "none" if name == "dr_grpo" else "group",
        "importance_sampling_level": "sequence" if name == "gspo" else "token",
    }


def _check_extra(extra: dict[str, Any], owned: set[str], known: set[str], config: str) -> None:
    for key, value in extra.items():
        if key in FOREIGN:
            raise ConfigError(f"recipe key trl.{key} = {value!r}: {FOREIGN[key]}")
        if key in owned:
            raise ConfigError(
                f"recipe key trl.{key} = {value!r}: the recipe has a section for it, see docs/training.md"
            )
        if key == "generation_kwargs":
            check_generation(value or {})
            _check_sampling(value or {})
        if key not in known:
            near = difflib.get_close_matches(key, known - owned, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"recipe key trl.{key} = {value!r}: {config} has no such field{hint}")


def _check_sampling(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in OWNED_SAMPLING:
            raise ConfigError(
                f"recipe key trl.generation_kwargs.{name} = {value!r}: set {OWNED_SAMPLING[name]} instead"
            )

"""Loading a drafter checkpoint, and refusing what cannot work before or while it is taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.drafting.drafter import fits_vocabulary
from paceline.drafting.model_cache import ATTENTION_NAME, attend_rows
from paceline.errors import CheckpointError, ConfigError
from paceline.garbage import uncollected

with uncollected():
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM


def check_settings(max_model_len: int, max_requests: int, dtype: str) -> None:
    """Raise ConfigError for a size below 1 or an unknown number format."""
    for name, value in (("max_model_len", max_model_len), ("max_requests", max_requests)):
        if value < 1:
            raise ConfigError(f"drafter {name} is {value}, must be at least 1")
    known = ("auto", "float32", "bfloat16", "float16")
    if dtype not in known:
        raise ConfigError(f"drafter dtype is {dtype!r}: choose one of {', '.join(known)}")


def read_shapes(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint without their values, on torch's `meta` device. Raises CheckpointError."""
    found = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, it is no mapping
                    shape = tensors.get_slice(name).get_shape()
                    found[name] = torch.empty(shape, device="meta")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: the weights cannot be read ({error}): save the drafter again"
        ) from error
    if not found:
        raise CheckpointError(f"{folder} has no weights in safetensors form: save the drafter in it")
    return found


def check_weights(own: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless `fresh` is all of `own` (tied copies optional), in the same shapes, and finite."""
    for name, tensor in fresh.items():
        if name not in own:
            raise CheckpointError(f"the drafter has no weight {name!r}: send the names of its own checkpoint")
        if own[name].shape != tensor.shape:
            raise CheckpointError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the drafter's has "
                f"{tuple(own[name].shape)}: send weights of the same architecture"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"weight {name!r} is not finite: send those of an earlier checkpoint")
    covered = {id(own[name]) for name in fresh}
    missing = [name for name, tensor in own.items() if id(tensor) not in covered]
    if missing:
        raise CheckpointError(
            f"{len(missing)} drafter weights were not sent, first {missing[0]!r}: send the complete set"
        )


def check_vocabulary(path: Path, own: int, target: int | None) -> None:
    """Raise CheckpointError for a drafter whose vocabulary differs from the target's by more than padding."""
    if target is not None and not fits_vocabulary(own, target):
        raise CheckpointError(
            f"{path}: the drafter's vocabulary has {own} ids, the target's {target}: "
            "choose a drafter with the target's tokenizer"
        )


def check_drafter_folder(path: Path, target_vocab_size: int) -> None:
    """Raise CheckpointError for what can be seen without loading the model: no checkpoint, or of another vocabulary."""
    _check_config(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    check_vocabulary(path, config.vocab_size, target_vocab_size)


def _check_config(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: no drafter checkpoint there (config.json is missing): give the folder of a local "
            "Hugging Face causal LM"
        )


def load_model(path: Path, dtype: str) -> Any:
    """The checkpoint with row attention, in evaluation mode."""
    _check_config(path)
    AttentionInterface.register(ATTENTION_NAME, attend_rows)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(
            f"{path}: the drafter checkpoint cannot be loaded ({error}): save it again with save_pretrained, "
            "or choose a full-attention decoder such as Llama, Qwen2 or Qwen3"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} weights are missing from the drafter checkpoint, first {missing[0]!r}: "
            "save it again with save_pretrained"
        )
    return model.eval().requires_grad_(False)

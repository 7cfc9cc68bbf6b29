"""Drafters as others load them: plain Hugging Face folders (vLLM, SGLang) and the `speculators` form (vLLM).

EAGLE and EAGLE-3 checkpoints hold the head alone; who loads them lends it the target's embedding and head, so that a
weight push never leaves an old copy behind. The `speculators` form, which has EAGLE-3 only, asks for the target's head
by its own name and gets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from paceline.distillation.checkpoints import written_aside
from paceline.distillation.methods import MethodName
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import Description
from paceline.errors import ConfigError, RecordError

Form = Literal["huggingface", "speculators"]

ARCHITECTURES = {"eagle": "LlamaForCausalLM", "hass": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
"""By method, before vLLM puts `Eagle` in front of what needs it."""


def export(tensors: Mapping[str, Tensor], made: Description, out: Path, form: Form, verifier: str) -> None:
    """Write a checkpoint folder; one that is ended before it is done leaves no part of a new folder, and no
    `config.json` in one that was there.

    verifier: name or path of the target, which the `speculators` form carries. Raises ConfigError for a form that the
    method does not have, RecordError if the disk refuses.
    """
    weights = {name: tensor.contiguous() for name, tensor in drafter_weights(tensors, made.method).items()}
    if form == "speculators":
        weights, config = _speculators(weights, made, verifier)
    else:
        config = made.config if made.method == "osd" else _head_config(made)
    try:
        with written_aside(out) as aside:
            (aside / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
            (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write {out}: {error.strerror}; choose another place") from error


def drafter_weights(tensors: Mapping[str, Tensor], method: MethodName) -> dict[str, Tensor]:
    """A drafter's weights out of a training file, by the names of its checkpoint."""
    before = f"{NETWORK}model." if method == "osd" else NETWORK
    return {name.removeprefix(before): tensor for name, tensor in tensors.items() if name.startswith(before)}


def _head_config(made: Description) -> dict[str, Any]:
    config = {**made.config, "architectures": [ARCHITECTURES[made.method]], "dtype": "float32"}
    if made.method == "eagle3":
        fused = {"eagle_aux_hidden_state_layer_ids": list(made.fused_layers)}
        config |= {**fused, "eagle_config": fused}  # vLLM's V2 and V1 look in different places
    return config


def _speculators(
    weights: dict[str, Tensor], made: Description, verifier: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if made.method != "eagle3":
        raise ConfigError(f"the speculators form has no type for method {made.method}: export as huggingface")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": made.config["vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(made.fused_layers),
        "transformer_layer_config": {**made.config, "model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": verifier},
        },
        "dtype": "float32",
    }
    return renamed, config

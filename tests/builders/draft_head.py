"""A draft head that nobody has trained, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.distillation.export import export
from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.networks import DraftHead
from paceline.distillation.target import choose_layers, share
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import describe


def make_head(folder: Path, target: Any, method: MethodName = "eagle", seed: int = 1) -> DraftHead:
    """A random head, sharp enough to tell tokens apart, and its exported checkpoint.

    EAGLE-3's is for targets of four layers or more.
    """
    torch.manual_seed(seed)
    head = build_network(METHODS[method], share(target), None)
    assert isinstance(head, DraftHead)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(6.0 if weight.ndim == 2 else 1.0)
    tensors = {f"{NETWORK}{name}": weight.detach() for name, weight in head.named_parameters()}
    fused = choose_layers(target.config.num_hidden_layers) if head.num_fused else ()
    export(tensors, describe(head, method, "forward_kl", 1.0, fused), folder, "huggingface", "target")
    return head

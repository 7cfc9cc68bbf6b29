"""A draft head that nobody has trained, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.distillation.export import export
from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.networks import DraftHead
from paceline.distillation.target import share
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import describe


def make_head(folder: Path, target: Any, method: MethodName = "eagle", seed: int = 1) -> DraftHead:
    """A random head, sharp enough to tell tokens apart, and its exported checkpoint."""
    torch.manual_seed(seed)
    head = build_network(METHODS[method], share(target), None)
    assert isinstance(head, DraftHead)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(6.0 if weight.ndim == 2 else 1.0)
    tensors = {f"{NETWORK}{name}": weight.detach() for name, weight in head.named_parameters()}
    export(tensors, describe(head, method, "forward_kl", 1.0, ()), folder, "huggingface", "target")
    return head

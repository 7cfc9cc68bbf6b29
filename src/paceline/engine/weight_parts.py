"""New weights on their way into a model: did all parts come of each tensor that vLLM makes of several?

A layer of which nothing comes keeps its weights. But of queries, keys and values, of gate and up, and of the experts of
a layer vLLM makes a tensor anew as soon as one comes, and what did not come is memory that nobody has written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.drafting.checkpoint import read_shapes
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

EXPERTS = ".experts."


def noted(weights: Iterable[tuple[str, torch.Tensor]], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, whose names are added to `names` as they are read."""
    for name, tensor in weights:
        names.add(name)
        yield name, tensor


def checkpoint_names(folder: Path) -> frozenset[str]:
    """The names of a model folder's weights; none where it has none in safetensors form."""
    try:
        return frozenset(read_shapes(folder))
    except CheckpointError:
        return frozenset()


def missing_parts(came: Set[str], known: Set[str], packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Weights that did not come although others did of the same tensor, in order.

    came: names of those that did; other names than the checkpoint's tell nothing. known: the checkpoint's names.
    packed: the model's `packed_modules_mapping`, modules by that of which they are parts.
    """
    whole_of = {part: whole for whole, parts in packed.items() for part in parts}
    begun = {_tensor(name, whole_of) for name in came & known} - {None}
    return sorted(name for name in known - came if _tensor(name, whole_of) in begun)


def _tensor(name: str, whole_of: Mapping[str, str]) -> str | None:
    """The tensor of which a weight is a part; None: it is one of its own."""
    head, experts, _ = name.partition(EXPERTS)
    if experts:
        return head + EXPERTS
    module, _, kind = name.rpartition(".")
    prefix, _, part = module.rpartition(".")
    return f"{prefix}.{whole_of[part]}.{kind}" if part in whole_of else None

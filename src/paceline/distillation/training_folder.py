"""A folder in which a drafter is trained: one file with its weights, its optimizers' state and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.distillation import checkpoints
from paceline.distillation.methods import METHODS, MethodName
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.packing import ATTENTION_NAME
from paceline.distillation.trainer import load_network
from paceline.errors import CheckpointError
from paceline.record.damage import UNREADABLE

FILE_NAME = "training.safetensors"
FURTHER_NAME = "training-{}.safetensors"
"""Of a run's further trainers, by index from 1: the newest of all these files counts."""
USED_NAME = "used.safetensors"
"""Of a run's folder: the drafter that its engines have, in the same form without optimizers."""
NOTE = "paceline"


class Description(msgspec.Struct, frozen=True):
    """What a drafter in training is, and how far it has come."""

    method: MethodName
    loss: str
    temperature: float
    """At which the responses that it learns from were sampled."""
    fused_layers: tuple[int, ...]
    """Layers of the target whose inputs it reads besides the last state."""
    config: dict[str, Any]
    """transformers' configuration of the network."""
    trained_s: float = 0.0
    """Processor time spent on training it, loading excluded."""
    trained_tokens: int = 0
    agreement: float | None = None
    """With the target under the shared dice, on responses that it does not learn from; None: not measured."""
    first_agreement: float | None = None
    """Of the drafter as it was at first, on the same responses; None: not measured."""
    used_agreement: float | None = None
    """Of the drafter that the run's engines have, on the same responses; None: they have none, or not measured."""

    def note(self) -> dict[str, str]:
        """As it stands in the file."""
        return {NOTE: msgspec.json.encode(self).decode()}


def describe(
    network: Network, method: MethodName, loss: str, temperature: float, fused_layers: tuple[int, ...]
) -> Description:
    """Of a network that has not been trained yet."""
    config = network.config.to_dict()
    return Description(method, loss, temperature, fused_layers, msgspec.to_builtins(config, enc_hook=str))


def read_folder(folder: Path, name: str = FILE_NAME) -> tuple[dict[str, Tensor], Description] | None:
    """What the folder holds under this name, None for nothing. Raises CheckpointError for a file of something else."""
    found = checkpoints.read(folder / name)
    if found is None:
        return None
    tensors, note = found
    return tensors, _decode(note, folder / name)


def find_newest(folder: Path) -> str:
    """The name of the file, of all trainers', that has learned from the most tokens. Raises CheckpointError."""
    return max((FILE_NAME, *names_in(folder)), key=lambda name: _trained_tokens(folder, name))


def file_name(index: int) -> str:
    """Of the trainer with this index."""
    return FURTHER_NAME.format(index) if index else FILE_NAME


def names_in(folder: Path) -> list[str]:
    """The files of all trainers."""
    return [path.name for name in (FILE_NAME, FURTHER_NAME.format("*")) for path in folder.glob(name)]


def _trained_tokens(folder: Path, name: str) -> int:
    """-1: there is no such file."""
    note = checkpoints.read_note(folder / name)
    return -1 if note is None else _decode(note, folder / name).trained_tokens


def _decode(note: Mapping[str, str], path: Path) -> Description:
    try:
        return msgspec.json.decode(note[NOTE], type=Description)
    except (KeyError, *UNREADABLE) as error:
        raise CheckpointError(
            f"{path} was not written by 'paceline drafter train': choose another folder"
        ) from error


def is_training_folder(folder: Path) -> bool:
    """Whether a drafter is trained there."""
    return bool(names_in(folder))


def rebuild_network(description: Description, tensors: Mapping[str, Tensor], shared: Shared) -> Network:
    """The network with its weights. Raises CheckpointError if the target is not the one that it was made for."""
    kind = METHODS[description.method].network
    network: Network
    if issubclass(kind, SmallModel):
        config = AutoConfig.for_model(**description.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
        network = SmallModel(model.eval())
    else:
        network = kind(shared)
    load_network(network, tensors)
    return network

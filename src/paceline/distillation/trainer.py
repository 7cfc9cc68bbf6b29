"""Trains a drafter pack by pack; between two packs it can stop, save and go on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.distillation.methods import Objective, compute_loss
from paceline.distillation.networks import Network, Shared
from paceline.distillation.optimizers import KEPT, make_optimizers
from paceline.distillation.packing import Pack
from paceline.errors import CheckpointError

MAX_GRADIENT_NORM = 1.0
NETWORK = "network."
"""Before the names of the network's weights, among what is saved."""


class Trainer:
    """A network, its objective and its optimizers (optimizers.py).

    After `step` returns nothing is under way: whoever wants to stop simply calls it no more.
    """

    def __init__(self, network: Network, shared: Shared, objective: Objective) -> None:
        self.network = network
        self._shared, self._objective = shared, objective
        self._optimizers = make_optimizers(network)

    def step(self, pack: Pack, rate: float) -> float:
        """Learn from one pack at this learning rate. Returns the loss before it, per response token."""
        loss = self.look_at(pack)
        self.move(rate)
        return loss

    def look_at(self, pack: Pack) -> float:
        """The first half of a step: the loss per response token, and its gradients."""
        loss = compute_loss(self.network, self._shared, pack, self._objective)
        loss.backward()
        return float(loss.detach())

    def forget(self) -> None:
        """Give up the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def move(self, rate: float) -> None:
        """The other half: follow the gradients at this learning rate."""
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """All that training changes, by name: weights, and what the optimizers keep of each. Not copied."""
        found = {f"{NETWORK}{name}": p.detach() for name, p in self.network.named_parameters()}
        for name, parameter in self.network.named_parameters():
            for optimizer in self._optimizers:
                kept = optimizer.state.get(parameter, {})
                found |= {f"optimizer.{key}.{name}": value for key, value in kept.items()}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave; what another optimizer kept, an older Paceline's, is begun anew.

        Raises CheckpointError if it belongs to another network.
        """
        load_network(self.network, tensors)
        own = dict(self.network.named_parameters())
        for optimizer in self._optimizers:
            for name, parameter in own.items():
                if any(parameter is one for group in optimizer.param_groups for one in group["params"]):
                    found = _state_of(name, tensors)
                    is_own = found.keys() == KEPT[type(optimizer)]
                    optimizer.state[parameter] = found if is_own else {}


def load_network(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Take the weights out of what `Trainer.tensors` gave. Raises CheckpointError if they are another network's."""
    own = {f"{NETWORK}{name}": parameter for name, parameter in network.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in own.items()}
    given = {name: tensor.shape for name, tensor in tensors.items() if name.startswith(NETWORK)}
    if shapes != given:
        different = sorted({name for name, _ in shapes.items() ^ given.items()})
        raise CheckpointError(
            f"the checkpoint is of another network, {different[0]!r} differs: go on with the method, target and small "
            "model that it began with, or begin anew"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _state_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        key, _, parameter = rest.partition(".")
        if kind == "optimizer" and parameter == name:
            found[key] = tensor.clone()
    return found

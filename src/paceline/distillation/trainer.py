"""Trains a drafter pack by pack; between two packs it can stop, save and go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
MOVING = "moving."
"""Before the names of the weights that are trained, where those of the network are their average."""
EARLY_MOVES = 10
"""After n moves of a fresh network an average takes EARLY_MOVES / (EARLY_MOVES + n) of the next one, if that is more
than its share."""


class Trainer:
    """A network, its objective and its optimizers (optimizers.py).

    After `step` returns nothing is under way: whoever wants to stop simply calls it no more.

    averaging: above 0 the weights that `tensors` gives are a moving average of those that are trained, which takes this
    share of each new one (Polyak and Juditsky 1992). It is for training without an end, at a constant learning rate:
    the average is worth what lowering the rate at the end would bring. is_fresh: what the network begins with is worth
    nothing, and is left out of it soon.
    """

    def __init__(
        self,
        network: Network,
        shared: Shared,
        objective: Objective,
        *,
        averaging: float = 0.0,
        is_fresh: bool = True,
    ) -> None:
        self.network, self._averaging, self._num_moves = network, averaging, 0
        self._early_moves = EARLY_MOVES if is_fresh else 0
        self._averages = (
            {name: p.detach().clone() for name, p in network.named_parameters()} if averaging else {}
        )
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
        """The other half: follow the gradients at this learning rate, or give them up where they are not finite."""
        if not torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRADIENT_NORM).isfinite():
            self.forget()
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        share = self._averaging
        if self._early_moves:
            share = max(share, self._early_moves / (self._early_moves + self._num_moves))
        self._num_moves += 1
        for name, average in self._averages.items():
            average.lerp_(self.network.get_parameter(name).detach(), share)

    @contextmanager
    def averaged(self) -> Iterator[Network]:
        """The network as `tensors` gives it, to be measured. Nothing is learned meanwhile."""
        self._exchange()
        try:
            yield self.network
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, average in self._averages.items():
            parameter = self.network.get_parameter(name)
            self._averages[name], parameter.data = parameter.data, average

    def tensors(self) -> dict[str, Tensor]:
        """All that training changes, by name: weights, and what the optimizers keep of each. Not copied."""
        moving = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        found = {f"{NETWORK}{name}": tensor for name, tensor in (self._averages or moving).items()}
        if self._averages:
            found |= {f"{MOVING}{name}": tensor for name, tensor in moving.items()}
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
        self._take_averages(tensors)
        own = dict(self.network.named_parameters())
        for optimizer in self._optimizers:
            for name, parameter in own.items():
                if any(parameter is one for group in optimizer.param_groups for one in group["params"]):
                    found = _state_of(name, tensors)
                    is_own = found.keys() == KEPT[type(optimizer)]
                    optimizer.state[parameter] = found if is_own else {}

    def _take_averages(self, tensors: Mapping[str, Tensor]) -> None:
        """The network has the averages now; go on from the weights that were trained, where these are given too."""
        moves = [int(tensor) for name, tensor in tensors.items() if name.startswith("optimizer.step.")]
        self._num_moves = max(moves, default=0)
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if self._averages:
                    self._averages[name].copy_(parameter)
                if (moving := tensors.get(f"{MOVING}{name}")) is not None:
                    parameter.copy_(moving)


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

"""The published ways to train a drafter, and ours: which network, which loss, how many steps it feeds itself.

| method | network | loss | self-fed steps | source |
|---|---|---|---|---|
| eagle | Eagle | smooth L1 of the state + 0.1 cross-entropy | 1 | EAGLE |
| hass | Eagle | as eagle | 3 | HASS, as TLT figure 7 has it |
| eagle3 | Eagle3 | cross-entropy | 7 | EAGLE-3, TLT figure 7 |
| osd | SmallModel | reverse KL, on what the target writes | 1 | OSD |

Every method takes another loss on the distributions (`losses.LOSSES`); the cross-entropy is `forward_kl` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.distillation.losses import LOSSES, keep_likeliest
from paceline.distillation.networks import Eagle, Eagle3, Network, Shared, SmallModel
from paceline.distillation.packing import Pack
from paceline.distillation.target import check_packs, load_model
from paceline.drafting.checkpoint import check_vocabulary
from paceline.errors import ConfigError

MethodName = Literal["eagle", "hass", "eagle3", "osd"]

MOST_ROWS = 2048
"""Tokens whose distributions are in memory together."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What training lowers."""

    loss: str
    """Between the distributions, one of `LOSSES`."""
    steps: int = 1
    """Draft tokens of each chain that are trained."""
    step_decay: float = 1.0
    """Weight of a step over that of the one before it."""
    loss_weight: float = 1.0
    feature_weight: float = 0.0
    """Weight of the smooth L1 distance between the drafter's state and the target's."""
    temperature: float = 1.0
    """At which responses are sampled."""
    max_ids: int = 1024
    """Likeliest ids of the target that are told apart (`keep_likeliest`)."""


@dataclass(frozen=True, slots=True)
class Method:
    """A network and its objective."""

    network: type[Eagle] | type[Eagle3] | type[SmallModel]
    objective: Objective

    def with_loss(self, loss: str) -> Method:
        """The same with another loss, at full weight. Raises ConfigError for an unknown one."""
        if loss not in LOSSES:
            raise ConfigError(f"there is no loss {loss!r}: choose one of {', '.join(LOSSES)}")
        return replace(self, objective=replace(self.objective, loss=loss, loss_weight=1.0))

    def with_steps(self, steps: int) -> Method:
        """The same with chains of so many draft tokens."""
        return replace(self, objective=replace(self.objective, steps=steps))

    def at_temperature(self, temperature: float) -> Method:
        """The same for responses that were sampled at this temperature; greedy ones are learned from as at 1."""
        return replace(self, objective=replace(self.objective, temperature=temperature or 1.0))


METHODS: dict[MethodName, Method] = {
    "eagle": Method(Eagle, Objective("forward_kl", loss_weight=0.1, feature_weight=1.0)),
    "hass": Method(Eagle, Objective("forward_kl", steps=3, loss_weight=0.1, feature_weight=1.0)),
    "eagle3": Method(Eagle3, Objective("forward_kl", steps=7, step_decay=0.8)),
    "osd": Method(SmallModel, Objective("reverse_kl")),
}


def build_network(method: Method, shared: Shared, small_model: Path | None) -> Network:
    """A fresh network, or for `osd` the one in a folder. Raises ConfigError if that is missing, or out of place,
    CheckpointError if it cannot be trained, or has another vocabulary.
    """
    if issubclass(method.network, SmallModel):
        if small_model is None:
            raise ConfigError("method osd trains a small language model: give its folder")
        model = load_model(small_model)
        check_packs(model)
        rows = (one.shape[0] for one in (model.get_output_embeddings().weight, shared.head))
        check_vocabulary(small_model, *rows)
        return SmallModel(model)
    if small_model is not None:
        raise ConfigError("a small language model is what method osd trains: leave it away, or choose osd")
    return method.network(shared)


def compute_loss(network: Network, shared: Shared, pack: Pack, objective: Objective) -> Tensor:
    """Mean loss per response token of the pack, the steps of its chains added up.

    Ids that only one of the two vocabularies has, rows of padding, count for nothing. However long a response is, the
    distributions of `MOST_ROWS` of its tokens at most are in memory together.
    """
    hidden = list(network.unroll(pack, objective.steps))
    parts = [replace(pack, deciding=rows) for rows in pack.deciding.split(MOST_ROWS)]
    add_up = partial(_add_up, network, shared, objective)
    if len(parts) > 1 and torch.is_grad_enabled():
        trained = [one for one in network.parameters() if one.requires_grad]
        total: Tensor = _PartByPart.apply(add_up, parts, len(hidden), *hidden, *trained)
    else:
        total = sum(add_up(part, *hidden) for part in parts)
    return total / len(pack.deciding)


class _PartByPart(torch.autograd.Function):  # type: ignore[misc]
    """A sum over parts whose gradients are computed along with it, so that one part is in memory at a time."""

    @staticmethod
    def forward(
        ctx: Any, add_up: Callable[..., Tensor], parts: list[Pack], num_hidden: int, *inputs: Tensor
    ) -> Tensor:
        """inputs: the hidden states that `add_up` is given besides a part, and the weights that it uses."""
        hidden = [one.detach().requires_grad_() for one in inputs[:num_hidden]]
        wanted = (*hidden, *inputs[num_hidden:])
        total, gradients = inputs[0].new_zeros(()), dict[int, Tensor]()
        for part in parts:
            with torch.enable_grad():
                value = add_up(part, *hidden)
            for place, more in enumerate(torch.autograd.grad(value, wanted, allow_unused=True)):
                if place in gradients and more is not None:
                    gradients[place] += more
                elif more is not None:
                    gradients[place] = more
            total += value.detach()
        ctx.places, ctx.num_wanted = tuple(gradients), len(wanted)
        ctx.save_for_backward(*gradients.values())
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients = dict(zip(ctx.places, ctx.saved_tensors, strict=True))
        found = (gradients.get(place) for place in range(ctx.num_wanted))
        return None, None, None, *(None if one is None else factor * one for one in found)


def _add_up(network: Network, shared: Shared, objective: Objective, pack: Pack, *hidden: Tensor) -> Tensor:
    """The losses of the pack's deciding tokens. hidden: the drafter's states, by step, each [num_tokens, hidden]"""
    states = pack.states[:, -shared.head.shape[1] :]
    num_ids = min(shared.vocab_size, network.vocab_size)
    log_p = (shared.logits(states[pack.deciding])[:, :num_ids] / objective.temperature).log_softmax(-1)
    compare = LOSSES[objective.loss]
    total, weight = states.new_zeros(()), 1.0
    for step, one in enumerate(hidden):
        kept, rows = pack.rows(network.lead + step)
        made = one[rows]
        log_q = (network.logits(made)[:, :num_ids] / objective.temperature).log_softmax(-1)
        value = objective.loss_weight * compare(*keep_likeliest(log_p[kept], log_q, objective.max_ids)).sum()
        if objective.feature_weight:
            near = F.smooth_l1_loss(made, states[pack.deciding[kept]], reduction="none").mean(-1)
            value = value + objective.feature_weight * near.sum()
        total, weight = total + weight * value, weight * objective.step_decay
    return total

"""How drafters in training follow their gradients.

Draft heads learn with AdamW, as EAGLE's authors have it: a step of Muon costs a head several times as much, and in
equal time it comes less far. Small language models learn with Muon for their matrices, and come further with it
(docs/drafter-training.md has the figures).
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distillation.networks import Network, SmallModel

BETAS = (0.9, 0.95)
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5
TINY = 1e-7


def make_optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """For all of a network's parameters; the learning rate is given with every step."""
    named = list(network.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    of_matrices: torch.optim.Optimizer = (
        Float32Muon(matrices, weight_decay=0.1)
        if isinstance(network, SmallModel)
        else torch.optim.AdamW(matrices, betas=BETAS, weight_decay=0.01)
    )
    return [of_matrices, torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0)]


class Float32Muon(torch.optim.Muon):  # type: ignore[misc]
    """torch's Muon with steps in the parameters' own number format.

    torch orthogonalises in bfloat16, which takes three times as long where the processor has no arithmetic for it. The
    learning rate is AdamW's (torch's `match_rms_adamw`).
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Follow the gradients. closure: not supported, None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _move(self, parameter: nn.Parameter, rate: float, momentum: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = orthogonalise(parameter.grad.lerp(mean, momentum))  # Nesterov's
        parameter.mul_(1 - rate * weight_decay)
        parameter.add_(update, alpha=-rate * 0.2 * sqrt(max(parameter.shape)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """The matrix with all its singular values near 1 (0.7 to 1.2), by Newton and Schulz' iteration."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    made = matrix.T if is_tall else matrix
    made = made / made.norm().clamp(min=TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = made @ made.T
        made = torch.addmm(made, torch.addmm(gram, gram, gram, beta=b, alpha=c), made, beta=a)
    return made.T if is_tall else made


KEPT: dict[type[torch.optim.Optimizer], set[str]] = {
    Float32Muon: {"momentum_buffer"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}
"""What each optimizer keeps of a parameter."""

"""How far a drafter's distribution is from the target's: what its training lowers. All per token, in closed form.

p is the target's distribution and q the drafter's, over the same ids; arguments are logarithms that are normalised,
[num_rows, vocab], and results are [num_rows]. Each loss is 0 if and only if p = q.

* `forward_kl`, KL(p || q): the cross-entropy of EAGLE, HASS and EAGLE-3 less p's entropy, which no drafter changes.
* `reverse_kl`, KL(q || p): OSD's alternative (Liu and others 2023, Online Speculative Decoding).
* `total_variation`: the rate of rejections of the best coupling there is (speculative sampling).
* `disagreement`: the rate of rejections here, where target and drafter throw the same dice. Ours.
* `log_disagreement`: minus the logarithm of the rate of acceptance. A chain of drafts is accepted with the product of
  its tokens' rates, so this adds up along it; and a token that is never accepted still has a gradient. Ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-37
"""Smallest probability mass whose logarithm is taken: a normal number of float32."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q), nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p), nats."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half of sum |p - q|."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def log_agreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log P(argmax(log p + G) = argmax(log q + G)) for one and the same Gumbel noise G. [num_rows]

    The probability is sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) (Daliri, Musco, Suresh 2024). With the ids in falling order
    of p/q the maximum is the first ratio for the ids up to x and the second for those after it, so the inner sum is
    P(up to x) / p_x + Q(after x) / q_x, and all of them take one sort.
    """
    order = (log_p - log_q).detach().argsort(-1, descending=True)
    log_p, log_q = log_p.gather(-1, order), log_q.gather(-1, order)
    up_to = log_p.exp().cumsum(-1)
    q = log_q.exp()
    after = (q.sum(-1, keepdim=True) - q.cumsum(-1)).clamp_min(TINY)
    inverse = torch.logaddexp(up_to.clamp_min(TINY).log() - log_p, after.log() - log_q)
    return torch.logsumexp(-inverse, -1)


def agreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that shared dice give both distributions the same token. [num_rows]"""
    return log_agreement(log_p, log_q).exp()


def disagreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - agreement."""
    return 1 - agreement(log_p, log_q)


def log_disagreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log(agreement)."""
    return -log_agreement(log_p, log_q)


def keep_likeliest(log_p: Tensor, log_q: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """The `num_ids` likeliest ids of the target, and all others together as one more. [num_rows, num_ids + 1]

    A sort over a large vocabulary costs more than the head. On the result KL divergences and total variation are at
    most, and agreement is at least, those on all ids: merging ids only hides differences.
    """
    if num_ids >= log_p.shape[-1]:
        return log_p, log_q
    top_p, ids = log_p.topk(num_ids, -1)
    top_q = log_q.gather(-1, ids)
    rest = [torch.log1p(-top.exp().sum(-1, keepdim=True).clamp_max(1 - 1e-6)) for top in (top_p, top_q)]
    return torch.cat([top_p, rest[0]], -1), torch.cat([top_q, rest[1]], -1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    loss.__name__: loss for loss in (forward_kl, reverse_kl, total_variation, disagreement, log_disagreement)
}

"""Less padding in TRL's forward passes: rows of like length together, columns that hold only padding cut off.

TRL pads a whole rollout to its longest response. Under a long tail most of that is padding, which costs as much as
tokens do. Nothing here changes a loss beyond float rounding: rows keep their values, only their company changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities and entropies [num_rows, num_kept], mixture-of-experts loss or None."""

ORDER_FREE_LOSSES = frozenset({"grpo", "dapo", "dr_grpo"})
"""Losses whose gradient does not depend on which rows share a micro-batch."""


def sorting_span(trainer: Any) -> int | None:
    """Consecutive micro-batches of a rollout whose rows may change places; None: none may.

    They must belong to one optimizer update, and nothing in the loss may be a mean or a quantile over a micro-batch:
    top_entropy_quantile, the bonus on entropy and the load balancing of experts are.
    """
    args = trainer.args
    if (
        getattr(args, "loss_type", "grpo") not in ORDER_FREE_LOSSES
        or getattr(args, "top_entropy_quantile", 1.0) < 1.0
        or getattr(args, "entropy_coef", 0.0)
        or getattr(args, "use_adaptive_entropy", False)
        or trainer.aux_loss_enabled
    ):
        return None
    update, rollout = args.gradient_accumulation_steps, args.steps_per_generation
    return min(update, rollout) if rollout % update == 0 or update % rollout == 0 else None


def sort_by_length(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in as many micro-batches, shortest response first. Ties keep their order.

    Each batch maps names to tensors [micro_batch, ...]; what is no such tensor stays where it is.
    """
    lengths = torch.cat([batch["completion_mask"].sum(1) for batch in batches])
    order = torch.argsort(lengths, stable=True)
    size = len(batches[0]["completion_mask"])
    sorted_batches = [dict(batch) for batch in batches]
    for name, value in batches[0].items():
        if isinstance(value, Tensor) and value.ndim and len(value) == size:
            rows = torch.cat([batch[name] for batch in batches])[order]
            for batch, part in zip(sorted_batches, rows.split(size), strict=True):
                batch[name] = part
    return sorted_batches


def score_trimmed(
    score: Callable[[Tensor, Tensor, int], Scores],
    input_ids: Tensor,
    attention_mask: Tensor,
    num_kept: int,
    batch_size: int,
) -> Scores:
    """Score rows in batches of like length without their common padding.

    Args:
        score: (input_ids, attention_mask, num_kept) -> log-probabilities and entropies of the last columns.
        input_ids, attention_mask: [num_rows, prompt + num_kept]; prompts padded left, responses right.
        num_kept: columns of the response.

    Returns what `score` would for all rows; positions of padding hold 0.
    """
    num_prompt = input_ids.shape[1] - num_kept
    order = torch.argsort(attention_mask[:, num_prompt:].sum(1), stable=True)
    back = torch.argsort(order)
    parts = []
    for rows in order.split(batch_size):
        mask = attention_mask[rows]
        first = int(mask[:, :num_prompt].any(0).int().argmax()) if num_prompt else 0
        kept = max(int(mask[:, num_prompt:].sum(1).max()), 1)
        columns = slice(first, num_prompt + kept)
        logps, entropies, extra = score(input_ids[rows][:, columns], mask[:, columns], kept)
        pad = (0, num_kept - kept)
        parts.append(
            (
                torch.nn.functional.pad(logps, pad),
                None if entropies is None else torch.nn.functional.pad(entropies, pad),
                extra,
            )
        )
    logps = torch.cat([part[0] for part in parts])[back]
    entropies = [part[1] for part in parts if part[1] is not None]
    extras = [part[2] for part in parts if part[2] is not None]
    return (
        logps,
        torch.cat(entropies)[back] if entropies else None,
        torch.stack(extras).mean() if extras else None,
    )

"""The order of the prompts, gone on with when training resumes.

TRL draws the order of each pass over the prompts from one generator, seeded where the trainer is built. transformers
skips what the pass under way has used, but begins with the first order whatever the pass. So the orders of the passes
before are drawn here, and left. Invariant: a resumed run sees the prompts of an uninterrupted one.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from trl.trainer.grpo_trainer import RepeatSampler


class PromptOrder(TrainerCallback):  # type: ignore[misc]
    """Draws the orders of past passes. Streamed data sets have no sampler, and are told the pass by transformers."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        sampler = getattr(getattr(train_dataloader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, RepeatSampler):
            updates = -(-len(train_dataloader) // args.gradient_accumulation_steps)
            for _ in range(state.global_step // max(updates, 1)):
                next(iter(sampler))

"""Training a drafter for a while on samples that are there, as `paceline drafter train` and the benchmarks do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from paceline.distillation.networks import SmallModel
from paceline.distillation.packing import Sample, cut_contexts, divide, pack_samples
from paceline.distillation.trainer import Trainer
from paceline.errors import TrainingError

WARM_UP = 0.05
"""Share of the time in which the learning rate rises."""
LAST_RATE = 0.02
"""Of the highest learning rate, at the end."""


@dataclass(frozen=True, slots=True)
class Progress:
    """After an optimizer step."""

    core_s: float
    """Processor time spent so far."""
    num_tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long, how fast, and how much at a time."""

    core_s: float
    """Processor time of this process, seconds; with one thread that is wall time on a core of its own."""
    rate: float = 4e-3
    """Highest learning rate."""
    pack_tokens: int = 1024
    """Of an optimizer step. Larger ones use a core a little better and make fewer steps, which is worse in minutes."""

    def rate_at(self, core_s: float) -> float:
        """Up, then straight down to nearly nothing."""
        done = min(core_s / self.core_s, 1.0)
        return self.rate * max(min(done / WARM_UP, (1 - done) / (1 - WARM_UP)), LAST_RATE)


def repeat(samples: Sequence[Sample], seed: int) -> Iterator[Sample]:
    """The samples over and over, each pass in another order."""
    order, random = list(samples), Random(seed)
    while True:
        random.shuffle(order)
        yield from order


def train_offline(
    trainer: Trainer,
    samples: Sequence[Sample],
    schedule: Schedule,
    begun: Progress,
    seed: int,
    after_step: Callable[[Progress], None],
    clock: Callable[[], float] = time.process_time,
) -> None:
    """Train until the schedule's time is used up. begun: what earlier calls have used, which began with other samples;
    at least one step is made. Raises TrainingError for a loss that is not finite.
    """
    seed += begun.num_tokens
    core_s, num_tokens = begun.core_s, begun.num_tokens
    began_s = clock() - core_s
    is_head, random = not isinstance(trainer.network, SmallModel), Random(seed + 1)
    for part in divide(repeat(samples, seed), schedule.pack_tokens, lambda sample: sample.num_tokens):
        pack = pack_samples(cut_contexts(part, random, schedule.pack_tokens) if is_head else part)
        loss = trainer.step(pack, schedule.rate_at(core_s))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} after {num_tokens:,} tokens, must be finite: lower --rate, which is "
                f"{schedule.rate:g}, or begin anew if it was so from the start"
            )
        num_tokens += pack.num_tokens
        core_s = clock() - began_s
        after_step(Progress(core_s, num_tokens, loss))
        if core_s >= schedule.core_s:
            return

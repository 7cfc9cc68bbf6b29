"""Training on samples that are there: what a resumed training sees, and where it ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import Pack, Sample
from paceline.errors import TrainingError

SAMPLES = [Sample(torch.full((64,), number), 8, torch.zeros(64, 4)) for number in range(200)]


class Learner:
    """Notes what it is given, and says that its loss is so much."""

    network: Any = None

    def __init__(self, loss: float = 1.0) -> None:
        self.loss, self.seen = loss, [0] * len(SAMPLES)

    def step(self, pack: Pack, rate: float) -> float:
        for number in set(pack.ids.tolist()):
            self.seen[number] += 1
        return self.loss


def train(learner: Any, begun: Progress, max_steps: int = 10) -> Progress:
    schedule = Schedule(begun.core_s + max_steps, pack_tokens=256)
    told = [begun]
    train_offline(learner, SAMPLES, schedule, begun, 0, told.append, itertools.count().__next__)
    return told[-1]


def test_a_resumed_training_goes_on_with_other_samples() -> None:
    first, again, second = Learner(), Learner(), Learner()
    progress = train(first, Progress(0.0, 0, 0.0))
    train(again, Progress(0.0, 0, 0.0))
    assert again.seen == first.seen, "a seed is a seed"
    train(second, progress)
    new = sum(not before and now for before, now in zip(first.seen, second.seen, strict=True))
    assert new > 0.5 * sum(map(bool, second.seen))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_training(loss: float) -> None:
    with pytest.raises(
        TrainingError, match=r"after 640 tokens, must be finite: lower --rate, which is 0\.004"
    ):
        train(Learner(loss), Progress(10.0, 640, 0.0))

"""Is a model drafter worth its time, and when should a draft end?

Owns two small decisions about a drafter that costs time (a suffix tree does not). Prices come from the step-time
model: in a step of n tokens one more token costs dT/dn seconds, and a token gained saves what a token costs now,
T / tokens. A draft token of path probability P is therefore worth verifying above

    price = tokens/s * dT/dn,     and worth drafting and verifying above     tokens/s * (dT/dn + D / B)

with D the time of one drafting level over a batch of B. What the model drafter saved in a step is what its candidates
are worth at that price beyond the model-free ones; its running mean per batch size, minus the time it took, says
whether it goes on. Differs from TLT and SpecActor, which weigh drafting lengths by mean acceptance alone: in a large
batch most drafts are not worth a place, but the most certain ones still are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from paceline.planning.latency import StepTimeModel, predict_s
from paceline.types import DraftBatch

T = TypeVar("T")

HIGHEST_FLOOR = 0.9
"""A draft never has to be surer than this to go on: certainty is what the budget judges, with fresher knowledge."""

MEMORY_STEPS = 24.0
"""Steps after which what a drafter saved counts 1/e."""

TRIAL_STEPS = 8
"""Steps with drafts before a batch size is judged."""

SPAN_TOKENS = 4
"""Tokens over which the slope of T is taken, at least."""


@dataclass(frozen=True, slots=True)
class Price:
    """What time costs in a step of a given batch."""

    token_s: float
    """Seconds that one more token in the step costs (dT/dn)."""
    saved_s: float
    """Seconds that one gained token saves (T / expected tokens)."""

    @property
    def threshold(self) -> float:
        """Path probability above which a draft token is worth verifying."""
        return self.token_s / self.saved_s


def price_step(batch: int, expected_accepted: float, num_drafted: int, step_time: StepTimeModel) -> Price:
    """Price of a step of `batch` requests that verifies `num_drafted` tokens and hopes for `expected_accepted`."""
    span = max(SPAN_TOKENS, batch // 4)
    tokens = batch + num_drafted
    low, high = predict_s(step_time, np.array([tokens, tokens + span]))
    return Price(max(float(high - low), 0.0) / span, float(low) / (batch + expected_accepted))


def choose_floor(price: Price, batch: int, level_s: float, lowest: float) -> float:
    """Path probability below which the model drafter stops: verifying and drafting one more would not pay."""
    floor = (price.token_s + level_s / batch) / price.saved_s
    return float(min(max(floor, lowest), HIGHEST_FLOOR))


def value_s(batch: DraftBatch, price: Price) -> float:
    """Seconds that verifying the worthwhile tokens of `batch` saves."""
    gain = batch.path_probability - price.threshold
    return float(gain[gain > 0].sum()) * price.saved_s


@dataclass(frozen=True, slots=True)
class Worth:
    """Running balance of a drafter by batch size, in powers of two."""

    balance_s: tuple[float, ...] = (0.0,) * 12
    num_steps: tuple[int, ...] = (0,) * 12

    def is_positive(self, batch: int) -> bool:
        """Whether it pays at this batch size. At a size not tried often enough, as at the nearest smaller one that
        was; while there is none it is believed to.
        """
        for at in range(_bucket(batch), -1, -1):
            if self.num_steps[at] >= TRIAL_STEPS:
                return self.balance_s[at] > 0.0
        return True


def update_worth(worth: Worth, batch: int, balance_s: float) -> Worth:
    """The worth after a step in which the drafter saved `balance_s` seconds net of its own time."""
    at = _bucket(batch)
    count = worth.num_steps[at] + 1
    old = worth.balance_s[at]
    new = old + (balance_s - old) / min(count, MEMORY_STEPS)
    return Worth(_replace(worth.balance_s, at, new), _replace(worth.num_steps, at, count))


def _replace(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _bucket(batch: int) -> int:
    return min(max(batch, 1).bit_length() - 1, 11)

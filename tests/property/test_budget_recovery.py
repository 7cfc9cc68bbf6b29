"""A machine that was busy with something else: budget and drafter go on afterwards as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import pytest

from paceline.config import BudgetSettings
from paceline.engine.model_steering import ModelSteering
from paceline.planning.budget import (
    BudgetSnapshot,
    BudgetState,
    decide,
    draft_depth,
    expected_accepted,
    update,
)
from paceline.types import DraftGrowth, Float32Array, Float64Array, StepObservation

DEPTH = BudgetSettings().max_draft_tokens
WARM, BUSY, RECOVERY, JUDGED = 300, 400, 256, 256
BOUND = 0.03
READING_S = 0.0001
"""What the drafter takes to read a token of many at once: about a tenth of what the target takes."""
SETTINGS = BudgetSettings()


def target_s(num_tokens: int) -> float:
    return 0.014 + 0.00097 * num_tokens


@dataclass
class Engine:
    """The engine's fast loop on a model clock, with a model drafter whose estimates are right.

    sure, unsure: agreement of most drafts, and of the others.
    """

    batch: int
    level_s: float
    row_s: float
    sure: float = 0.965
    unsure: float = 0.5
    state: BudgetState = field(default_factory=lambda: BudgetState.initial(SETTINGS))
    steering: ModelSteering = field(default_factory=ModelSteering)
    limits: tuple[float, Float32Array, int | None] | None = None
    depth: int = 0
    behind: Float64Array = field(init=False)
    """Tokens that the drafter has not read yet. [batch]"""

    def __post_init__(self) -> None:
        self.behind = np.zeros(self.batch)
        for _ in range(self.batch):
            self.steering.open(0)

    def step(self, rng: np.random.Generator, slowness: float) -> tuple[float, float]:
        """Expected tokens, and the seconds of the step and its drafts on a machine that is not busy."""
        path = self._paths(rng)
        drafts, growth = self._grow(path)
        caught_up_s = self._catch_up()
        snapshot = BudgetSnapshot(self.batch, 0, drafts, 1 << 20)
        drafted_for, plain = self.limits is not None, self.state.at_context(0)
        now = self.state.at_context(0, has_model_drafts=True) if drafted_for else plain
        lengths = decide(snapshot, now, SETTINGS)
        if self.limits is not None:
            seconds = growth.seconds * slowness * float(np.exp(rng.normal(0, 0.05)))
            num_drafting = self.limits[2] or self.batch
            self.steering.receive(
                DraftGrowth(growth.num_levels, growth.num_rows, seconds), num_drafting, caught_up_s
            )
            self.steering.judge(snapshot, lengths, None, (now, plain), SETTINGS)
        drafted, expected = int(lengths.sum()), expected_accepted(snapshot, lengths)
        self.depth = draft_depth(now, SETTINGS, self.batch, self.batch + drafted)
        goes_on = self.depth > 0 and self.steering.advance(self.batch, now.decode_time)
        self.limits = self.steering.limits(self.batch, drafted, now.decode_time, 0.02) if goes_on else None
        seconds = target_s(self.batch + drafted)
        noisy_s = seconds * slowness * float(np.exp(rng.normal(0, 0.05)))
        seen = StepObservation(self.batch, drafted, round(expected), 0, noisy_s, draft_s=growth.seconds)
        self.state = update(self.state, seen, SETTINGS, expected if drafted else 0.0)
        return self.batch + expected, seconds + growth.seconds + caught_up_s

    def _catch_up(self) -> float:
        """Seconds in which the drafter reads what those that it drafts for have written."""
        most = 0 if self.limits is None else self.limits[2]
        seconds = float(self.behind[:most].sum()) * READING_S
        self.behind += 1.0
        self.steering.grow(self.batch)
        self.behind[:most] = 0.0
        return seconds

    def _paths(self, rng: np.random.Generator) -> Float32Array:
        """Most requests are easy to draft for in a step, some are not. [batch, DEPTH]"""
        easy = np.where(rng.random((self.batch, 1)) < 0.85, self.sure, self.unsure)
        acceptance = np.clip(easy + rng.normal(0, 0.03, (self.batch, DEPTH)), 0.05, 0.995)
        return np.cumprod(acceptance, axis=1).astype(np.float32)

    def _grow(self, path: Float32Array) -> tuple[Float32Array, DraftGrowth]:
        """The drafts that the limits allow, by the rule of drafting/proposal.py."""
        kept = np.zeros_like(path)
        if self.limits is None:
            return kept, DraftGrowth()
        floor, level_costs, most = self.limits
        grown, levels, rows = np.arange(self.batch)[:most], 0, 0
        while len(grown) and levels < self.depth:
            kept[grown, levels] = path[grown, levels]
            rows += len(grown)
            grown = grown[path[grown, levels] >= floor]
            levels += 1
            promised = float((path[grown, levels - 1] - floor).sum())
            if promised < level_costs[min(len(grown), len(level_costs) - 1)]:
                break
        return kept, DraftGrowth(levels, rows, levels * self.level_s + rows * self.row_s)


def rate_after(engine: Engine, seed: int, slowness: Callable[[np.random.Generator], float]) -> float:
    """Tokens per second in the steps that follow the recovery."""
    rng, busy = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    gained = np.array(
        [
            engine.step(rng, slowness(busy) if WARM <= step < WARM + BUSY else 1.0)
            for step in range(WARM + BUSY + RECOVERY + JUDGED)
        ]
    )[-JUDGED:]
    return float(gained[:, 0].sum() / gained[:, 1].sum())


DISTURBANCES: dict[str, Callable[[np.random.Generator], float]] = {
    "all": lambda rng: 5.0,
    "varying": lambda rng: float(rng.uniform(2.0, 10.0)),
    "pauses": lambda rng: 10.0 if rng.random() < 0.5 else 1.0,
}

CASES = [
    (batch, *drafter, name)
    for batch in (1, 8, 128, 256)
    for drafter in ((0.0006, 0.00015), (0.003, 0.0006))
    for name in DISTURBANCES
]


@pytest.mark.parametrize(("batch", "level_s", "row_s", "name"), CASES)
def test_what_is_known_recovers_from_a_busy_machine(
    batch: int, level_s: float, row_s: float, name: str
) -> None:
    calm = rate_after(Engine(batch, level_s, row_s), batch, lambda rng: 1.0)
    busy = rate_after(Engine(batch, level_s, row_s), batch, DISTURBANCES[name])
    assert busy > calm * (1.0 - BOUND)


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_a_drafter_that_loses_costs_little(batch: int) -> None:
    """Its trials included, and what it has to read of the rest before each."""
    engine, rng = Engine(batch, 0.003, 0.0002, sure=0.4, unsure=0.2), np.random.default_rng(batch)
    gained = np.array([engine.step(rng, 1.0) for _ in range(2000)])[200:]
    without = batch / target_s(batch)
    assert gained[:, 0].sum() / gained[:, 1].sum() > without * (1.0 - BOUND)


@pytest.mark.parametrize("batch", [16, 64])
def test_finding_out_that_a_drafter_loses_costs_little(batch: int) -> None:
    """A fresh engine, which knows neither T nor the drafter's cost, in the first steps that it makes."""
    rates = []
    for seed in range(3):
        engine, rng = Engine(batch, 0.003, 0.0006), np.random.default_rng(seed)
        gained = np.array([engine.step(rng, 1.0) for _ in range(100)])
        rates.append(gained[:, 0].sum() / gained[:, 1].sum())
    assert median(rates) > 0.94 * batch / target_s(batch)

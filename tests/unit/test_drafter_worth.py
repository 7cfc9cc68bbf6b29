"""When a model drafter pays, and where its drafts end."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.planning.drafter_worth import (
    HIGHEST_FLOOR,
    TRIAL_STEPS,
    Price,
    Worth,
    choose_floor,
    price_step,
    update_worth,
    value_s,
)
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.types import DraftBatch


def timed(base_s: float, per_token_s: float) -> StepTimeModel:
    model = StepTimeModel.initial()
    for _ in range(4):
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            model = update_measured_time(model, tokens, base_s + per_token_s * tokens)
    return model


def batch(rows: list[list[float]]) -> DraftBatch:
    table = np.array(rows, dtype=np.float32)
    whole = np.zeros(table.shape, dtype=np.int32)
    return DraftBatch(whole, np.full(len(rows), table.shape[1], np.int32), table, whole, whole[:, :1])


def test_a_compute_bound_step_asks_for_certainty_and_a_memory_bound_one_does_not() -> None:
    model = timed(0.014, 0.001)
    alone, many = price_step(1, 0.0, 0, model), price_step(128, 0.0, 0, model)
    assert alone.threshold == pytest.approx(0.001 / 0.015, rel=0.1)
    assert many.threshold == pytest.approx(0.001 / (0.142 / 128), rel=0.1)
    flat = price_step(8, 0.0, 0, timed(0.014, 0.0))
    assert flat.threshold < 0.01


def test_the_floor_adds_the_cost_of_drafting() -> None:
    price = Price(token_s=0.001, saved_s=0.010)
    assert choose_floor(price, 1, 0.0, 0.05) == pytest.approx(0.1)
    assert choose_floor(price, 1, 0.002, 0.05) == pytest.approx(0.3)
    assert choose_floor(price, 4, 0.002, 0.05) == pytest.approx(0.15)
    assert choose_floor(price, 1, 0.1, 0.05) == HIGHEST_FLOOR
    assert choose_floor(Price(0.0, 0.01), 1, 0.0, 0.05) == 0.05


def test_only_tokens_above_the_price_are_worth_anything() -> None:
    price = Price(token_s=0.005, saved_s=0.010)
    assert value_s(batch([[0.9, 0.5], [0.4, 0.9]]), price) == pytest.approx((0.9 - 0.5) * 0.010, abs=1e-6)
    assert value_s(batch([[0.5, 0.5]]), price) == 0.0


def test_a_drafter_is_judged_after_a_trial_by_batch_size() -> None:
    worth = Worth()
    assert worth.is_positive(1)
    for _ in range(TRIAL_STEPS - 1):
        worth = update_worth(worth, 64, -0.001)
    assert worth.is_positive(64)
    worth = update_worth(worth, 64, -0.001)
    assert not worth.is_positive(64)
    assert not worth.is_positive(300), "untried sizes follow the nearest smaller one"
    assert worth.is_positive(8)
    for _ in range(TRIAL_STEPS):
        worth = update_worth(worth, 8, 0.002)
    assert worth.is_positive(8)
    assert worth.is_positive(16)
    assert not worth.is_positive(64)


def test_a_drafter_that_recovers_is_taken_back() -> None:
    worth = Worth()
    for _ in range(50):
        worth = update_worth(worth, 4, -0.001)
    for _ in range(100):
        worth = update_worth(worth, 4, 0.001)
    assert worth.is_positive(4)

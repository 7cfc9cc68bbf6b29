"""Losses of drafters' training: the agreement under shared dice against the dice, and what every loss obeys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import dice
from paceline.distillation.losses import LOSSES, agreement, keep_likeliest, log_agreement, total_variation

VOCAB = 12


def distributions(seed: int, sharpness: float, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Two unrelated distributions per row, as logarithms. [rows, VOCAB] float64"""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(2, rows, VOCAB, generator=generator, dtype=torch.float64)
    first, second = logits.log_softmax(-1)
    return first, second


def slow_agreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The formula as it is printed."""
    p, q = log_p.exp(), log_q.exp()
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])  # [row, x, y]
    return (1 / ratios.sum(-1)).sum(-1)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_agreement_is_how_often_the_dice_agree(sharpness: float) -> None:
    log_p, log_q = distributions(3, sharpness, rows=3)
    count = 40_000
    keys = np.random.default_rng(7).integers(0, 1 << 63, count).astype(np.uint64)
    positions, temperatures = np.full(count, 5, np.int64), np.ones(count, np.float32)
    for p, q, expected in zip(log_p, log_q, agreement(log_p, log_q), strict=True):
        tokens = [
            dice.sample(np.tile(row.float().numpy(), (count, 1)), keys, positions, temperatures)
            for row in (p, q)
        ]
        rate = float((tokens[0] == tokens[1]).mean())
        assert rate == pytest.approx(float(expected), abs=4.5 * 0.5 / count**0.5)


@given(st.integers(0, 10_000), st.floats(0.1, 12.0))
def test_one_sort_gives_the_printed_formula(seed: int, sharpness: float) -> None:
    log_p, log_q = distributions(seed, sharpness)
    torch.testing.assert_close(agreement(log_p, log_q), slow_agreement(log_p, log_q), rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10_000), st.floats(0.1, 12.0))
def test_agreement_lies_between_its_bounds_so_it_is_one_only_for_equal_distributions(
    seed: int, sharpness: float
) -> None:
    log_p, log_q = distributions(seed, sharpness)
    distance = total_variation(log_p, log_q)
    found = agreement(log_p, log_q)
    assert (found <= 1 - distance + 1e-12).all()
    assert (found >= (1 - distance) / (1 + distance) - 1e-12).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_is_zero_for_equal_distributions_and_positive_for_others(
    name: str, dtype: torch.dtype
) -> None:
    log_p, log_q = (x.to(dtype) for x in distributions(11, 2.0))
    assert LOSSES[name](log_p, log_p).abs().max() < 1e-5
    assert LOSSES[name](log_p, log_q).min() > 1e-3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    log_p, log_q = distributions(5, 1.5)
    logits = log_q.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](log_p, x.log_softmax(-1)), logits)


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(deadline=None)
@given(seed=st.integers(0, 10_000), sharpness=st.floats(0.1, 60.0))
def test_gradients_stay_finite_in_float32(name: str, seed: int, sharpness: float) -> None:
    log_p, log_q = (x.float() for x in distributions(seed, sharpness))
    logits = log_q.clone().requires_grad_()
    LOSSES[name](log_p, logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@given(st.integers(0, 10_000), st.floats(0.1, 6.0), st.integers(1, VOCAB))
def test_merging_ids_only_hides_differences(seed: int, sharpness: float, num_ids: int) -> None:
    log_p, log_q = distributions(seed, sharpness)
    merged = keep_likeliest(log_p, log_q, num_ids)
    for row in merged:
        torch.testing.assert_close(row.exp().sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=2e-6)
    for name, loss in LOSSES.items():
        assert (loss(*merged) <= loss(log_p, log_q) + 1e-4).all(), name


def test_log_agreement_keeps_a_slope_where_the_distributions_share_nothing() -> None:
    p = torch.tensor([[40.0, 0.0, 0.0]]).log_softmax(-1)
    q = torch.tensor([[0.0, 40.0, 0.0]], requires_grad=True)
    (-log_agreement(p, q.log_softmax(-1))).sum().backward()
    assert q.grad is not None
    assert q.grad[0, 0] < -0.1
    assert q.grad[0, 1] > 0.1

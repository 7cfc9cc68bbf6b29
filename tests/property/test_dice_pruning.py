"""The pruned sampler equals the unpruned argmax on adversarial logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline import dice
from paceline.types import Float32Array, Int64Array

Sampler = Callable[..., Int64Array]

BIG = float(np.finfo(np.float32).max)

EDGES = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.0, -1.0, 22.87, -22.87, 80.0, -80.0, 1e30, -1e30, BIG, -BIG]
LOGITS = st.one_of(
    st.sampled_from([*EDGES, float("-inf"), float("inf")]),
    st.floats(-30, 30, width=32),
    st.floats(width=32, allow_nan=False),
)
TEMPERATURES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.6, 1e-45, 1e-38, 9.9e-31, 1e-30, 1e30, 1.1e30, BIG]),
    st.floats(1 / 64, 8, width=32),
)
KEYS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(1, 2**62)


def draw(sampler: Sampler, row: Float32Array, key: int, position: int, temperature: float) -> int:
    words = (np.array([key], np.uint64), np.array([position], np.int64), np.array([temperature], np.float32))
    return int(sampler(row[None], *words)[0])


def agree(row: Float32Array, key: int, position: int, temperature: float) -> None:
    """Both samplers draw the same id, or none."""
    given_row = (row, key, position, temperature)
    assert draw(dice.sample, *given_row) == draw(dice.sample_reference, *given_row)


@settings(max_examples=1000)
@given(
    arrays.arrays(np.float32, st.integers(1, 400), elements=LOGITS, fill=LOGITS),
    KEYS,
    POSITIONS,
    TEMPERATURES,
)
@example(np.full(300, -np.inf, np.float32), 1, 1, 1.0)
@example(np.full(300, BIG, np.float32), 1, 1, 0.5)
@example(np.full(300, -BIG, np.float32), 1, 1, 0.5)
@example(np.array([-0.0, 0.0], np.float32), 1, 1, 0.0)
def test_any_logits(row: Float32Array, key: int, position: int, temperature: float) -> None:
    agree(row, key, position, temperature)


@settings(max_examples=300)
@given(
    KEYS, POSITIONS, TEMPERATURES, st.integers(1, 2000), st.sampled_from([0.0, 0.1, 2.0, 8.0]), st.booleans()
)
def test_model_like_logits(
    key: int, position: int, temperature: float, vocab: int, spread: float, filtered: bool
) -> None:
    """bfloat16-quantised logits, equal ones among them (spread 0: all), some cut to few ids as by top-k."""
    rng = np.random.default_rng(key % 2**32)
    row = (10 + spread * rng.standard_normal(vocab)).astype(np.float32)
    row = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if filtered:
        row[rng.permutation(vocab)[: vocab - 1 - vocab // 50]] = -np.inf
    agree(row, key, position, temperature)


@settings(max_examples=300)
@given(KEYS, POSITIONS, st.integers(2, 500), st.floats(1 / 16, 4, width=32))
def test_near_ties(key: int, position: int, vocab: int, temperature: float) -> None:
    """Logits chosen to cancel the noise: all scores equal up to rounding, so a pruned winner would show."""
    noise = dice.gumbel(key, position, np.arange(vocab))
    agree((np.float32(20) - noise) * np.float32(temperature), key, position, temperature)


@settings(max_examples=100)
@given(KEYS, POSITIONS, st.integers(1, 8))
def test_near_ties_at_the_tightest_bounds(key: int, position: int, count: int) -> None:
    """Ids whose bound barely exceeds their score, tied with ids whose bound is loose and which are tried first."""
    ids = np.arange(1 << 16)
    noise = dice.gumbel(key, position, ids)
    half = (dice.hash_words(key, position, ids) >> np.uint32(1)).astype(np.float32)
    slack = np.log(2.0) * (158 - half.view(np.int32) / 2.0**23) - noise
    order = np.argsort(slack)
    row = np.full(ids.size, -np.inf, np.float32)
    kept = np.concatenate([order[:count], order[-2:]])
    row[kept] = np.float32(20) - noise[kept]
    row[order[:count]] += np.float32(2e-4)  # the tight ids win, by less than any bound's slack may be short
    agree(row, key, position, 1.0)


@settings(max_examples=200)
@given(KEYS, POSITIONS, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_noise_stays_within_its_stated_bounds(key: int, position: int, tokens: list[int]) -> None:
    """The sampler skips blocks by the largest noise there is and ids by G <= -log u."""
    noise = dice.gumbel(key, position, tokens).astype(np.float64)
    uniform = (dice.hash_words(key, position, tokens).astype(np.float64) + 0.5) / 2**32
    assert ((noise >= -2.8116) & (noise <= np.minimum(22.875, -np.log(uniform) + 1e-5))).all()

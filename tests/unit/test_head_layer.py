"""The native layer of a draft head against the one in torch, over rows that grow, go back and move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.random import Generator
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting import native_decoder
from paceline.drafting.head_layer import (
    HeadLayer,
    LayerShape,
    LayerWeights,
    NativeLayer,
    TorchLayer,
    make_layer,
)

ROWS, POSITIONS = 5, 128
TOLERANCE = {"bfloat16": 0.02, "int8": 0.06}
"""Of the largest output."""


def make_weights(hidden: int, inputs: int, inner: int, heads: int, keys: int, head_dim: int) -> LayerWeights:
    torch.manual_seed(0)

    def draw(outputs: int, size: int) -> torch.Tensor:
        return torch.randn(outputs, size) / size**0.5

    return LayerWeights(
        draw(hidden, 2 * hidden),
        draw(heads * head_dim, inputs),
        draw(keys * head_dim, inputs),
        draw(keys * head_dim, inputs),
        draw(hidden, heads * head_dim),
        1 + torch.rand(hidden),
        draw(inner, hidden),
        draw(inner, hidden),
        draw(hidden, inner),
    )


def make_shape(head_dim: int, activation: str = "silu") -> LayerShape:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    half = head_dim // 2
    return LayerShape(head_dim, 1e-5, activation, cos[0, :, None, :half], sin[0, :, None, :half], ROWS)


def feed(
    layers: list[HeadLayer], random: Generator, sizes: tuple[int, int], known: list[int]
) -> list[torch.Tensor]:
    """One call over some rows, of which some go back first; `known` is brought up to date."""
    rows = np.flatnonzero(random.random(ROWS) < 0.7)
    if not len(rows):
        return [torch.zeros(1)] * len(layers)
    starts = np.array([random.integers(max(known[row] - 6, 0), known[row] + 1) for row in rows])
    counts = random.integers(1, 14, len(rows))
    counts = np.minimum(counts, POSITIONS - starts)
    for row, stop in zip(rows.tolist(), (starts + counts).tolist(), strict=True):
        known[row] = min(stop, POSITIONS - 1)
    hidden, inputs = sizes
    x, residual = torch.randn(int(counts.sum()), inputs), torch.randn(int(counts.sum()), hidden)
    before = residual.clone()
    made = [layer.run(x, residual, rows, starts, counts) for layer in layers]
    assert torch.equal(before, residual)
    return made


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("hidden", "inputs", "inner", "heads", "keys", "head_dim"),
    [(64, 64, 96, 4, 2, 16), (96, 192, 112, 6, 2, 32), (128, 128, 256, 3, 1, 64)],
)
def test_native_and_torch_agree(
    storage: str,
    hidden: int,
    inputs: int,
    inner: int,
    heads: int,
    keys: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if storage == "int8":
        monkeypatch.setattr(native_decoder, "INT8_WEIGHTS", 0)
    weights = make_weights(hidden, inputs, inner, heads, keys, head_dim)
    shape = make_shape(head_dim)
    native, plain = make_layer(weights, shape, native=True), TorchLayer(weights, shape)
    assert isinstance(native, NativeLayer)
    both = [native, plain]
    x = torch.randn(70, 2 * hidden)
    fused, expected = (layer.fuse(x) for layer in both)
    assert (fused - expected).abs().max() < TOLERANCE[storage] * expected.abs().max()
    random, known = np.random.default_rng(1), [0] * ROWS
    for number in range(30):
        made, expected = feed(both, random, (hidden, inputs), known)
        assert (made - expected).abs().max() <= TOLERANCE[storage] * expected.abs().max()
        if number % 7 == 6:
            source, target = random.permutation(ROWS)[:2].tolist()
            for layer in both:
                layer.copy(source, target, 0, known[source])
            known[target] = known[source]


def test_nan_of_a_row_does_not_stay() -> None:
    """Of a row that begins anew, and of the rows beside it."""
    weights, shape = make_weights(64, 64, 96, 4, 2, 16), make_shape(16)
    both: list[HeadLayer] = [NativeLayer(weights, shape), TorchLayer(weights, shape)]
    zeros, rows, counts = np.zeros(2, np.int64), np.arange(2), np.array([9, 6])
    x, residual = torch.randn(15, 64), torch.randn(15, 64)
    x[3] = torch.nan
    for layer in both:
        made = layer.run(x, residual, rows, zeros, counts)
        assert torch.isnan(made[8]).any()
        layer.clear(0)
    x = torch.randn(7, 64)
    made, expected = (layer.run(x, residual[:7], rows, np.array([0, 6]), np.array([5, 2])) for layer in both)
    assert torch.isfinite(made).all()
    assert (made - expected).abs().max() < 0.02 * expected.abs().max()


def test_other_sizes_and_activations_are_torchs() -> None:
    weights = make_weights(64, 64, 96, 4, 2, 16)
    assert isinstance(make_layer(weights, make_shape(16, "gelu"), native=True), TorchLayer)
    assert isinstance(make_layer(weights, make_shape(16), native=False), TorchLayer)
    odd = make_weights(64, 64, 88, 4, 2, 16)
    assert isinstance(make_layer(odd, make_shape(16), native=True), TorchLayer)


def test_what_does_not_fit_is_refused() -> None:
    weights, shape = make_weights(64, 64, 96, 4, 2, 16), make_shape(16)
    layer = NativeLayer(weights, shape)
    one = np.ones(1, np.int64)
    for rows, starts, counts, size in (
        (one * ROWS, one, one, 1),
        (one, one * POSITIONS, one, 1),
        (one, one, one * 3, 2),
        (one, one, one, 2),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            layer.run(torch.zeros(size, 64), torch.zeros(size, 64), rows, starts, counts)
    with pytest.raises(ValueError, match="do not fit"):
        layer.fuse(torch.zeros(2, 64))

"""The linear layers for CPUs without a matrix unit: right, the same bits in any batch, and renewed with the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import make_model

from paceline._linear import HAS_DOT
from paceline.config import EngineSettings
from paceline.engine import linear
from paceline.engine.arguments import engine_arguments
from paceline.engine.linear import pack, replacing_kernels
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError
from paceline.processor import LinearKernel
from paceline.types import RolloutRequest

DOT = pytest.mark.skipif(not HAS_DOT, reason="no bfloat16 dot product (avx512_bf16)")
each_kernel = pytest.mark.parametrize(
    "dot", [False, pytest.param(True, marks=DOT)], ids=["multiply-adds", "dot"]
)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dot: bool) -> torch.Tensor:
    return linear.multiply(x, pack(weight, dot), bias, len(weight), dot)


@each_kernel
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 45),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_are_right_and_the_same_bits_in_any_batch(
    dot: bool, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    inputs += inputs % 2 if dot else 0
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    y = product(x, weight, bias, dot)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().T + 1
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * inputs * 2**-24).all()
    cut = int(torch.randint(rows + 1, (), generator=generator))
    parts = [product(part, weight, bias, dot) for part in (x[:cut], x[cut:]) if len(part)]
    assert torch.equal(torch.cat(parts), y)


@pytest.mark.parametrize("rows", range(1, 16))
@pytest.mark.parametrize("outputs", [1, 13, 64, 75])
def test_each_output_is_one_chain_of_multiply_adds(rows: int, outputs: int) -> None:
    """The same bits on every instruction set: products of two bfloat16 are exact, fused or not."""
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(rows, 70, generator=generator).bfloat16()
    weight = torch.randn(outputs, 70, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    sums = bias.float().expand(rows, outputs)
    for k in range(70):
        sums = sums + x[:, k : k + 1].float() * weight[:, k].float()
    assert torch.equal(product(x, weight, bias, dot=False), sums.bfloat16())


@each_kernel
def test_threads_change_no_bit(dot: bool) -> None:
    x, packed = torch.randn(40, 700).bfloat16(), pack(torch.randn(1500, 700).bfloat16(), dot)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(linear.multiply(x, packed, None, 1500, dot))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@each_kernel
@pytest.mark.parametrize("rows", [0, 700, 1025])
def test_none_and_many_rows(rows: int, dot: bool) -> None:
    x, weight = torch.randn(rows, 24).bfloat16(), torch.randn(70, 24).bfloat16()
    y = product(x, weight, None, dot)
    assert y.shape == (rows, 70)
    assert all(torch.equal(y[i], product(x[i], weight, None, dot)) for i in range(rows))


@each_kernel
def test_any_shape_of_activations_and_what_is_not_finite(dot: bool) -> None:
    weight = torch.randn(40, 8).bfloat16()
    x = torch.randn(2, 3, 16).bfloat16()[..., ::2]
    y = product(x, weight, None, dot)
    assert y.shape == (2, 3, 40)
    assert torch.equal(y[1, 2], product(x[1, 2], weight, None, dot))
    x[0, 0, 0], x[0, 1, 0] = torch.nan, torch.inf
    y = product(x, weight, None, dot)
    assert y[0, 0].isnan().all()
    assert y[0, 1].isinf().all()
    assert y[1].isfinite().all()
    with pytest.raises(ValueError, match="activations of another number format"):
        product(x.float(), weight, None, dot)


@each_kernel
def test_a_subnormal_number_is_treated_alike_in_any_batch(dot: bool) -> None:
    small = torch.tensor([1, 2, 64, 127], dtype=torch.int16).view(torch.bfloat16).repeat(8)
    weight = torch.randn(40, 32).bfloat16()
    weight[::3] = small
    x = torch.randn(31, 32).bfloat16()
    x[::2] = small
    y = product(x, weight, None, dot)
    assert y.isfinite().all()
    assert all(torch.equal(y[i], product(x[i], weight, None, dot)) for i in range(len(x)))


@DOT
def test_a_layer_with_an_odd_number_of_inputs_keeps_vllms_kernel() -> None:
    with replacing_kernels("paceline-dot"):
        from vllm.model_executor.layers import utils

        layers = [torch.nn.Linear(inputs, 48, bias=False, dtype=torch.bfloat16) for inputs in (33, 34)]
        for layer in layers:
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    odd, even = (layer.cpu_linear for layer in layers)
    assert odd.__module__ != even.__module__ == "paceline.engine.linear"
    x = torch.randn(3, 33).bfloat16()
    assert torch.allclose(odd(x, layers[0].weight, None), layers[0](x), atol=0.05)


def test_what_does_not_fit_is_refused() -> None:
    packed, x = pack(torch.randn(40, 8).bfloat16()), torch.randn(2, 8).bfloat16()
    with pytest.raises(ValueError, match="8 inputs and 40 outputs got 4 inputs"):
        linear.multiply(x[:, :4], packed, None, 40)
    with pytest.raises(ValueError, match="16 inputs and 40 outputs got 8 inputs"):
        linear.multiply(x, packed, None, 40, True)
    with pytest.raises(ValueError, match="2 panels of 32 outputs cannot give 65"):
        linear.multiply(x, packed, None, 65)
    with pytest.raises(ValueError, match="the layer has 7"):
        pack(torch.randn(40, 7).bfloat16(), dot=True)
    with pytest.raises(ValueError, match="a bias of 32"):
        linear.multiply(x, packed, torch.zeros(32).bfloat16(), 40)
    with pytest.raises(ValueError, match="a bias of another number format"):
        linear.multiply(x, packed, torch.zeros(40), 40)
    bias = torch.randn(80).bfloat16()[::2]
    assert torch.equal(linear.multiply(x, packed, bias, 40), linear.multiply(x, packed, bias.clone(), 40))


def kernels(engine: RolloutEngine) -> set[str]:
    model = engine.vllm_engine.model_executor.driver_worker.model_runner.model
    return {layer.cpu_linear.__module__ for layer in model.modules() if hasattr(layer, "cpu_linear")}


@pytest.mark.parametrize(
    ("kernel", "compiled", "tied"),
    [
        ("paceline", False, True),
        ("paceline", True, False),
        pytest.param("paceline-dot", False, True, marks=DOT),
    ],
)
def test_new_weights_reach_them(kernel: LinearKernel, compiled: bool, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    folder = make_model(tmp_path / "old", tie=tied, seed=7)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own = EngineSettings(linear_kernel=kernel, compiled=compiled)

    def start(model: Path, chosen: EngineSettings = own) -> RolloutEngine:
        return RolloutEngine(model, chosen, dtype="bfloat16", max_model_len=512, kv_cache_bytes=1 << 27)

    def tokens(engine: RolloutEngine) -> list[tuple[int, ...]]:
        wanted = [RolloutRequest((1, 5, 9, 13, 7), max_tokens=40, key=i) for i in range(4)]
        return [r.tokens for r in engine.generate(wanted, SamplingParams(temperature=1.0, ignore_eos=True))]

    with start(folder) as engine:
        assert kernels(engine) == {"paceline.engine.linear"}
        before = tokens(engine)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator).bfloat16() * 0.05)
        policy.save_pretrained(tmp_path / "new")
        engine.push_weights(policy.named_parameters())
        after = tokens(engine)
        assert kernels(engine) == {"paceline.engine.linear"}
    assert after != before, "the control"
    with start(tmp_path / "new") as engine:
        assert tokens(engine) == after
    if not compiled:
        with start(folder, own.model_copy(update={"linear_kernel": "vllm"})) as engine:
            assert "paceline.engine.linear" not in kernels(engine)


def test_a_processor_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "HAS_DOT", False)
    with pytest.raises(ConfigError, match=r"linear_kernel='paceline-dot' needs .*avx512_bf16"):
        engine_arguments(EngineSettings(linear_kernel="paceline-dot"))
    with pytest.raises(ConfigError, match="avx512_bf16"), replacing_kernels("paceline-dot"):
        pass

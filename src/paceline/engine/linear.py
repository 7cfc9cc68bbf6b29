"""Linear layers of a bfloat16 target on CPUs without a matrix unit: the same bits in any batch, and faster.

vLLM's CPU backend multiplies through oneDNN, which on such CPUs uses the bfloat16 dot product. Most of Intel's cores
begin one of these in two cycles, and four float32 multiply-adds in the same time; so `paceline._linear` widens the
weights in registers. Each output is one chain of multiply-adds in the order of the inputs, whatever else is in the
batch, so measure 2 of invariance.py is not needed for these layers. Layers of other dtypes, fused experts and quantised
layers keep vLLM's kernels. (docs/decisions/0038-linear-layers.md)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline._linear import PANEL, multiply
from paceline.engine.invariance import mark_invariant

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [outputs, inputs] as panels [panels, inputs, 16, 2] of 32 outputs; the last is filled up with zeros."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    return filled.reshape(-1, 2, PANEL // 2, inputs).permute(0, 3, 2, 1).contiguous()


@contextmanager
def replacing_kernels() -> Iterator[None]:
    """While inside, what vLLM loads gets these layers where its weights are bfloat16 matrices."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_own(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype is not torch.bfloat16:
            dispatch(layer, remove_weight)
            return
        layer.cpu_linear = _kernel(pack(weight.detach()), len(weight))
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_own
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch


def _kernel(packed: torch.Tensor, outputs: int) -> Any:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.paceline.linear(x, packed, bias, outputs)  # type: ignore[no-any-return]

    return mark_invariant(linear)


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    inputs = x.shape[-1]
    if inputs != packed.shape[1] or (bias is not None and len(bias) != outputs):
        raise ValueError(
            f"a layer of {packed.shape[1]} inputs and {outputs} outputs got {inputs} inputs"
            + ("" if bias is None else f" and a bias of {len(bias)}")
        )
    if x.dtype is not torch.bfloat16 or (bias is not None and bias.dtype is not torch.bfloat16):
        raise TypeError(
            f"a bfloat16 layer got {x.dtype}" + ("" if bias is None else f" and a bias of {bias.dtype}")
        )
    rows = x.reshape(-1, inputs).contiguous()
    added = None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    multiply(
        rows.data_ptr(),
        len(rows),
        inputs,
        packed.data_ptr(),
        0 if added is None else added.data_ptr(),
        outputs,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _shape_of_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


_LIBRARY.impl("linear", _linear, "CPU")
torch.library.register_fake("paceline::linear", _shape_of_linear, lib=_LIBRARY)

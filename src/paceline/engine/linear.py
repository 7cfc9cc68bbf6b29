"""Linear layers of a bfloat16 target on CPUs without a matrix unit: the same bits in any batch, and faster.

vLLM's CPU backend multiplies through oneDNN, which on such CPUs uses the bfloat16 dot product. Most of Intel's cores
begin one of these in two cycles, and four float32 multiply-adds in the same time; there `paceline._linear` widens the
weights in registers. AMD's begin one in every cycle; there it uses the dot product too, and reads the weights while it
multiplies. With AVX2 alone oneDNN does not multiply bfloat16; there the weights are widened too. Each output is one
chain of multiply-adds in a fixed order, whatever else is in the batch, so measure 2 of invariance.py is not needed for
these layers. Layers of other dtypes, fused experts and quantised layers keep vLLM's kernels.
(docs/decisions/0038-linear-layers.md)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline._linear import HAS_DOT, PANEL, serve_torch
from paceline.engine.installed import torch_library
from paceline.engine.invariance import mark_invariant
from paceline.errors import ConfigError
from paceline.processor import LinearKernel

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor packed, Tensor bias, int outputs, bool dot) -> Tensor")
_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


def pack(weight: torch.Tensor, dot: bool = False) -> torch.Tensor:
    """A weight [outputs, inputs] in panels of 32 outputs, the last one filled up with zeros.

    Returns [panels, inputs, 16, 2], the two being outputs; with dot, for an even number of inputs,
    [panels, inputs / 2, 2, 16, 2], the last two being inputs. Raises ValueError for an odd number of these.
    """
    serve_torch(torch_library())  # the operator has its kernel before it has a layer
    outputs, inputs = weight.shape
    if dot and inputs % 2:
        raise ValueError(
            f"the dot product takes two inputs at a time, the layer has {inputs}: pack it without"
        )
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    if dot:
        return filled.reshape(-1, 2, PANEL // 2, inputs // 2, 2).permute(0, 3, 1, 2, 4).contiguous()
    return filled.reshape(-1, 2, PANEL // 2, inputs).permute(0, 3, 2, 1).contiguous()


def check_kernel(name: str) -> None:
    """Raises ConfigError where a value of `EngineSettings.linear_kernel` cannot be had."""
    if name == "paceline-dot" and not HAS_DOT:
        raise ConfigError(
            "linear_kernel='paceline-dot' needs a processor, and a compiler at installation, with AVX-512's bfloat16 "
            "dot product (avx512_bf16): give all engines of the run 'paceline' or 'vllm' (unset, the processor that "
            "makes the settings decides)"
        )


@contextmanager
def replacing_kernels(kernel: LinearKernel) -> Iterator[None]:
    """While inside, what vLLM loads gets these layers where its weights are bfloat16 matrices.

    With paceline-dot, layers with an odd number of inputs keep vLLM's kernels, and attention has a kernel of its own
    too (attention.py); with vllm, all keep theirs. Raises ConfigError
    where the processor lacks what the kernel needs.
    """
    check_kernel(kernel)
    if kernel == "vllm":
        yield
        return
    dot = kernel == "paceline-dot"
    from vllm.model_executor.layers import utils

    from paceline.engine.attention import replacing_attention

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_own(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        fits = not weight.is_meta and weight.ndim == 2 and weight.dtype is torch.bfloat16
        if not fits or (dot and weight.shape[1] % 2):
            dispatch(layer, remove_weight)
            return
        layer.cpu_linear = _kernel(pack(weight.detach(), dot), len(weight), dot)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_own
    try:
        with replacing_attention() if dot else nullcontext():
            yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch


def _kernel(packed: torch.Tensor, outputs: int, dot: bool) -> Any:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, packed, bias, outputs, dot)

    return mark_invariant(linear)


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, dot: bool = False
) -> torch.Tensor:
    """A layer's product with x [..., inputs], plus its bias [outputs]: [..., outputs], all bfloat16.

    packed: what `pack` made. Raises ValueError for what does not fit together, or is in another number format.
    """
    added = _NO_BIAS if bias is None else bias.contiguous()
    return torch.ops.paceline.linear(x.contiguous(), packed, added, outputs, dot)  # type: ignore[no-any-return]


def _shape_of_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, outputs: int, dot: bool
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


torch.library.register_fake("paceline::linear", _shape_of_linear, lib=_LIBRARY)

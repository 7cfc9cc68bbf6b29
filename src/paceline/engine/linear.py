"""Linear layers of a bfloat16 target on CPUs without a matrix unit: the same bits in any batch, and faster.

vLLM's CPU backend multiplies through oneDNN, which on such CPUs uses the bfloat16 dot product. Most of Intel's cores
begin one of these in two cycles, and four float32 multiply-adds in the same time; there `paceline._linear` widens the
weights in registers. AMD's begin one in every cycle; there it uses the dot product too, and reads the weights while it
multiplies. Each output is one chain of multiply-adds in a fixed order, whatever else is in the batch, so measure 2 of
invariance.py is not needed for these layers. Layers of other dtypes, fused experts and quantised
layers keep vLLM's kernels. (docs/decisions/0038-linear-layers.md)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline._linear import HAS_DOT, PANEL, multiply
from paceline.engine.invariance import mark_invariant
from paceline.errors import ConfigError
from paceline.processor import LinearKernel

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor packed, Tensor? bias, int outputs, bool dot=False) -> Tensor")


def pack(weight: torch.Tensor, dot: bool = False) -> torch.Tensor:
    """A weight [outputs, inputs] in panels of 32 outputs, the last one filled up with zeros.

    Returns [panels, inputs, 16, 2], the two being outputs; with dot, for an even number of inputs,
    [panels, inputs / 2, 2, 16, 2], the last two being inputs. Raises ValueError for an odd number of these.
    """
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
        return torch.ops.paceline.linear(x, packed, bias, outputs, dot)  # type: ignore[no-any-return]

    return mark_invariant(linear)


def _linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, dot: bool = False
) -> torch.Tensor:
    inputs, wanted = x.shape[-1], packed.shape[1] * (2 if dot else 1)
    if outputs > packed.shape[0] * PANEL:
        raise ValueError(f"{packed.shape[0]} panels of {PANEL} outputs cannot give {outputs}")
    if inputs != wanted or (bias is not None and len(bias) != outputs):
        raise ValueError(
            f"a layer of {wanted} inputs and {outputs} outputs got {inputs} inputs"
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
        dot,
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
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, dot: bool = False
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


_LIBRARY.impl("linear", _linear, "CPU")
torch.library.register_fake("paceline::linear", _shape_of_linear, lib=_LIBRARY)

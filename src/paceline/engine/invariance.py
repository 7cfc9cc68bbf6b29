"""Bitwise batch invariance of vLLM's CPU backend: the same logits for a token whatever else is in the batch.

Three causes, three measures (docs/engine.md tells how each was found):

1. The attention kernel may split a long context over threads, by batch: `VLLM_CPU_ATTN_SPLIT_KV=0`.
2. oneDNN blocks the inner dimension of a product differently for a single row: a single row is computed twice. (Not
   where linear.py has replaced its kernels.)
3. The attention kernel picks its tile by the number of query tokens of a request: each request is presented as
   several rows of at most `MAX_QUERY` query tokens. The step's keys and values are written before attention runs, so
   this is exact. (Not where attention.py has replaced the kernel.)

Compiled code is made for two tokens and more, without measure 2's branch for one, so a compiled step of one token is
padded to two (compiled.py). The output head is not compiled; where measure 2 is needed it keeps the branch.

On a GPU vLLM has its own switch (`VLLM_BATCH_INVARIANT=1`), which this module leaves alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import torch

from paceline.engine.compiled import is_invariant

MAX_QUERY = 8
"""Most query tokens of one attention row."""

_MARK = "_paceline_invariant"


def prepare_environment() -> None:
    """Measure 1. Must run before the engine's first step, in the process of the worker."""
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def pad_single_rows(model: torch.nn.Module) -> int:
    """Measure 2: wrap the linear kernels of a loaded model. Idempotent; run again after a weight update.

    Returns the number of layers whose kernel is invariant now.
    """
    count = 0
    for layer in model.modules():
        kernel = getattr(layer, "cpu_linear", None)
        if kernel is None:
            continue
        count += 1
        if not getattr(kernel, _MARK, False):
            layer.cpu_linear = _twice_if_single(kernel)
    return count


def describe_gap(model: torch.nn.Module) -> str | None:
    """What measure 2 does not reach in a loaded model: fused experts and quantised layers have kernels of their own.

    None where every product with weights is protected.
    """
    layers = [layer for layer in model.modules() if getattr(layer, "quant_method", None) is not None]
    bare = {
        f"{type(layer).__name__} ({type(layer.quant_method).__name__})"
        for layer in layers
        if not hasattr(layer, "cpu_linear")
    }
    if not bare:
        return None
    return (
        f"batch invariance is not ensured for {', '.join(sorted(bare))}: a response may part ways with itself in "
        "another batch where two tokens are nearly as good"
    )


def describe_attention(layers: Iterable[Any]) -> str | None:
    """What vLLM's batch-invariant mode leaves open on a GPU, of the layers that it attends with; None: nothing known.

    On an H100 FlashAttention 3 gave a token other bits when it was read again than when it was generated, beyond some
    128 tokens of context; Triton's attention did not (docs/gpu.md).
    """
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    if "FLASH_ATTN" not in backends:
        return None
    return (
        "FlashAttention gives a token that is read again other bits than when it was generated: a response that was "
        "cut may part ways with itself where two tokens are nearly as good; for the same bits start the engine with "
        "attention_backend='TRITON_ATTN'"
    )


def _twice_if_single(kernel: Any) -> Any:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.numel() != x.shape[-1]:
            return kernel(x, weight, bias)  # type: ignore[no-any-return]
        shape = x.shape
        doubled = x.reshape(1, -1).expand(2, -1).contiguous()
        result: torch.Tensor = kernel(doubled, weight, bias)[:1]
        return result.reshape(*shape[:-1], -1)

    return mark_invariant(linear)


def mark_invariant(kernel: Any) -> Any:
    """The kernel, marked as one that needs no measure."""
    setattr(kernel, _MARK, True)
    return kernel


def split_queries(metadata: Any) -> Any:
    """Measure 3: vLLM's common attention metadata with each request cut into rows of at most MAX_QUERY query tokens.

    Row k of a request with context c (tokens before the step) covers its query tokens [k * MAX_QUERY, ...), attends to
    c plus everything up to its own end, and shares the request's block table.
    """
    starts = metadata.query_start_loc.to(torch.int64)
    lengths = starts[1:] - starts[:-1]
    pieces = ((lengths + MAX_QUERY - 1) // MAX_QUERY).clamp_min(1)
    row = torch.repeat_interleave(torch.arange(len(lengths)), pieces)
    piece = torch.arange(len(row)) - (torch.cumsum(pieces, 0) - pieces)[row]
    begin = starts[row] + piece * MAX_QUERY
    end = torch.minimum(begin + MAX_QUERY, starts[row + 1])
    context = metadata.seq_lens.to(torch.int64) - lengths
    split = copy.copy(metadata)
    split.seq_lens = (context[row] + end - starts[row]).to(torch.int32)
    split.query_start_loc = torch.cat([begin, end[-1:]]).to(torch.int32)
    split.block_table_tensor = metadata.block_table_tensor[row].contiguous()
    split.num_reqs = len(row)
    split.max_query_len = MAX_QUERY
    return split


def _has_own_attention(builder: Any) -> bool:
    """Whether all layers that a metadata builder works for have an implementation that needs no measure."""
    layers = builder.vllm_config.compilation_config.static_forward_context
    return all(getattr(layers[name].impl, "is_own", False) for name in builder.layer_names)


def patch_attention() -> None:
    """Install measure 3 in the CPU backend's metadata builder, once per process."""
    from paceline.engine.compat import cpu_attention_builder

    builder = cpu_attention_builder()
    if getattr(builder.build, _MARK, False):
        return
    build = builder.build

    def build_split(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        metadata = common_attn_metadata
        is_long = metadata.max_query_len > MAX_QUERY and metadata.causal is True
        if is_long and is_invariant(self.vllm_config) and not _has_own_attention(self):
            metadata = split_queries(metadata)
        return build(self, common_prefix_len, metadata, fast_build)

    setattr(build_split, _MARK, True)
    builder.build = build_split

"""Products of all linear layers of a target, by Paceline's kernels and by vLLM's, over the rows of a step.

vLLM's are oneDNN's, or PyTorch's own where the processor has nothing that oneDNN multiplies bfloat16 by.

The shapes are those of the inflated Countdown policy: 16 layers, 189 M parameters, more than any cache holds. bfloat16.
Milliseconds are medians of interleaved repetitions; `ratio` and `dot_ratio` are vLLM's time over that of Paceline's two
kernels, the second where the processor has the bfloat16 dot product.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import median, parser, publish

SHAPES = ((1024, 2048), (1024, 1024), (1024, 5632), (2816, 1024))
"""Inputs and outputs of a layer's products."""
NUM_LAYERS = 16
COLUMNS = ("rows", "vllm_ms", "paceline_ms", "ratio", "paceline-dot_ms", "dot_ratio")
RATIOS = {"paceline": "ratio", "paceline-dot": "dot_ratio"}


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 14, 16, 20, 24, 32, 64, 128, 512]
    )
    made.add_argument("--repetitions", type=int, default=9)
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import torch
    from vllm import _custom_ops as ops

    from paceline._linear import HAS_DOT
    from paceline.engine.linear import pack

    torch.set_num_threads(options.threads)
    weights = [
        [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in SHAPES] for _ in range(NUM_LAYERS)
    ]
    try:
        handlers = [[ops.create_onednn_mm(weight.t(), 32) for weight in layer] for layer in weights]
    except RuntimeError:  # as vLLM's own dispatch does
        handlers = []

    def multiply_by_vllm(layer: int, at: int, x: Any) -> Any:
        if handlers:
            return ops.onednn_mm(handlers[layer][at], x, None)
        return torch.nn.functional.linear(x, weights[layer][at])

    systems: dict[str, Callable[[int, int, Any], Any]] = {"vllm": multiply_by_vllm}
    for name, dot in (("paceline", False), ("paceline-dot", True)):
        if HAS_DOT or not dot:
            packed = [[pack(weight, dot) for weight in layer] for layer in weights]
            systems[name] = partial(multiply, packed, dot)

    def take_ms(system: str, rows: int) -> float:
        activations = [torch.randn(rows, inputs).bfloat16() for inputs, _ in SHAPES]
        begin_s = time.perf_counter()
        for layer in range(NUM_LAYERS):
            for at, x in enumerate(activations):
                systems[system](layer, at, x)
        return 1e3 * (time.perf_counter() - begin_s)

    rows = []
    for count in options.rows:
        times = [[take_ms(name, count) for name in systems] for _ in range(options.repetitions)]
        found = dict(zip(systems, map(median, zip(*times, strict=True)), strict=True))
        row: dict[str, Any] = {"rows": count}
        for name, ms in found.items():
            row[f"{name}_ms"] = ms
        row |= {key: found["vllm"] / found[name] for name, key in RATIOS.items() if name in found}
        rows.append(row)
    publish("linear", rows, COLUMNS, options)


def multiply(packed: list[list[Any]], dot: bool, layer: int, at: int, x: Any) -> Any:
    """By Paceline's kernels."""
    from paceline.engine import linear

    return linear.multiply(x, packed[layer][at], None, SHAPES[at][1], dot)


if __name__ == "__main__":
    main()

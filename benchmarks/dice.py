"""Time of one keyed draw: the native pruned sampler beside a plain softmax draw.

    python benchmarks/dice.py [--json FILE] [--seconds 0.3]

Logits: `normal` (standard deviation 2, as of an untrained model), `peaked` (a few ids far above the rest, as of a
trained one), `flat` (all equal: nothing can be skipped by its logit). Best of all repetitions within `--seconds`.
`over_native`: the time over that of the native sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import parser, publish

from paceline import dice
from paceline.types import Float32Array

COLUMNS = ("vocab", "rows", "case", "system", "ns_per_logit", "us_per_call", "over_native")
SHAPES = [(1, 64), (128, 64), (1, 32_000), (16, 32_000), (1, 152_064), (16, 152_064)]


def make_logits(case: str, num_rows: int, vocab: int) -> Float32Array:
    rng = np.random.default_rng(vocab)
    logits = np.zeros((num_rows, vocab), np.float32)
    if case != "flat":
        logits += (2 * rng.standard_normal((num_rows, vocab))).astype(np.float32)
    if case == "peaked":
        likely = rng.integers(0, vocab, (num_rows, 20))
        np.put_along_axis(logits, likely, 8 + rng.exponential(6, likely.shape).astype(np.float32), axis=1)
    return logits


def time_call(call: Callable[[], object], seconds: float) -> float:
    """Shortest of the calls that fit into `seconds` (at least three), in seconds."""
    call()
    shortest, spent, calls = float("inf"), 0.0, 0
    while spent < seconds or calls < 3:
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        shortest, spent, calls = min(shortest, elapsed), spent + elapsed, calls + 1
    return shortest


def list_systems(logits: Float32Array) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(1)
    num_rows = len(logits)
    keys = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    positions = rng.integers(1, 10_000, num_rows)
    temperatures = np.ones(num_rows, np.float32)
    out = np.empty(num_rows, np.int64)
    tensor = torch.from_numpy(logits)
    return {
        "native": lambda: dice.sample(logits, keys, positions, temperatures, out),
        "multinomial": lambda: torch.multinomial(tensor.softmax(dim=1), 1),
    }


def measure(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for num_rows, vocab in SHAPES:
        for case in ("normal", "peaked", "flat"):
            logits = make_logits(case, num_rows, vocab)
            native_s = 0.0
            for system, call in list_systems(logits).items():
                elapsed = time_call(call, seconds)
                row: dict[str, Any] = {"case": case, "system": system, "rows": num_rows, "vocab": vocab}
                row |= {"ns_per_logit": elapsed * 1e9 / logits.size, "us_per_call": elapsed * 1e6}
                native_s = native_s or elapsed  # the native sampler comes first
                row["over_native"] = elapsed / native_s
                rows.append(row)
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=0.3, help="time for each measurement")
    options = made.parse_args()
    torch.set_num_threads(1)
    publish("dice", measure(options.seconds), COLUMNS, options)


if __name__ == "__main__":
    main()

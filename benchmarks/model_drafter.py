"""Cost of the model drafter: milliseconds per drafted position over batch size and depth.

Each call drafts `depth` positions for every request; between calls a random share of the draft is accepted
and one other token follows, as a verifier would do, so that roll-back and catch-up are part of the time.
`ms_per_depth` is the time of a call over its depth (median; `best_ms_per_depth` is the fastest call, which
tells a busy machine from a slow drafter), `us_per_token` the median per request, and
`speedup_over_first_batch` how much cheaper a drafted token is than at the first batch size.

Without --model a random model of the size of the shipped Countdown drafter is used (0.4M parameters, 2
layers, 64 ids): the cost does not depend on the weights.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import median, parser, publish

from paceline.drafting.model import ModelDrafter
from paceline.drafting.proposal import NUM_CELLS
from paceline.types import DraftQuery

GRID = np.array([1.0, 1.5, 2.0, 3.0, np.inf], np.float32)
COLUMNS = (
    "case",
    "ms_per_call",
    "ms_per_depth",
    "best_ms_per_depth",
    "us_per_token",
    "speedup_over_first_batch",
)
ROUNDS = 3
WARM_CALLS = 2


def make_checkpoint(folder: Path) -> Path:
    """A random Qwen2 of the size of the Countdown drafter."""
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class Replay:
    """Requests of one batch with made-up acceptance; contexts are views of one token buffer."""

    def __init__(self, drafter: ModelDrafter, batch: int, context: int, room: int) -> None:
        self.drafter = drafter
        self.rng = np.random.default_rng(batch)
        self.buffer = self.rng.integers(0, drafter.vocab_size, (batch, context + room), dtype=np.int32)
        self.lengths = np.full(batch, context, np.int64) - self.rng.integers(0, context // 4, batch)
        self.drafter.forget(range(4096))

    def call(self, depth: int) -> float:
        """One draft and one made-up verification; returns the seconds of the draft."""
        batch = len(self.lengths)
        query = DraftQuery(
            groups=np.zeros(batch, np.int64),
            responses=np.arange(batch),
            keys=np.arange(1, batch + 1, dtype=np.uint64),
            positions=self.lengths.copy(),
            temperatures=np.ones(batch, np.float32),
            max_tokens=np.full(batch, depth, np.int32),
        )
        contexts = [row[:length] for row, length in zip(self.buffer, self.lengths, strict=True)]
        started_s = time.perf_counter()
        drafts, _ = self.drafter.draft(
            contexts,
            query,
            depth,
            sharpness=1.5,
            sharpness_grid=GRID,
            calibration=np.ones(NUM_CELLS, np.float32),
            floor=0.0,
        )
        elapsed_s = time.perf_counter() - started_s
        kept = self.rng.integers(0, depth + 1, batch)
        for row, count in enumerate(kept.tolist()):
            self.buffer[row, self.lengths[row] : self.lengths[row] + count] = drafts.tokens[row, :count]
        self.lengths += kept + 1
        return elapsed_s


def measure(
    drafter: ModelDrafter, batches: Sequence[int], depths: Sequence[int], context: int, calls: int
) -> list[dict[str, Any]]:
    """One row per batch size and depth, from ROUNDS passes through all cases."""
    times: dict[tuple[int, int], list[float]] = {(depth, batch): [] for depth in depths for batch in batches}
    for _ in range(ROUNDS):
        for (depth, batch), samples in times.items():
            replay = Replay(drafter, batch, context, room=(calls + WARM_CALLS) * (depth + 1))
            for _ in range(WARM_CALLS):
                replay.call(depth)
            samples += [1e3 * replay.call(depth) for _ in range(calls)]
    return [_row(times, depth, batch, batches[0], context) for depth, batch in times]


def _row(
    times: dict[tuple[int, int], list[float]], depth: int, batch: int, first: int, context: int
) -> dict[str, Any]:
    call_ms = median(times[depth, batch])
    return {
        "case": f"b{batch}xd{depth}",
        "batch": batch,
        "depth": depth,
        "context": context,
        "ms_per_call": call_ms,
        "ms_per_depth": call_ms / depth,
        "best_ms_per_depth": min(times[depth, batch]) / depth,
        "us_per_token": 1e3 * call_ms / depth / batch,
        "speedup_over_first_batch": median(times[depth, first]) / first * batch / call_ms,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--model", type=Path, metavar="DIR", help="drafter checkpoint (default: a random 0.4M model)"
    )
    options.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    options.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--context", type=int, default=256, help="longest context at the start, tokens")
    options.add_argument("--calls", type=int, default=10, help="measured calls per case and round")
    given = options.parse_args()
    length = given.context + (given.calls + WARM_CALLS) * (max(given.depths) + 1) + max(given.depths)
    with tempfile.TemporaryDirectory() as folder:
        drafter = ModelDrafter(
            given.model or make_checkpoint(Path(folder)),
            max_model_len=length,
            max_requests=max(given.batches),
            dtype=given.dtype,
        )
    rows = measure(drafter, given.batches, given.depths, given.context, given.calls)
    publish("model_drafter", rows, COLUMNS, given, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()

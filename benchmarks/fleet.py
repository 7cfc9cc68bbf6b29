"""What does divided, context-aware rollout give over binding groups to workers, where KV cache is scarce?

One fleet per variant, in turn: `group` (a whole group stays on one worker), `no-context` (divided, in order of
submission), `context` (Seer) and `oracle` (longest first by the lengths that the run before gave). The target is the
Countdown policy, inflated to `--hidden`; every repetition has new prompts, the same for all variants. KV cache is for
`--kv-responses` responses at their limit on each worker. `tail_s` is the time from 90 % of the responses finished to
the last one; `tail_ratio` and `ratio` compare tail and tokens per second with `group` of the same repetition.
`equal` says whether all tokens are those of the first variant; `preemptions` must be 0.

With `--drafts` it measures instead what the draft server is worth: one worker that sees everything, `--workers` workers
with the server and without. `length_ratio` is the acceptance length over that of the one worker.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import median, parser, publish

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("group", "no-context", "context", "oracle")
COLUMNS = (
    "case", "wall_s", "tokens_per_s", "ratio", "tail_s", "tail_ratio", "acceptance_length", "preemptions", "equal",
)  # fmt: skip
DRAFT_COLUMNS = ("case", "wall_s", "tokens_per_s", "acceptance_length", "length_ratio", "equal")
BLOCK_TOKENS = 128
"""Of vLLM's CPU backend."""


@dataclass(frozen=True)
class Run:
    """One rollout."""

    wall_s: float
    tail_s: float
    tokens: list[tuple[int, ...]]
    acceptance_length: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.wall_s


def make_requests(options: argparse.Namespace, seed: int) -> list[Any]:
    """Groups of responses to Countdown prompts that no other seed has."""
    from speed import make_prompts

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    prompts = make_prompts(str(ROOT / "assets/countdown-policy"), options.groups, 1000 + seed)
    return [
        RolloutRequest(
            prompt, options.max_tokens, key=derive_key(seed, prompt, sample), group=number, sample=sample
        )
        for number, prompt in enumerate(prompts)
        for sample in range(options.group_size)
    ]


def start(options: argparse.Namespace, target: str, variant: str, workers: int, draft_server: bool) -> Any:
    """A fleet, with all its workers up."""
    from paceline.config import BudgetSettings, EngineSettings, FleetSettings
    from paceline.fleet.rollout import Fleet

    policy = "marginal" if options.drafts else "off"
    settings = FleetSettings(
        workers=workers,
        variant=variant,
        chunk_tokens=options.chunk_tokens,
        draft_server=draft_server,  # type: ignore[arg-type]
    )
    blocks = options.kv_responses * -(-(options.max_tokens + 32) // BLOCK_TOKENS) + 1
    fleet = Fleet(
        target,
        settings,
        EngineSettings(budget=BudgetSettings(policy=policy)),  # type: ignore[arg-type]
        dtype="bfloat16",
        max_model_len=options.max_tokens + 64,
        kv_cache_bytes=blocks * BLOCK_TOKENS * kv_bytes_per_token(target),
    )
    while any(status.state != "up" for status in fleet.board.workers.values()):
        fleet.advance()
    return fleet


def kv_bytes_per_token(target: str) -> int:
    from paceline.commands.checkpoint import read_checkpoint

    found = read_checkpoint(Path(target)).kv_bytes_per_token("bfloat16")
    assert found is not None
    return found


def roll_out(fleet: Any, requests: list[Any], true_lengths: list[int]) -> Run:
    """One rollout, timed."""
    from vllm import SamplingParams

    from paceline.record import measure_tail

    fleet.take_observations()
    begin_s, ends_s = time.monotonic(), []
    tokens: dict[int, tuple[int, ...]] = {}
    fleet.submit(requests, SamplingParams(temperature=1.0), true_lengths=true_lengths)
    while fleet.num_unfinished:
        for one in fleet.advance():
            tokens[one.index] = one.response.tokens
            ends_s.append(time.monotonic() - begin_s)
    steps = fleet.take_observations()
    decoded = sum(step.num_requests for step in steps)
    accepted = sum(step.num_accepted_tokens for step in steps)
    ordered = [tokens[index] for index in range(len(requests))]
    return Run(max(ends_s), measure_tail(ends_s), ordered, 1 + accepted / max(decoded, 1))


def measure(options: argparse.Namespace, target: str, case: str, fleet_options: tuple[Any, ...],
            lengths: dict[int, list[int]]) -> tuple[list[Run], int]:  # fmt: skip
    """All repetitions of one case; the first rollout warms up."""
    fleet = start(options, target, *fleet_options)
    try:
        runs = []
        for repetition in range(-1, options.repetitions):
            requests = make_requests(options, repetition + 1)
            run = roll_out(fleet, requests, lengths.get(repetition, [options.max_tokens] * len(requests)))
            print(
                f"{case} {repetition}: {run.wall_s:.1f} s, tail {run.tail_s:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            lengths[repetition] = [len(tokens) for tokens in run.tokens]
            runs.append(run)
        return runs[1:], fleet.board.num_preemptions
    finally:
        fleet.close()


def row_of(case: str, runs: list[Run], base: list[Run], preemptions: int) -> dict[str, Any]:
    """Medians, and ratios of the same repetitions."""
    pairs = list(zip(runs, base, strict=True))
    return {
        "case": case,
        "wall_s": median([run.wall_s for run in runs]),
        "tokens_per_s": median([run.tokens_per_s for run in runs]),
        "ratio": median([run.tokens_per_s / other.tokens_per_s for run, other in pairs]),
        "tail_s": median([run.tail_s for run in runs]),
        "tail_ratio": median([run.tail_s / max(other.tail_s, 1e-9) for run, other in pairs]),
        "acceptance_length": median([run.acceptance_length for run in runs]),
        "length_ratio": median([run.acceptance_length / other.acceptance_length for run, other in pairs]),
        "preemptions": preemptions,
        "equal": all(run.tokens == other.tokens for run, other in pairs),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--groups", type=int, default=16)
    made.add_argument("--group-size", type=int, default=8)
    made.add_argument("--max-tokens", type=int, default=640)
    made.add_argument("--chunk-tokens", type=int, default=128)
    made.add_argument(
        "--kv-responses", type=int, default=8, help="responses at their limit that a worker can hold"
    )
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    made.add_argument("--drafts", action="store_true", help="measure the draft server instead")
    made.add_argument("--hidden", type=int, default=512, help="width of the inflated target")
    options = made.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases: dict[str, tuple[Any, ...]] = {name: (name, options.workers, False) for name in options.variants}
    if options.drafts:
        cases = {
            "one worker": ("context", 1, False),
            f"{options.workers} workers, draft server": ("context", options.workers, True),
            f"{options.workers} workers, each for itself": ("context", options.workers, False),
        }
    with tempfile.TemporaryDirectory() as folder:
        from paceline.tasks.inflation import inflate_checkpoint

        target, heads = str(Path(folder) / "target"), options.hidden // 64
        inflate_checkpoint(
            ROOT / "assets/countdown-policy", target, hidden=options.hidden,
            intermediate=11 * options.hidden // 4, layers=8, heads=heads, kv_heads=heads // 2,
        )  # fmt: skip
        lengths: dict[int, list[int]] = {}
        rows: list[dict[str, Any]] = []
        base: list[Run] = []
        for case, fleet_options in cases.items():
            runs, preemptions = measure(options, target, case, fleet_options, lengths)
            base = base or runs
            rows.append(row_of(case, runs, base, preemptions))
    columns = DRAFT_COLUMNS if options.drafts else COLUMNS
    publish(
        "fleet",
        rows,
        columns,
        options.json,
        options={k: str(v) for k, v in vars(options).items() if k != "json"},
    )


if __name__ == "__main__":
    main()

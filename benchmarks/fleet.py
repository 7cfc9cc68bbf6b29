"""What does divided, context-aware rollout give over binding groups to workers, where KV cache is scarce?

One fleet, the variants in turn in every repetition: `group` (a whole group stays on one worker, whose engine gets all
of it at once: vLLM's own admission starts what fits and preempts when KV cache runs out), `group, reserved` (the
same, but a response starts only where its whole KV fits), `no-context` (divided, in order of submission), `context`
(Seer), `even` (ours) and `oracle` (longest first by the lengths that the run before gave). The target is the
Countdown policy, inflated to `--hidden`. Every repetition has new problems, the same for all variants, of 3 or 4
numbers: as in real data, some prompts are harder than others. KV cache is for `--kv-responses` responses at their
limit on each worker, in blocks of `--block-tokens`, of which a chunk has several. `mean_s` is when a response is
finished, on average; `tail_s` the time from 90 % of the responses finished to the last one; `mean_ratio`,
`tail_ratio` and `ratio` compare means, tails and tokens per second with `group` of the same repetition, `over_oracle`
with its oracle; without these among `--variants` they are left out. `equal` says whether all tokens are those of the
first variant. `preemptions` must be 0 but for `group`. `has_kv_pool`: whether chunks that move find their KV cache;
`kv_pool_obstacle`: why not, where a worker says so. Each repetition begins with the next variant, though never with
the oracle.

With `--drafts` it measures instead what the draft server is worth: one worker that sees everything, `--workers` workers
with the server and without. `length_ratio` is the acceptance length over that of the one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import median, parser, publish

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("group", "group, reserved", "no-context", "context", "even", "oracle")
COLUMNS = (
    "case", "wall_s", "tokens_per_s", "ratio", "over_oracle", "mean_s", "mean_ratio", "tail_s", "tail_ratio",
    "preemptions", "equal",
)  # fmt: skip
DRAFT_COLUMNS = ("case", "wall_s", "tokens_per_s", "acceptance_length", "length_ratio", "equal")
ENDLESS = 1 << 40
"""KV blocks and concurrency of a worker that admits what it likes by itself."""


@dataclass(frozen=True)
class Run:
    """One rollout."""

    wall_s: float
    mean_s: float
    tail_s: float
    tokens: list[tuple[int, ...]]
    acceptance_length: float
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.wall_s


def make_requests(options: argparse.Namespace, seed: int) -> list[Any]:
    """Groups of responses to Countdown prompts that no other seed has."""
    from pairs import make_prompts

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    policy = str(ROOT / "assets/countdown-policy")
    prompts = make_prompts(
        policy, options.groups, 1000 + seed, min_numbers=3, max_numbers=options.max_numbers
    )
    return [
        RolloutRequest(
            prompt, options.max_tokens, key=derive_key(seed, prompt, sample), group=number, sample=sample
        )
        for number, prompt in enumerate(prompts)
        for sample in range(options.group_size)
    ]


def start(options: argparse.Namespace, target: str, workers: int, draft_server: bool) -> Any:
    """A fleet, with all its workers up."""
    from paceline.config import BudgetSettings, EngineSettings, FleetSettings
    from paceline.fleet.fleet import Fleet

    policy: Any = "marginal" if options.drafts else "off"
    settings = FleetSettings(workers=workers, chunk_tokens=options.chunk_tokens, draft_server=draft_server)
    blocks = options.kv_responses * -(-(options.max_tokens + 32) // options.block_tokens) + 1
    fleet = Fleet(
        target,
        settings,
        EngineSettings(budget=BudgetSettings(policy=policy)),
        dtype="bfloat16",
        max_model_len=options.max_tokens + 64,
        kv_cache_bytes=blocks * options.block_tokens * kv_bytes_per_token(target),
        block_size=options.block_tokens,
    )
    while any(status.state != "up" for status in fleet.board.workers.values()):
        fleet.advance()
    return fleet


def kv_bytes_per_token(target: str) -> int:
    from paceline.commands.inputs.model_folder import read_checkpoint

    found = read_checkpoint(Path(target)).kv_bytes_per_token("bfloat16")
    assert found is not None
    return found


def use_case(fleet: Any, case: str, rooms: dict[str, Any]) -> None:
    """Dispatch the next rollout as `case` says. rooms: what the controller knows of each worker's KV cache."""
    fleet.use_variant(case.partition(",")[0])
    for name, worker in fleet._controller._workers.items():
        facts = rooms[name]
        admits_itself = replace(facts, num_kv_blocks=ENDLESS, max_concurrency=ENDLESS)
        worker.facts = admits_itself if case == "group" else facts


def roll_out(fleet: Any, requests: list[Any], true_lengths: list[int]) -> Run:
    """One rollout, timed."""
    from vllm import SamplingParams

    from paceline.record import measure_tail

    fleet.take_observations()
    before = fleet.board.num_preemptions
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
    preemptions = fleet.board.num_preemptions - before
    length = 1 + accepted / max(decoded, 1)
    return Run(max(ends_s), fmean(ends_s), measure_tail(ends_s), ordered, length, preemptions)


def measure(fleets: dict[str, Any], options: argparse.Namespace) -> dict[str, list[Run]]:
    """All repetitions of all cases, in turn; a rollout of a quarter of the size warms each up.

    fleets: by case; with one fleet for all, a case is its variant.
    """
    runs: dict[str, list[Run]] = {case: [] for case in fleets}
    rooms = {
        case: {name: worker.facts for name, worker in fleet._controller._workers.items()}
        for case, fleet in fleets.items()
    }
    for repetition in range(options.repetitions + 1):
        requests = make_requests(options, repetition)
        if repetition == 0:
            requests = requests[: len(requests) // 4]
        lengths: list[int] = []
        for case in order_of(list(fleets), repetition):
            if not options.drafts:
                use_case(fleets[case], case, rooms[case])
            run = roll_out(fleets[case], requests, lengths)
            print(
                f"{case} {repetition}: {run.wall_s:.1f} s, tail {run.tail_s:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            lengths = [len(tokens) for tokens in run.tokens]
            runs[case].append(run)
    return {case: found[1:] for case, found in runs.items()}


def pool_of(fleet: Any) -> dict[str, Any]:
    """Whether the workers have a KV pool between them."""
    obstacle = fleet.kv_pool_obstacle
    wanted = fleet.engine_settings.kv_pool is not None
    return {"has_kv_pool": wanted and obstacle is None, "kv_pool_obstacle": obstacle}


def order_of(cases: list[str], repetition: int) -> list[str]:
    """In which the cases have their turns. The oracle, which needs the lengths of a run before, is never the first."""
    turn = repetition % len(cases)
    order = [*cases[turn:], *cases[:turn]]
    return [*order[1:2], "oracle", *order[2:]] if order[0] == "oracle" else order


def row_of(case: str, runs: dict[str, list[Run]], base: str, best: str = "oracle") -> dict[str, Any]:
    """Medians, and ratios of the same repetitions to those of `base` and `best`, None for a case that was not run."""
    own, first = runs[case], next(iter(runs.values()))

    def ratios(other: str, value: Callable[[Run], float]) -> list[float]:
        pairs = zip(own, runs.get(other, ()), strict=other in runs)
        return [value(run) / max(value(its), 1e-9) for run, its in pairs]

    speed = ratios(base, lambda run: run.tokens_per_s)
    return {
        "case": case,
        "wall_s": median([run.wall_s for run in own]),
        "tokens_per_s": median([run.tokens_per_s for run in own]),
        "ratio": _median(speed),
        "ratio_range": [min(speed), max(speed)] if speed else None,
        "over_oracle": _median(ratios(best, lambda run: run.tokens_per_s)),
        "mean_s": median([run.mean_s for run in own]),
        "mean_ratio": _median(ratios(base, lambda run: run.mean_s)),
        "tail_s": median([run.tail_s for run in own]),
        "tail_ratio": _median(ratios(base, lambda run: run.tail_s)),
        "acceptance_length": median([run.acceptance_length for run in own]),
        "length_ratio": _median(ratios(base, lambda run: run.acceptance_length)),
        "preemptions": sum(run.preemptions for run in own),
        "equal": all(run.tokens == other.tokens for run, other in zip(own, first, strict=True)),
    }


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--groups", type=int, default=32)
    made.add_argument("--group-size", type=int, default=8)
    made.add_argument("--max-tokens", type=int, default=640)
    made.add_argument("--chunk-tokens", type=int, default=128)
    made.add_argument(
        "--block-tokens", type=int, default=32, help="of a KV block; vLLM's CPU backend wants 32 n"
    )
    made.add_argument(
        "--kv-responses", type=int, default=8, help="responses at their limit that a worker can hold"
    )
    made.add_argument("--max-numbers", type=int, default=4, help="of a problem; the fewest is 3")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    made.add_argument("--drafts", action="store_true", help="measure the draft server instead")
    made.add_argument("--hidden", type=int, default=512, help="width of the inflated target")
    options = made.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as fleets:
        from paceline.tasks.inflation import inflate_checkpoint

        target, heads = str(Path(folder) / "target"), options.hidden // 64
        inflate_checkpoint(
            ROOT / "assets/countdown-policy", target, hidden=options.hidden,
            intermediate=11 * options.hidden // 4, layers=8, heads=heads, kv_heads=heads // 2,
        )  # fmt: skip

        def open_fleet(workers: int, draft_server: bool) -> Any:
            return fleets.enter_context(start(options, target, workers, draft_server))

        if options.drafts:
            name = f"{options.workers} workers"
            cases = {
                "one worker": open_fleet(1, False),
                f"{name}, draft server": open_fleet(options.workers, True),
                f"{name}, each for itself": open_fleet(options.workers, False),
            }
        else:
            cases = dict.fromkeys(options.variants, open_fleet(options.workers, False))
        runs = measure(cases, options)
        base = "one worker" if options.drafts else "group"
        rows = [row_of(case, runs, base) | pool_of(fleet) for case, fleet in cases.items()]
    columns = DRAFT_COLUMNS if options.drafts else COLUMNS
    publish("fleet", rows, columns, options)


if __name__ == "__main__":
    main()

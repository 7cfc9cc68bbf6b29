"""Help for stragglers: how much sooner does a rollout end if the worker that has fallen free helps the other one?

One fleet of two workers for each drafter cost. A few long responses run on one worker, and as many short ones as take
the same room on the other, which falls free soon. The long ones are the longest of a rollout of held-out prompts, made
before: what a tail consists of. The variants take turns on the very same requests, in another order each time. But for
plain decoding and the second thread they differ in `FleetSettings.help` alone, so "no help" has the same engines,
dispatcher, pool and drafters:

    plain               nobody drafts: both workers verify, with the same dice
    none                no help
    second thread       no help, but the stragglers' engine gets the free worker's core for a second thread
    draft, copy, take   that kind, where it shortens the predicted end
    auto                whichever shortens it most

Each worker is pinned to a core of its own. They are equally fast, so a copy with the same drafters gains nothing here:
it is seldom made, and cancelled soon (docs/fleet.md). Paceline itself has no variant "second thread": it is what else
the core could do.

The target is the inflated Countdown policy, the drafter that of decoupled.py. `tail_s`: from the last short response to
the end; `tail_ratio`: that of "none" over it, in the same repetition. `draft_ms` (D), `verify_ms` (V of one token) and
`d_over_v`: as the stragglers' engine told them last, perhaps in the variant before; `cost` is D/V of one response,
about. `equal`: the tokens are those of "none". The result file is written after every repetition.
"""

from __future__ import annotations

import os
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from decoupled import SIZES, inflate_drafter
from harness import median, parser, print_bars, publish, save
from pairs import PAIRS, TARGETS

SECOND_THREAD = "second thread"
HELPS = ("draft", "copy", "take", "auto")
VARIANTS = ("plain", "none", SECOND_THREAD, *HELPS)
SHORT_TOKENS = 24
SEED = 7
CANDIDATES = 48, 4
"""Prompts and responses to each among which the stragglers are the longest."""
COLUMNS = (
    "case", "stragglers", "cost", "draft_ms", "verify_ms", "d_over_v", "wall_s", "tail_s", "tail_ratio", "ratio_range",
    "helps", "races_won", "leads", "adopted_tokens", "model_share", "wasted_tokens", "equal",
)  # fmt: skip
BAR = 1.15
"""Tail of no help over that of auto, at 1 straggler and a cost of 0.1; with no help may it be below `LEAST`."""
LEAST = 0.98


def start(options: Namespace, target: str, drafter: str) -> Any:
    """A fleet, with both workers up, each on a core."""
    from paceline.config import EngineSettings, FleetSettings
    from paceline.fleet.fleet import Fleet

    fleet = Fleet(
        target,
        FleetSettings(workers=2, help="auto", variant="even"),
        EngineSettings(model_drafter=drafter, compiled=not options.eager),
        dtype="bfloat16",
        max_model_len=options.max_tokens + 64,
        kv_cache_bytes=1 << 30,
    )
    while any(status.state != "up" for status in fleet.board.workers.values()):
        fleet.advance()
    for worker, core in zip(fleet.board.workers, sorted(os.sched_getaffinity(0)), strict=False):
        pin(fleet, worker, {core})
    return fleet


def pin(fleet: Any, worker: str, cores: set[int]) -> None:
    """Let all threads of a worker run on these cores only."""
    for task in Path(f"/proc/{fleet._actors.process(worker)}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def use_threads(worker: Any, count: int) -> None:
    """Called in a worker's process: its engine's steps have so many threads from now on."""
    import torch

    worker._order(lambda: torch._C.set_num_threads(count))


@contextmanager
def second_thread(fleet: Any, worker: str) -> Iterator[None]:
    """A worker has both cores, and a thread on each."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    engine = fleet._actors._actors[worker].handle
    own = os.sched_getaffinity(fleet._actors.process(worker))
    pin(fleet, worker, set(cores))
    engine.__ray_call__.remote(use_threads, 2)
    yield
    engine.__ray_call__.remote(use_threads, 1)
    pin(fleet, worker, own)


def find_long(fleet: Any, options: Namespace) -> list[Any]:
    """The requests of a rollout of `CANDIDATES`, those of the longest responses first."""
    from vllm import SamplingParams

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    pair, (count, samples) = PAIRS["countdown"], CANDIDATES
    requests = [
        RolloutRequest(prompt, options.max_tokens, key=derive_key(SEED, prompt, i), group=group, sample=i)
        for group, prompt in enumerate(pair.draw_prompts(pair.policy, count, SEED))
        for i in range(samples)
    ]
    lengths = [len(response.tokens) for response in fleet.generate(requests, SamplingParams(temperature=1.0))]
    order = sorted(range(len(requests)), key=lambda index: -lengths[index])
    print("longest:", [lengths[index] for index in order[:24]], file=sys.stderr, flush=True)
    return [requests[index] for index in order]


def make_requests(long: list[Any], options: Namespace, block_tokens: int, seed: int) -> list[Any]:
    """Behind each of the long responses short ones that need as many KV blocks, so that dispatch parts them."""
    from dataclasses import replace

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    def blocks(tokens: int) -> int:
        return -(-tokens // block_tokens)

    pair = PAIRS["countdown"]
    prompts = iter(pair.draw_prompts(pair.policy, len(long) * blocks(options.max_tokens + 64), seed))
    made: list[Any] = []
    left = 0  # blocks that the short ones still have to take
    for straggler in long:
        made.append(replace(straggler, group=len(made), sample=0))
        left += blocks(len(straggler.prompt) + straggler.max_tokens)
        while left > 0:
            prompt = next(prompts)
            made.append(
                RolloutRequest(prompt, SHORT_TOKENS, key=derive_key(seed, prompt, 0), group=len(made))
            )
            left -= blocks(len(prompt) + SHORT_TOKENS)
    return made


def roll_out(fleet: Any, requests: list[Any], variant: str) -> dict[str, Any]:
    """One rollout, timed."""
    from vllm import SamplingParams

    from paceline.control.controller import HELP_KINDS

    fleet.set_drafting(variant != "plain")
    fleet._controller._helping.kinds = HELP_KINDS.get(variant, HELP_KINDS["none"])
    fleet.reset_prefix_cache()
    fleet.take_observations()
    fleet.helps.take()
    tokens: dict[int, tuple[int, ...]] = {}
    short = {index for index, one in enumerate(requests) if one.max_tokens == SHORT_TOKENS}
    begin_s = time.monotonic()
    fleet.submit(requests, SamplingParams(temperature=1.0))
    worker = find_straggler(fleet, set(range(len(requests))) - short)

    def await_ends(wanted: set[int]) -> None:
        while not wanted <= tokens.keys():
            tokens.update({one.index: one.response.tokens for one in fleet.advance()})

    await_ends(short)
    short_s = time.monotonic() - begin_s
    with second_thread(fleet, worker.name) if variant == SECOND_THREAD else nullcontext():
        await_ends(set(range(len(requests))))
    wall_s = time.monotonic() - begin_s
    fleet.advance(0.0)  # who still helped rests
    steps, helps = fleet.take_observations(), fleet.helps.take()
    accepted = sum(step.num_accepted_tokens for step in steps)
    return {
        "wall_s": wall_s,
        "tail_s": wall_s - short_s,
        **describe_costs(worker.costs),
        "helps": dict(Counter(one.kind.value for one in helps)),
        "races_won": sum(one.outcome == "won" for one in helps),
        "leads": sum(one.num_leads for one in helps),
        "adopted_tokens": sum(step.num_adopted_tokens for step in steps),
        "model_share": sum(step.num_model_tokens for step in steps) / accepted if accepted else 0.0,
        "wasted_tokens": sum(step.num_wasted_tokens for step in steps),
        "ids": [tokens[index] for index in range(len(requests))],
    }


def describe_costs(costs: Any) -> dict[str, float | None]:
    """D, V and their ratio, as far as an engine has told what its steps cost."""
    if costs is None or not costs.draft_s:
        return {"draft_ms": None, "verify_ms": None, "d_over_v": None}
    verify_s = costs.base_s + costs.token_s
    return {
        "draft_ms": 1e3 * costs.draft_s,
        "verify_ms": 1e3 * verify_s,
        "d_over_v": costs.draft_s / verify_s,
    }


def find_straggler(fleet: Any, long: set[int]) -> Any:
    """The controller's entry of the worker that has these responses, the long ones."""
    have = [
        worker
        for worker in fleet._controller._workers.values()
        if not long.isdisjoint(chunk.response.index for chunk in worker.chunks.values())
    ]
    if len(have) != 1:
        raise SystemExit(f"the long responses run on {len(have)} workers, so none falls free in their tail")
    return have[0]


def summarise(
    variant: str, stragglers: int, cost: float, found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The row of one variant: medians over the repetitions, and the range of the tail's ratio."""
    own, base = found[variant], found.get("none", found[variant])
    ratios = [other["tail_s"] / one["tail_s"] for one, other in zip(own, base, strict=True)]
    helps = sum((Counter(one["helps"]) for one in own), Counter())
    row: dict[str, Any] = {"case": variant, "stragglers": stragglers, "cost": cost}
    for key in (
        "draft_ms",
        "verify_ms",
        "d_over_v",
        "wall_s",
        "tail_s",
        "races_won",
        "leads",
        "adopted_tokens",
        "model_share",
        "wasted_tokens",
    ):
        values = [one[key] for one in own if one[key] is not None]
        row[key] = median(values) if values else None
    row |= {"tail_ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)]}
    row["helps"] = ", ".join(f"{count} {kind}" for kind, count in sorted(helps.items()))
    row["equal"] = [one["ids"] for one in own] == [one["ids"] for one in base]
    return row


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars, which only the tokens of no help can meet."""
    bars = []
    for row in rows:
        if row["case"] in HELPS:
            is_headline = (row["case"], row["stragglers"], row["cost"]) == ("auto", 1, 0.1)
            needed = BAR if is_headline else LEAST
            case = f"{row['case']}, {row['stragglers']} stragglers, D/V {row['cost']}"
            met = row["tail_ratio"] >= needed and row["equal"]
            bars.append({"case": case, "needed": needed, "reached": row["tail_ratio"], "met": met})
    return bars


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    made.add_argument("--stragglers", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--costs", type=float, nargs="+", default=[0.02, 0.1], choices=list(SIZES))
    made.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--max-tokens", type=int, default=512)
    options = made.parse_args()
    target = PAIRS["countdown"].make_target(TARGETS / "countdown")
    rows: list[dict[str, Any]] = []
    long: list[Any] = []
    for cost in options.costs:
        with start(options, target, inflate_drafter(cost)) as fleet:
            long = long or find_long(fleet, options)
            for stragglers in options.stragglers:
                done = len(rows)
                for found in measure(fleet, long, stragglers, options):
                    rows[done:] = [summarise(variant, stragglers, cost, found) for variant in found]
                    save("racing", rows, options, bars=check_rows(rows))
    bars = check_rows(rows)
    publish("racing", rows, COLUMNS, options, bars=bars)
    print_bars(bars)


def measure(fleet: Any, long: list[Any], stragglers: int, options: Namespace) -> Any:
    """After every repetition, by variant, what was found so far; a repetition before the first warms up.

    long: requests whose responses are long, the longest first; each repetition has some of its own.
    """
    facts = next(iter(fleet._controller._workers.values())).facts
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.variants}
    turns = options.repetitions + 1
    for repetition in range(-1, options.repetitions):
        own, seed = long[repetition % turns : turns * stragglers : turns], 100 * stragglers + repetition + 1
        requests = make_requests(own, options, facts.block_tokens, seed)
        for variant in random.Random(seed).sample(options.variants, len(options.variants)):
            result = roll_out(fleet, requests, variant)
            if repetition >= 0:
                found[variant].append(result)
                text = f"tail {result['tail_s']:.1f} s of {result['wall_s']:.1f}, {result['helps']}"
                print(stragglers, variant, text, file=sys.stderr, flush=True)
        if repetition >= 0:
            yield found


if __name__ == "__main__":
    main()

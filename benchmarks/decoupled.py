"""Decoupled speculation on two cores: one verifies, the other drafts ahead (SpecActor 4.1), against the pair coupled.

The target is the inflated Countdown policy. The shipped drafter is nearly free beside it, real ones are not, so it is
inflated too, its function unchanged, until a draft token takes about a tenth or a fifth of a verification: real
arithmetic. `draft_ms` (D, of one token of each response), `verify_ms` (V) and `d_over_v` are those of the steps in
which all responses ran, with both processes busy, each pinned to a core; `cost` is D/V of one, about. Each system's
engine lives in a process of its own; they take turns, and every one generates the same prompts. `running` responses of
different prompts run at once, which are what is left in a tail.

    vanilla               drafts a fixed window, then verifies all of it, on one core; the other one idles
    coupled, one core     the same with the draft budget, which drafts as far as it pays
    coupled, two threads  the same, with both cores for either
    naive                 core 1 drafts a fixed window, then core 0 verifies it: by turns, in lock-step
    chain                 core 0 verifies, core 1 drafts ahead
    reconfigured          the same, with windows and modes planned anew every 64 steps
    decoupled             the same, and core 1 prepares likely corrections
    suffix only, plain    both cores; plain is the target alone, with the same dice
    auto                  chooses live between a drafter inside, with both cores for either, and one ahead, with one
                          core each; suffix trees draft too, as by default

`equal`: the tokens are those of plain. `model_share`: of the accepted tokens, those that the model drafted.
`mode_changes`: responses that went from coupled to decoupled or back, in all repetitions; auto's engine as a whole.
`share_ahead`: steps of auto for which the worker drafted.
`of_protocol`: the speed of the steps in which all of them ran, over what the decoupled protocol gives
(docs/decisions/0003-decoupled-rounds.md) for the draft time, the step times and the acceptance rate measured in
the same rollouts; the chain's at its window, else at the best that the engine may use.
At most five engines are alive, so systems run in blocks, each with one of the coupled pair; where suffix only is in the
block, its engine makes plain too, without drafting. `ratio` compares with the pair's speed, `over_chain`,
`over_reconfigured` and `over_best` (auto, over the best of two threads, decoupled, suffix only and plain) with those of
the same block, in the same repetition each. Two repetitions before the first do not count: engines learn what steps
take, and auto what is faster. No bar is met by tokens that are not equal.
The result file is written after every repetition, with the rows so far.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from harness import Child, median, parser, print_bars, publish, save
from pairs import PAIRS, TARGETS

SIZES = {
    0.02: {"hidden": 512, "intermediate": 1408, "layers": 4, "heads": 8, "kv_heads": 4},
    0.1: {"hidden": 512, "intermediate": 1408, "layers": 18, "heads": 8, "kv_heads": 4},
    0.2: {"hidden": 512, "intermediate": 1408, "layers": 31, "heads": 8, "kv_heads": 4},
}
"""What the drafter is inflated to, by the share of a verification that a draft token shall take, about."""

VANILLA, COUPLED, TWO_THREADS = "vanilla", "coupled, one core", "coupled, two threads"
NAIVE, CHAIN, RECONFIGURED, DECOUPLED = "naive", "chain", "reconfigured", "decoupled"
PLAIN_ONE_CORE, SUFFIX_ONLY, PLAIN, AUTO = "plain, one core", "suffix only", "plain", "auto"
AHEAD = (NAIVE, CHAIN, RECONFIGURED, DECOUPLED)
"""With a draft worker."""
REPLANNED = (RECONFIGURED, DECOUPLED)
"""With windows that are planned anew."""
BLOCKS = (
    (VANILLA, NAIVE, PLAIN),
    (CHAIN, RECONFIGURED, DECOUPLED, PLAIN),
    (TWO_THREADS, DECOUPLED, SUFFIX_ONLY, PLAIN, AUTO),
)
"""Systems that take turns, beside the coupled pair; compared by repetition are those of one block."""
SYSTEMS = (COUPLED, *dict.fromkeys(system for block in BLOCKS for system in block))
RATIOS = {"ratio": COUPLED, "over_chain": CHAIN, "over_reconfigured": RECONFIGURED}
"""Whose speed each of these columns compares with."""
BARS = {(1, 0.1): 1.2, (1, 0.2): 1.3, (4, 0.1): 1.1, (4, 0.2): 1.25}
"""Tokens per second, decoupled over coupled on one core, by running responses and drafter cost."""
AUTO_BAR = 0.95
"""Auto over the best of what it could be, everywhere."""
BRANCHES_BAR = 1.05
"""Decoupled over the chain, and over the same without prepared corrections, one response."""
PROTOCOL_BAR = 0.9
"""Chain, reconfigured and decoupled over what the protocol gives, everywhere."""
CHANGES_BAR = 5
"""Changes of mode by algorithm 2, in all rows; auto's are another decision's."""
REACHED = (TWO_THREADS, DECOUPLED, SUFFIX_ONLY, PLAIN)
"""What auto could be."""
LEAST_SHARE = 0.1
"""Of the accepted tokens, those of the worker, where its speed shall count."""
COLUMNS = (
    "system",
    "running",
    "cost",
    "draft_ms",
    "verify_ms",
    "d_over_v",
    "tokens_per_s",
    "ratio",
    "ratio_range",
    "over_chain",
    "over_reconfigured",
    "over_best",
    "of_protocol",
    "acceptance_length",
    "wasted_tokens",
    "wait_s",
    "mode_changes",
    "share_ahead",
    "model_share",
    "equal",
)


def make_engine(system: str, target: str, drafter: str, options: Any) -> Callable[..., dict[str, Any]]:
    """Start a system's engine in this process; returns what generates once, with or without drafting."""
    has_worker = system in AHEAD
    one_core = has_worker or system in (VANILLA, COUPLED, PLAIN_ONE_CORE)
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.environ["OMP_NUM_THREADS"] = "1" if one_core else "2"
    if one_core:
        os.sched_setaffinity(0, cores[:1])
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine, prepare_environment

    prepare_environment()
    policies = {PLAIN: "off", PLAIN_ONE_CORE: "off", VANILLA: "fixed", NAIVE: "fixed"}
    policy = policies.get(system, "marginal")
    settings = EngineSettings(
        drafter="suffix" if system in (SUFFIX_ONLY, AUTO) else "none",
        model_drafter=drafter if has_worker or system in (VANILLA, COUPLED, TWO_THREADS, AUTO) else None,
        draft_worker="auto" if system == AUTO else has_worker,
        draft_window=options.fixed_window if system == NAIVE else options.window,
        draft_branches=16 if system in (DECOUPLED, AUTO) else 0,
        reconfigure_steps=64 if system in (*REPLANNED, AUTO) else 0,
        draft_by_turns=system == NAIVE,
        budget=BudgetSettings.model_validate({"policy": policy, "fixed_tokens": options.fixed_window}),
        compiled=not options.eager,
    )
    engine = RolloutEngine(
        target, settings, dtype="bfloat16", max_num_seqs=max(options.running), kv_cache_bytes=1 << 30
    )
    judged = Judged()
    if has_worker:
        os.sched_setaffinity(engine.scheduler.loop.ahead.links[0].child.pid, cores[-1:])
        judged.watch(engine.scheduler.loop._trees)

    def serve(requests: list[Any], running: int, drafting: bool = True) -> dict[str, Any]:
        engine.set_drafting(drafting)
        return generate(engine, requests, running, judged)

    return serve


class Judged:
    """Counts draft tokens that were decided, up to the first wrong one of each draft, and the right ones of them."""

    def __init__(self) -> None:
        self.told = self.right = 0

    def watch(self, trees: Any) -> None:
        judge = trees.judge

        def judge_and_count(*of: Any) -> Any:
            told, right = judge(*of)
            self.told, self.right = self.told + int(told.sum()), self.right + int(right.sum())
            return told, right

        trees.judge = judge_and_count

    def take(self) -> float | None:
        """The acceptance rate since the last call."""
        rate = self.right / self.told if self.told else None
        self.told = self.right = 0
        return rate


def generate(engine: Any, requests: list[Any], running: int, judged: Judged) -> dict[str, Any]:
    """Generate all requests, `running` at a time."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    engine.take_observations()
    judged.take()
    ahead, coupling = engine.scheduler.loop.ahead, engine.scheduler.loop.coupling
    changing = coupling or (None if ahead is None else ahead._workers[0].windows)
    changes_before = changing.num_changes if changing else 0
    params, responses = SamplingParams(temperature=1.0), []
    start = time.perf_counter()
    for first in range(0, len(requests), running):
        responses += engine.generate(requests[first : first + running], params)
    seconds = time.perf_counter() - start
    steps = engine.take_observations()
    tokens = sum(len(response.tokens) for response in responses)
    accepted = sum(step.num_accepted_tokens for step in steps)
    full = [step for step in steps if step.num_requests == running and not step.num_prefill_tokens]
    verified = [(step.num_tokens, step.step_s - step.wait_s) for step in full]
    num_drafted = sum(sum(step.ahead_tokens) for step in full)
    has_worker = ahead is not None and coupling is None and num_drafted > 0
    draft_s = running * sum(sum(step.ahead_s) for step in full) / num_drafted if has_worker else None
    verify_s = median([s for _, s in verified]) if has_worker else None
    return {
        "tokens_per_s": tokens / seconds,
        "acceptance_length": tokens / sum(response.num_steps for response in responses),
        "wasted_tokens": sum(step.num_wasted_tokens for step in steps),
        "branches": sum(step.num_branches for step in steps),
        "branch_hits": sum(step.num_branch_hits for step in steps),
        "wait_s": sum(step.wait_s for step in steps),
        "model_share": sum(step.num_model_tokens for step in steps) / accepted if accepted else None,
        "mode_changes": changing.num_changes - changes_before if changing else None,
        "share_ahead": sum(any(step.ahead_tokens) for step in steps) / len(steps) if coupling else None,
        "draft_ms": draft_s and 1e3 * draft_s,
        "verify_ms": verify_s and 1e3 * verify_s,
        "d_over_v": draft_s and verify_s and draft_s / verify_s,
        "acceptance_rate": judged.take(),
        "verified": verified,
        "full_tokens_per_s": sum(step.num_requests + step.num_accepted_tokens for step in full)
        / sum(step.step_s for step in full)
        if full
        else None,
        "ids": [response.tokens for response in responses],
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", help="another target; default: the inflated Countdown policy")
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    made.add_argument("--running", type=int, nargs="+", default=[1, 2, 4, 16])
    made.add_argument("--costs", type=float, nargs="+", default=list(SIZES), choices=list(SIZES))
    made.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--warm-ups", type=int, default=2, help="repetitions before, which do not count")
    made.add_argument(
        "--responses", type=int, default=4, help="of a repetition; as many as run at once, if that is more"
    )
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--window", type=int, default=8)
    made.add_argument("--fixed-window", type=int, default=4, help="of vanilla and naive")
    options = made.parse_args()
    target = options.model or PAIRS["countdown"].make_target(TARGETS / "countdown")
    rows: list[dict[str, Any]] = []
    for cost in options.costs:
        for running, found in measure(cost, target, options):
            rows = [row for row in rows if (row["cost"], row["running"]) != (cost, running)]
            rows += [summarise(system, running, cost, options.window, found) for system in found]
            save("decoupled", rows, options, bars=check_rows(rows))
    bars = check_rows(rows)
    publish("decoupled", rows, COLUMNS, options, bars=bars)
    print_bars(bars)


def measure(cost: float, target: str, options: Any) -> Iterator[tuple[int, dict[str, list[dict[str, Any]]]]]:
    """After every repetition its number of running responses and, by system, what was found with it so far."""
    drafter = inflate_drafter(cost)
    found: dict[int, dict[str, list[dict[str, Any]]]] = {running: {} for running in options.running}
    for block in blocks(options.systems):
        children = {
            system: Child(system, make_engine, system, target, drafter, options) for system in engines(block)
        }
        for child in children.values():
            child.ready()
        for running in options.running:
            for repetition in range(-options.warm_ups, options.repetitions):
                count, seed = max(options.responses, running), 1000 * running + repetition + 1
                requests = make_requests(options, count, seed)
                results = {
                    system: children[maker(system, block)].call(requests, running, system != PLAIN)
                    for system in block[:: 1 if repetition % 2 else -1]
                }
                if repetition < 0:
                    continue
                for system, result in results.items():
                    rate = result["tokens_per_s"]
                    result["repetition"] = repetition
                    result["over"] = {
                        other: rate / theirs["tokens_per_s"] for other, theirs in results.items()
                    }
                    found[running].setdefault(system, []).append(result)
                    print(system, running, cost, f"{rate:.1f} tokens/s", file=sys.stderr, flush=True)
                yield running, found[running]
        for child in children.values():
            child.close()


def blocks(systems: list[str]) -> Iterator[list[str]]:
    """Those of the systems that are alive together, the coupled pair always the first of them; none in vain."""
    wanted = [[system for system in block if system in systems] for block in BLOCKS]
    for place, block in enumerate(wanted):
        others = (set(other) for at, other in enumerate(wanted) if at > place)
        if block and not any(set(block) <= other for other in others):
            yield [COUPLED, *block]


def engines(block: list[str]) -> list[str]:
    """The systems of a block that have an engine of their own."""
    return [system for system in block if maker(system, block) == system]


def maker(system: str, block: list[str]) -> str:
    """Whose engine of the block makes what this system does."""
    return SUFFIX_ONLY if system == PLAIN and SUFFIX_ONLY in block else system


def inflate_drafter(cost: float) -> str:
    """The shipped drafter, as large as this cost needs it."""
    from paceline.tasks.inflation import inflate_checkpoint

    folder = TARGETS / f"countdown-drafter-{cost:g}"
    inflate_checkpoint(PAIRS["countdown"].drafter, folder, **SIZES[cost])
    return str(folder)


def make_requests(options: Any, count: int, seed: int) -> list[Any]:
    """One response to each of some held-out prompts."""
    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    pair = PAIRS["countdown"]
    prompts = pair.draw_prompts(pair.policy, count, seed)
    return [RolloutRequest(p, options.max_tokens, key=derive_key(seed, p, 0)) for p in prompts]


def summarise(
    system: str, running: int, cost: float, window: int, found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The row of one system; medians over the repetitions, and the range of the speed. window: of the draft worker."""
    own = found[system]
    row: dict[str, Any] = {"system": system, "running": running, "cost": cost}
    for key in (
        "tokens_per_s",
        "acceptance_length",
        "wasted_tokens",
        "branches",
        "branch_hits",
        "wait_s",
        "model_share",
        "draft_ms",
        "verify_ms",
        "d_over_v",
        "acceptance_rate",
        "share_ahead",
    ):
        values = [one[key] for one in own if one[key] is not None]
        row[key] = median(values) if values else None
    if system in (*REPLANNED, AUTO):
        row["mode_changes"] = sum(one["mode_changes"] for one in own)
    for column, other in RATIOS.items():
        ratios = [one["over"][other] for one in own if other in one["over"]]
        if ratios and (column == "ratio" or system == DECOUPLED):
            row |= {column: median(ratios), f"{column}_range": [min(ratios), max(ratios)]}
    if system == AUTO and not own[0]["over"].keys().isdisjoint(REACHED):
        over = [min(one["over"][other] for other in REACHED if other in one["over"]) for one in own]
        row |= {"over_best": median(over), "over_best_range": [min(over), max(over)]}
    if system in (CHAIN, *REPLANNED) and all(one["draft_ms"] for one in own):
        given = [protocol_tokens_per_s(one, running, window, is_fixed=system == CHAIN) for one in own]
        row["of_protocol"] = median(
            [one["full_tokens_per_s"] / best for one, best in zip(own, given, strict=True)]
        )
    plain = {one["repetition"]: one["ids"] for one in found.get(PLAIN, ())}
    row["equal"] = all(one["ids"] == plain[one["repetition"]] for one in own) if plain else None
    return row


def protocol_tokens_per_s(one: dict[str, Any], running: int, window: int, *, is_fixed: bool) -> float:
    """What the decoupled protocol gives for a rollout's own draft time, step times and acceptance rate.

    is_fixed: at this window, and not at the best one that the engine may use.
    """
    from paceline.config import EngineSettings
    from paceline.planning.latency_profile import fit_affine, verify_s
    from paceline.planning.window import Mode, StepTimes, tokens_per_s

    verify = fit_affine(*zip(*one["verified"], strict=True)).model
    windows = np.array([window]) if is_fixed else np.arange(1, EngineSettings().max_draft_tokens + 1)
    times = StepTimes(running, one["draft_ms"] / 1e3, verify_s(verify, running, windows))
    return running * float(tokens_per_s(one["acceptance_rate"], windows, times, Mode.DECOUPLED).max())


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars. A row meets one only with the tokens of plain, and speed counts only if the worker supplied at least a
    tenth of the accepted tokens.
    """
    bars = []

    def check(row: dict[str, Any], what: str, column: str, needed: float, share: float = LEAST_SHARE) -> None:
        reached = row.get(column)
        if reached is None:
            return
        counts = bool(row["equal"]) and (row["model_share"] or 0.0) >= share
        case = f"{what}, {row['running']} running, D/V {row['cost']}"
        bars.append({"case": case, "needed": needed, "reached": reached, "met": counts and reached >= needed})

    for row in rows:
        alone = row["running"] == 1
        if row["system"] == DECOUPLED and (needed := BARS.get((row["running"], row["cost"]))) is not None:
            check(row, "decoupled over coupled", "ratio", needed)
        check(row, f"{row['system']} over the protocol", "of_protocol", PROTOCOL_BAR)
        check(row, "auto over the best of what it could be", "over_best", AUTO_BAR, 0.0)
        if alone:
            check(row, "corrections prepared, over the chain", "over_chain", BRANCHES_BAR)
            check(row, "corrections prepared, over reconfigured", "over_reconfigured", BRANCHES_BAR)
    replanned = [row for row in rows if row["system"] in REPLANNED]
    if replanned:
        changes = sum(row["mode_changes"] for row in replanned)
        met = changes >= CHANGES_BAR and all(row["equal"] for row in replanned)
        bars.append({"case": "changes of mode", "needed": CHANGES_BAR, "reached": changes, "met": met})
    return bars


if __name__ == "__main__":
    main()

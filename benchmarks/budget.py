"""Tokens per second over the batch size for each budget policy, and for plain vLLM, in turn.

The target is the inflated Countdown policy (see speed.py). A batch of b is b / 4 prompts with 4 responses each (one
prompt below 4). Before a policy is measured at a batch size it runs there once, so that what it learns online is
learned; the drafters' own calibration is shared by all policies and learned in a first run. All policies share one
engine, whose tokens no policy changes; `equal` says whether they really were the same. Plain vLLM runs in an engine of
its own and is made to generate as many tokens for each prompt, so `ratio` compares the same work.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Child, median, parser, publish
from speed import ROOT, make_prompts, prepare_target

POLICIES = ("off", "marginal", "bandit", "thresholds", "fixed")
COLUMNS = ("policy", "batch", "tokens_per_s", "ratio", "acceptance_length", "equal")


def run(engine: Any, requests: list[Any], lengths: list[int] | None = None) -> dict[str, Any]:
    """Generate once from empty caches; with `lengths`, so many tokens per request whatever they are."""
    from vllm import SamplingParams

    if lengths is not None:
        requests = [replace(r, max_tokens=n) for r, n in zip(requests, lengths, strict=True)]
    engine.reset_prefix_cache()
    start = time.perf_counter()
    responses = engine.generate(requests, SamplingParams(temperature=1.0, ignore_eos=lengths is not None))
    seconds = time.perf_counter() - start
    tokens = sum(len(response.tokens) for response in responses)
    steps = sum(response.num_steps for response in responses)
    return {
        "tokens_per_s": tokens / seconds,
        "acceptance_length": tokens / steps,
        "ids": [response.tokens for response in responses],
    }


def start_engine(model: str, settings: Any, options: Any) -> Any:
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from paceline.engine.rollout import RolloutEngine, prepare_environment

    prepare_environment()
    return RolloutEngine(
        model, settings, dtype="bfloat16", max_num_seqs=max(options.batches), kv_cache_bytes=2 << 30
    )


def make_plain(model: str, options: Any) -> Any:
    """Start plain vLLM (in the child process)."""
    engine = start_engine(model, None, options)
    return lambda requests, lengths: run(engine, requests, lengths)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", help="target; default: the Countdown policy, inflated")
    made.add_argument("--drafter", metavar="DIR", default=str(ROOT / "assets/countdown-drafter"))
    made.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    made.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument(
        "--max-tokens", type=int, default=96, help="kept short, so that the batch keeps its size"
    )
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, prepare_target(options.model, Path(folder)))
    publish("budget", rows, COLUMNS, options.json, threads=options.threads)


def measure(options: Any, model: str) -> list[dict[str, Any]]:
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    plain = Child("plain", make_plain, model, options)
    plain.ready()
    engine = start_engine(model, EngineSettings(model_drafter=options.drafter), options)
    loop = engine.scheduler.loop
    settings = {policy: BudgetSettings(policy=policy) for policy in options.policies}
    states: dict[str, Any] = {}

    def requests(batch: int, seed: int) -> list[Any]:
        samples = min(batch, 4)
        prompts = make_prompts(model, -(-batch // samples), seed)
        made = [
            RolloutRequest(p, options.max_tokens, key=derive_key(seed, p, s))
            for p in prompts
            for s in range(samples)
        ]
        return made[:batch]

    def under(policy: str, wanted: list[Any]) -> dict[str, float]:
        loop.use_budget(settings[policy], states.get(policy))
        result = run(engine, wanted)
        states[policy] = loop.policy_state
        return result

    rows = []
    run(engine, requests(16, 1))
    for batch in options.batches:
        found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in ("plain", *options.policies)}
        for repetition in range(-1, options.repetitions):
            wanted = requests(batch, 100 * batch + repetition)
            order = options.policies if repetition % 2 else options.policies[::-1]
            made = {policy: under(policy, wanted) for policy in order}
            lengths = [len(ids) for ids in made[order[0]]["ids"]]
            made["plain"] = plain.call(wanted, lengths)
            if repetition >= 0:
                for policy, result in made.items():
                    found[policy].append(result)
        for policy in found:
            row: dict[str, Any] = {"policy": policy, "batch": batch}
            for key in ("tokens_per_s", "acceptance_length"):
                row[key] = median([r[key] for r in found[policy]])
            pairs = list(zip(found[policy], found["plain"], strict=True))
            row["ratio"] = median([r["tokens_per_s"] / plainly["tokens_per_s"] for r, plainly in pairs])
            if policy != "plain":
                row["equal"] = all(
                    one["ids"] == other["ids"]
                    for one, other in zip(found[policy], found[options.policies[0]], strict=True)
                )
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    plain.close()
    return rows


if __name__ == "__main__":
    main()

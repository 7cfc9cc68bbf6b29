"""Tokens per second over the batch size for each budget policy, on one engine, in turn.

The target is the inflated Countdown policy (see speed.py). A batch of b is b / 4 prompts with 4 responses each (one
prompt below 4). Before a policy is measured at a batch size it runs there once, so that what it learns online is
learned; the drafters' own calibration is shared by all policies and learned in a first run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import median, parser, publish
from speed import ROOT, make_prompts, prepare_target

POLICIES = ("off", "marginal", "bandit", "thresholds", "fixed")
COLUMNS = ("policy", "batch", "tokens_per_s", "ratio", "acceptance_length")


def run(engine: Any, requests: list[Any]) -> dict[str, float]:
    """Generate once from empty caches."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    start = time.perf_counter()
    responses = engine.generate(requests, SamplingParams(temperature=1.0))
    tokens = sum(len(response.tokens) for response in responses)
    steps = sum(response.num_steps for response in responses)
    return {"tokens_per_s": tokens / (time.perf_counter() - start), "acceptance_length": tokens / steps}


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
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, prepare_target(options.model, Path(folder)))
    publish("budget", rows, COLUMNS, options.json, threads=options.threads)


def measure(options: Any, model: str) -> list[dict[str, Any]]:
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.dice import derive_key
    from paceline.engine.rollout import RolloutEngine
    from paceline.types import RolloutRequest

    engine = RolloutEngine(
        model,
        EngineSettings(model_drafter=options.drafter),
        dtype="bfloat16",
        max_num_seqs=max(options.batches),
        kv_cache_bytes=2 << 30,
    )
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
        found: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
        for repetition in range(-1, options.repetitions):
            order = options.policies if repetition % 2 else options.policies[::-1]
            for policy in order:
                result = under(policy, requests(batch, 100 * batch + repetition))
                if repetition >= 0:
                    found[policy].append(result)
        for policy in options.policies:
            row: dict[str, Any] = {"policy": policy, "batch": batch}
            for key in ("tokens_per_s", "acceptance_length"):
                row[key] = median([r[key] for r in found[policy]])
            if "off" in found:
                pairs = zip(found[policy], found["off"], strict=True)
                row["ratio"] = median([r["tokens_per_s"] / off["tokens_per_s"] for r, off in pairs])
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()

"""Tokens per second over the batch size for each budget policy, and for plain vLLM, in turn.

The target is the inflated policy of the pair (see speed.py). A batch of b is b / 4 prompts with 4 responses each (one
prompt below 4). Before a policy is measured at a batch size it runs there once, so that what it learns online is
learned; the drafters' own calibration is shared by all policies and learned in a first run. All policies share one
engine, whose tokens no policy changes; `equal` says whether they really were the same. Plain vLLM runs in an engine of
its own and is made to generate as many tokens for each prompt, so `ratio` compares the same work. Both are compiled, as
vLLM is by default (`--eager`: neither). The default policy, marginal, must not be below plain vLLM at any batch size.

The rivals (a fixed length, Seer's thresholds, TLT's bandit) get their tables for this machine: at each batch size every
candidate runs on other prompts first, and the fastest is measured; `table` says which. marginal has no table.
`suffix only` is the default policy with suffix trees alone, as `PACELINE=1` gives it, in an engine of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Child, median, parser, publish
from pairs import PAIRS, TARGETS

CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    "off": ({},),
    "marginal": ({},),
    "bandit": tuple(
        {
            "bandit_strategies": tuple((depth, 1, n) for depth in sorted({n, min(n + 4, 16) if n else 0})),
            "bandit_batch_sizes": (1,),
            "bandit_elastic_threshold": 1 << 20,  # the table says where it drafts at first
        }
        for n in (0, 2, 4, 8, 16)
    ),
    "thresholds": tuple(
        {
            "threshold_request_tokens": 16,
            "threshold_batch_tokens": tokens,
            "threshold_min_probability": probability,
        }
        for tokens in (16, 64, 256)
        for probability in (0.3, 0.6)
    ),
    "fixed": tuple({"fixed_tokens": n} for n in (2, 3, 5, 8, 12, 16)),
}
"""The settings of each policy that are tried at each batch size."""
SUFFIX = "suffix only"
COLUMNS = ("policy", "batch", "tokens_per_s", "ratio", "ratio_range", "acceptance_length", "equal", "table")
TUNING_SEED = 50_000


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
    from paceline.engine.rollout_engine import RolloutEngine, prepare_environment

    prepare_environment()
    return RolloutEngine(
        model,
        settings,
        dtype="bfloat16",
        max_num_seqs=max(options.batches),
        kv_cache_bytes=2 << 30,
        **({"enforce_eager": options.eager} if settings is None else {}),
    )


def make_engine(model: str, settings: Any, options: Any) -> Callable[..., dict[str, Any]]:
    """Start an engine (in the child process); settings: None for plain vLLM."""
    engine = start_engine(model, settings, options)
    return lambda *args: run(engine, *args)


class Policies:
    """One engine with the model drafter, under one policy after the other; each keeps what it has learned."""

    def __init__(self, model: str, options: Any) -> None:
        from paceline.config import EngineSettings

        settings = EngineSettings(model_drafter=options.drafter, compiled=not options.eager)
        self.engine = start_engine(model, settings, options)
        self._states: dict[str, Any] = {}

    def run(self, policy: str, table: dict[str, Any], requests: list[Any]) -> dict[str, Any]:
        """Generate under a policy with these settings."""
        from paceline.config import BudgetSettings

        settings = BudgetSettings.model_validate({"policy": policy, **table})
        key = settings.model_dump_json()
        loop = self.engine.scheduler.loop
        loop.use_budget(settings, self._states.get(key))
        result = run(self.engine, requests)
        self._states[key] = loop.policy_state
        return result

    def tune(self, policy: str, requests: list[Any]) -> dict[str, Any]:
        """The policy's fastest candidate, each run twice, there and back."""
        candidates = CANDIDATES[policy]
        if len(candidates) == 1:
            return candidates[0]
        spent_s = [0.0] * len(candidates)
        for order in (range(len(candidates)), reversed(range(len(candidates)))):
            for at in order:
                result = self.run(policy, candidates[at], requests)
                spent_s[at] += sum(map(len, result["ids"])) / result["tokens_per_s"]
        return candidates[spent_s.index(min(spent_s))]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--pair", default="countdown", choices=list(PAIRS), help="target, drafter and prompts")
    made.add_argument("--model", metavar="DIR", help="another target; default: the pair's policy, inflated")
    made.add_argument("--drafter", metavar="DIR", help="another drafter; default: the pair's")
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    made.add_argument("--policies", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument(
        "--max-tokens", type=int, default=96, help="kept short, so that the batch keeps its size"
    )
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of torch here, too
    pair = PAIRS[options.pair]
    options.drafter = options.drafter or pair.make_drafter(TARGETS / f"{options.pair}-drafter")
    rows = measure(options, options.model or pair.make_target(TARGETS / options.pair))
    for row in check_rows(rows):
        print(
            f"batch {row['batch']}: marginal {row['reached']:.2f} of plain: {'met' if row['met'] else 'MISSED'}"
        )
    publish("budget", rows, COLUMNS, options, bars=check_rows(rows))


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bar: with the default policy no batch size is slower than plain vLLM."""
    return [
        {"batch": row["batch"], "needed": 1.0, "reached": row["ratio"], "met": row["ratio"] >= 1.0}
        for row in rows
        if row["policy"] == "marginal"
    ]


def make_requests(options: Any, batch: int, seed: int) -> list[Any]:
    """A batch of held-out prompts with up to four responses each."""
    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    pair, samples = PAIRS[options.pair], min(batch, 4)
    prompts = pair.draw_prompts(pair.policy, -(-batch // samples), seed)
    made = [
        RolloutRequest(p, options.max_tokens, key=derive_key(seed, p, s))
        for p in prompts
        for s in range(samples)
    ]
    return made[:batch]


def measure(options: Any, model: str) -> list[dict[str, Any]]:
    """One row for each policy and batch size, tuned and measured in turn."""
    from paceline.config import EngineSettings

    others = {"plain": None, SUFFIX: EngineSettings(compiled=not options.eager)}
    children = {name: Child(name, make_engine, model, settings, options) for name, settings in others.items()}
    for child in children.values():
        child.ready()
    policies = Policies(model, options)
    run(policies.engine, make_requests(options, 16, 1))
    rows = []
    for batch in options.batches:
        other_prompts = make_requests(options, batch, TUNING_SEED + batch)
        tables = {policy: policies.tune(policy, other_prompts) for policy in options.policies}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*children, *options.policies)}
        for repetition in range(-1, options.repetitions):
            requests = make_requests(options, batch, 100 * batch + repetition)
            order = options.policies if repetition % 2 else options.policies[::-1]
            made = {policy: policies.run(policy, tables[policy], requests) for policy in order}
            made[SUFFIX] = children[SUFFIX].call(requests)
            made["plain"] = children["plain"].call(requests, [len(ids) for ids in made[SUFFIX]["ids"]])
            if repetition >= 0:
                for name, result in made.items():
                    found[name].append(result)
        rows += [summarise(name, batch, tables.get(name), found) for name in found]
        for row in rows[-len(found) :]:
            print(row, file=sys.stderr, flush=True)
    for child in children.values():
        child.close()
    return rows


def summarise(
    name: str, batch: int, table: dict[str, Any] | None, found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The row of one policy at one batch size; medians over the repetitions."""
    row: dict[str, Any] = {"policy": name, "batch": batch}
    for key in ("tokens_per_s", "acceptance_length"):
        row[key] = median([one[key] for one in found[name]])
    turns = list(zip(found[name], found["plain"], strict=True))
    ratios = [one["tokens_per_s"] / plain["tokens_per_s"] for one, plain in turns]
    row["ratio"], row["ratio_range"] = median(ratios), [min(ratios), max(ratios)]
    if name != "plain":
        row["equal"] = [one["ids"] for one in found[name]] == [one["ids"] for one in found[SUFFIX]]
    row["table"] = " ".join(f"{key}={value}" for key, value in (table or {}).items())
    return row


if __name__ == "__main__":
    main()

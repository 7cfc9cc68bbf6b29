"""What does it cost to go on with a response on another worker: through the KV pool, or by prefilling it there?

Two engines in processes of their own hold the same target, the inflated Countdown policy (see speed.py). For each
length and repetition, in alternating order: the first engine comes to hold a response of that length and is told to
abort it; the second one goes on with it, from an empty prefix cache, and is timed to its first new token.

* `prefill`: the pool keeps nothing, so the second engine prefills prompt and response;
* `pool`: the first engine saves the keys and values, the second one loads them from memory;
* `pool, disk`: the entry has been moved to the disk tier (the operating system's cache is warm).

`cut_ms` is the time of the abort, saving included, `first_token_ms` that of the second engine, `moved_ms` their sum.
`ratio` is prefill's `moved_ms` over the own, medians of all repetitions; `equal` whether the next tokens are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Child, median, parser, publish
from pairs import prepare_target

from paceline.config import EngineSettings, KvPoolSettings
from paceline.kvpool import KvPool, response_identity
from paceline.types import RolloutRequest

SYSTEMS = ("prefill", "pool", "pool, disk")
COLUMNS = ("system", "tokens", "cut_ms", "first_token_ms", "moved_ms", "ratio", "entry_mib", "equal")
PROMPT_TOKENS = 40
NEXT_TOKENS = 8
"""Tokens that the second engine generates, to be compared."""


def make_engine(model: str, settings: EngineSettings, options: argparse.Namespace) -> Callable[..., Any]:
    """Start an engine (in the child process)."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from paceline.engine.rollout_engine import RolloutEngine

    engine = RolloutEngine(
        model,
        settings,
        dtype=options.dtype,
        max_model_len=max(options.tokens) + PROMPT_TOKENS + 64,
        max_num_seqs=4,
        kv_cache_bytes=1 << 30,
    )
    tasks: dict[str, Callable[..., Any]] = {"cut": cut, "go_on": go_on}
    return lambda task, *args: tasks[task](engine, *args)


def cut(engine: Any, request: RolloutRequest, keep_kv: bool) -> tuple[float, tuple[int, ...]]:
    """Bring a response into the engine, abort it and return the abort's seconds and the response's tokens."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    stream = engine.stream([request], SamplingParams(temperature=1.0, ignore_eos=True))
    next(stream)
    tokens, _ = engine.partial()[0]
    start_s = time.perf_counter()
    engine.abort([0], keep_kv=keep_kv)
    return time.perf_counter() - start_s, (*request.generated, *tokens)


def go_on(engine: Any, request: RolloutRequest) -> tuple[float, tuple[int, ...], int]:
    """Go on with a response; returns seconds to the first token, the new tokens and how many were prefilled."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    engine.take_observations()
    start_s = time.perf_counter()
    first_s, made = 0.0, []
    for event in engine.stream([request], SamplingParams(temperature=1.0, ignore_eos=True)):
        first_s = first_s or time.perf_counter() - start_s
        made += event.tokens
    prefilled = sum(step.num_prefill_tokens for step in engine.take_observations())
    return first_s, tuple(made), prefilled


def move(
    engines: tuple[Child, Child],
    request: RolloutRequest,
    system: str,
    folders: tuple[Path, Path],
    pool: KvPool,
) -> dict[str, Any]:
    """Move one response in the way of `system`."""
    first, second = engines
    cut_s, tokens = first.call("cut", request, system != "prefill")
    name = response_identity(request.key or 0, request.prompt)
    file = folders[0] / f"{name}.kv"
    size = file.stat().st_size if file.exists() else 0
    if system == "pool, disk":
        shutil.move(file, folders[1] / file.name)
    rest = RolloutRequest(
        request.prompt, len(tokens) + NEXT_TOKENS, key=request.key, generated=tokens, keep_kv=False
    )
    first_s, made, prefilled = second.call("go_on", rest)
    pool.drop(name)
    return {
        "cut_ms": 1e3 * cut_s,
        "first_token_ms": 1e3 * first_s,
        "moved_ms": 1e3 * (cut_s + first_s),
        "entry_mib": size / 2**20,
        "prefilled": prefilled,
        "ids": made,
    }


def measure(options: argparse.Namespace, model: str, folder: Path) -> list[dict[str, Any]]:
    """Every length and repetition on every system, in turn."""
    settings = KvPoolSettings(
        directory=str(folder / "memory"), disk_directory=options.disk, disk_bytes=4 << 30
    )
    folders = folder / "memory", Path(options.disk)
    pool = KvPool.open(settings)
    engine_settings = EngineSettings(kv_pool=settings)
    first = Child("first", make_engine, model, engine_settings, options)
    first.ready()
    second = Child("second", make_engine, model, engine_settings, options)
    second.ready()
    rng = np.random.default_rng(options.seed)
    rows = []
    for length in options.tokens:
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
        equal = True
        for repetition in range(-1, options.repetitions):
            tokens = tuple(rng.integers(3, 28, PROMPT_TOKENS + length - 1).tolist())
            request = RolloutRequest(
                tokens[:PROMPT_TOKENS],
                max_tokens=length + NEXT_TOKENS,
                key=int(rng.integers(1 << 62)),
                generated=tokens[PROMPT_TOKENS:],
            )
            turn = SYSTEMS if repetition % 2 else SYSTEMS[::-1]
            made = {system: move((first, second), request, system, folders, pool) for system in turn}
            equal &= len({one["ids"] for one in made.values()}) == 1
            if repetition >= 0:  # the first one warms up
                for system in SYSTEMS:
                    found[system].append(made[system])
        rows += [summarise(system, length, found[system], found["prefill"], equal) for system in SYSTEMS]
    for one in (first, second):
        one.close()
    pool.close()
    return rows


def summarise(
    system: str, length: int, own: list[dict[str, Any]], base: list[dict[str, Any]], equal: bool
) -> dict[str, Any]:
    """One row: medians over the repetitions."""
    row: dict[str, Any] = {"system": system, "tokens": length, "equal": equal}
    for name in ("cut_ms", "first_token_ms", "moved_ms", "entry_mib", "prefilled"):
        row[name] = median([one[name] for one in own])
    row["ratio"] = median([one["moved_ms"] for one in base]) / row["moved_ms"]
    row["all_moved_ms"] = [one["moved_ms"] for one in own]
    return row


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", help="target; default: the Countdown policy, inflated")
    made.add_argument("--tokens", type=int, nargs="+", default=[250, 1000], help="lengths of the response")
    made.add_argument("--repetitions", type=int, default=7)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    memory = Path(tempfile.mkdtemp(prefix="paceline-kv-", dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            options.disk = f"{folder}/kv"
            rows = measure(options, prepare_target(options.model, Path(folder)), memory)
    finally:
        shutil.rmtree(memory)
    publish("kv_pool", rows, COLUMNS, options)
    if not all(row["equal"] for row in rows):
        sys.exit("tokens differ between the systems")


if __name__ == "__main__":
    main()

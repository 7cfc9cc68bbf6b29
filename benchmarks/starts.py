"""Seconds until an engine is ready: eager, compiled anew, and compiled from what an earlier start has kept.

Each start is a process of its own, timed from its creation. `eager` and `anew` each begin with an empty folder for what
vLLM keeps (compiled code, and what it has found out about the model's class), `cached` with the one that `anew` has
filled. Recipes and commands compile by default because a cached start is short.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from harness import Child, median, parser, publish
from pairs import PAIRS, TARGETS

COLUMNS = ("target", "start", "ready_s", "all_ready_s")


def make_engine(model: str, drafter: str, threads: int, compiled: bool, cache: str) -> Callable[[], None]:
    """Start an engine as recipes do (in the child process)."""
    os.environ |= {
        "VLLM_CACHE_ROOT": cache,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine, prepare_environment

    prepare_environment()
    settings = EngineSettings(model_drafter=drafter, compiled=compiled)
    RolloutEngine(model, settings, dtype="bfloat16", max_num_seqs=128, kv_cache_bytes=1 << 29)
    return lambda: None


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    pair = PAIRS["countdown"]
    drafter = pair.make_drafter(TARGETS / "countdown-drafter")
    targets = {"policy, 3 M": str(pair.policy), "inflated, 189 M": pair.make_target(TARGETS / "countdown")}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.repetitions):
        for name, model in targets.items():
            with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as shared:
                starts = ("eager", False, own), ("anew", True, shared), ("cached", True, shared)
                for start, compiled, cache in starts:
                    begin_s = time.perf_counter()
                    child = Child(start, make_engine, model, drafter, options.threads, compiled, cache)
                    child.ready()
                    times.setdefault((name, start), []).append(time.perf_counter() - begin_s)
                    child.close()
    rows: list[dict[str, Any]] = [
        {"target": name, "start": start, "ready_s": median(seconds), "all_ready_s": seconds}
        for (name, start), seconds in times.items()
    ]
    publish("starts", rows, COLUMNS, options)


if __name__ == "__main__":
    main()

"""Does the planner foresee what each way to draft gives? Planned and measured tokens per second, side by side.

The planner gets what a user would give it: `paceline profile` of target and drafter, on one core, and the acceptance
rate and lengths of an *earlier* rollout, of other prompts. It never sees the rollouts that it is compared with. Where
the drafter has the other core, that one was busy while the profile was taken (with a profile of its own): cores share
their memory.

    plain     the target alone, on one core
    coupled   drafter and target take turns on that core; planned at the best window (SpecActor 4.1)
    chain     the drafter ahead on the other core, at `--window`; planned as docs/decisions/0003-decoupled-rounds.md, at
              the best window up to that: the engine verifies of a window what pays

`measured`: of the steps in which all `running` responses ran. The pair is that of decoupled.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from decoupled import CHAIN, COUPLED, PLAIN_ONE_CORE, SIZES, inflate_drafter, make_engine, make_requests
from harness import ROOT, Child, median, parser, publish, save
from pairs import PAIRS, TARGETS

from paceline.planning.latency_profile import LatencyModel, StepLatency
from paceline.planning.profile_fit import load_fits
from paceline.planning.window import Mode, StepTimes, best_window, profiled_times, tokens_per_s

SYSTEMS = (PLAIN_ONE_CORE, COUPLED, CHAIN)
COLUMNS = ("system", "running", "planned", "measured", "measured_range", "error", "window", "acceptance_rate")
TOLERANCE, SHARE = 0.15, 7 / 9
"""The bar: so many rows are this near."""


def plan(
    system: str,
    running: int,
    verify: StepLatency,
    draft: LatencyModel,
    earlier: dict[str, float],
    options: Namespace,
) -> tuple[int, float]:
    """The draft window and the tokens per second of all requests that the planner expects.

    earlier: `acceptance` and mean `context` of the earlier rollout.
    """
    times = profiled_times(draft, verify.for_requests_of(earlier["context"]), running, options.max_window)
    if system == PLAIN_ONE_CORE:
        return 0, running / float(times.verify_s[0])
    if system == COUPLED:
        best = best_window(earlier["acceptance"], times, Mode.COUPLED)
        return int(best.window), running * float(best.tokens_per_s)
    windows = np.arange(1, options.window + 1)
    chain = StepTimes(running, times.draft_s, times.verify_s[windows])
    rates = tokens_per_s(earlier["acceptance"], windows, chain, Mode.DECOUPLED)
    return int(windows[rates.argmax()]), running * float(rates.max())


def profile(
    target: str, drafter: str, options: Namespace, folder: Path, num_cores: int
) -> tuple[StepLatency, LatencyModel]:
    """What `paceline profile` finds on one core, with the models that the planner makes of it.

    num_cores: of these cores each takes a profile at the same time.
    """
    running, outs = [], []
    for core in sorted(os.sched_getaffinity(0))[:num_cores]:
        outs.append(folder / f"{num_cores}-{core}.json")
        command: list[str | Path] = [
            *(sys.executable, "-m", "paceline.cli", "profile", target, "--drafter", drafter),
            *("--batches", ",".join(map(str, options.running)), "--tokens", "1,2,4,6,8,12,16"),
            *("--contexts", "64,256", "--dtype", "bfloat16", "--out", outs[-1]),
            *(["--eager"] if options.eager else []),
        ]
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                preexec_fn=partial(os.sched_setaffinity, 0, {core}),
            )
        )
    if any(process.wait() for process in running):
        raise SystemExit("paceline profile failed")
    _, step, drafters = load_fits(outs[0])
    return step.model, drafters[Path(drafter).name].model


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    made.add_argument("--cost", type=float, default=0.1, choices=list(SIZES))
    made.add_argument("--running", type=int, nargs="+", default=[1, 4, 16])
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--responses", type=int, default=4)
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--window", type=int, default=8, help="of the chain")
    made.add_argument("--max-window", type=int, default=32, help="longest that the coupled pair may draft")
    made.set_defaults(fixed_window=4)  # of systems that are not compared here
    options = made.parse_args()
    target = PAIRS["countdown"].make_target(TARGETS / "countdown")
    drafter = inflate_drafter(options.cost)
    with tempfile.TemporaryDirectory() as folder:
        profiles = [profile(target, drafter, options, Path(folder), count) for count in (1, 2)]
    children = {system: Child(system, make_engine, system, target, drafter, options) for system in SYSTEMS}
    for child in children.values():
        child.ready()
    rows: list[dict[str, Any]] = []
    for running in options.running:
        earlier, found = measure(children, running, options)
        for system in SYSTEMS:
            window, planned = plan(system, running, *profiles[system == CHAIN], earlier, options)
            rates = [one["full_tokens_per_s"] for one in found[system]]
            rows.append(
                {
                    "system": system,
                    "running": running,
                    "planned": planned,
                    "measured": median(rates),
                    "measured_range": [min(rates), max(rates)],
                    "error": planned / median(rates) - 1.0,
                    "window": window,
                    "acceptance_rate": earlier["acceptance"],
                }
            )
        save("planned", rows, options, bars=check_rows(rows))
    for child in children.values():
        child.close()
    publish("planned", rows, COLUMNS, options, bars=check_rows(rows))


def measure(
    children: dict[str, Child], running: int, options: Namespace
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    """What the earlier rollout tells the planner, and the rollouts of each system."""
    earlier: dict[str, float] = {}
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in children}
    for repetition in range(-1, options.repetitions):
        requests = make_requests(options, max(options.responses, running), 1000 * running + repetition + 1)
        for system in list(children)[:: 1 if repetition % 2 else -1]:
            result = children[system].call(requests, running)
            if repetition >= 0:
                found[system].append(result)
            elif system == CHAIN:
                lengths = [len(ids) for ids in result["ids"]]
                prompts = [len(request.prompt) for request in requests]
                context = float(np.mean(prompts) + np.average(lengths, weights=lengths) / 2)
                earlier = {"acceptance": result["acceptance_rate"], "context": context}
    return earlier, found


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bar: the share of rows within the tolerance."""
    reached = sum(abs(row["error"]) <= TOLERANCE for row in rows) / len(rows)
    case = f"within {TOLERANCE:.0%}"
    return [{"case": case, "needed": SHARE, "reached": reached, "met": reached >= SHARE}]


if __name__ == "__main__":
    main()

"""How near does scheduling by context come to the oracle, as the groups per worker grow?

Simulated, without speculation: `group` binds whole groups to workers (veRL), `divided` runs chunks in order of
submission, `context` is Seer's algorithm 1, `even` ours, and `oracle` knows all lengths.
Throughput is tokens per second; each point is the mean over seeds. The scenario is a preset on `--workers` workers with
`groups per worker` groups for each.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from harness import parser, publish

from paceline.sim.comparison import run_systems
from paceline.sim.scenario import load_scenario, preset_names

SYSTEMS = {
    "group": "veRL",
    "divided": "Seer, divided",
    "context": "Seer, context",
    "even": "Paceline, divided",
    "oracle": "Seer, oracle",
}
JUDGED = ("context", "even")
COLUMNS = (
    "preset",
    "groups_per_worker",
    *(f"{name}_s" for name in SYSTEMS),
    *(f"{name}_over_oracle" for name in JUDGED),
)


def measure(preset: str, workers: int, per_worker: int, seeds: int) -> dict[str, Any]:
    """One point."""
    engine_gpus = load_scenario(preset).engine.gpus
    changes = [f"gpus={workers * engine_gpus}", f"groups={workers * per_worker}"]
    runs = []
    for seed in range(seeds):
        scenario = load_scenario(preset, [*changes, f"seed={seed}"])
        runs.append(run_systems(scenario, list(SYSTEMS.values())))
    seconds = {name: [run[system].rollout_s for run in runs] for name, system in SYSTEMS.items()}
    mean = {name: fmean(found) for name, found in seconds.items()}
    row = {"preset": preset, "groups_per_worker": per_worker}
    for name in JUDGED:
        over_oracle = [best / own for best, own in zip(seconds["oracle"], seconds[name], strict=True)]
        row[f"{name}_over_group"] = mean["group"] / mean[name]
        row[f"{name}_over_oracle"] = fmean(over_oracle)
        row[f"{name}_least_over_oracle"] = min(over_oracle)
    return {**row, **{f"{name}_s": found for name, found in mean.items()}}


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--presets", nargs="+", default=["seer-qwen2-vl-72b", "seer-moonlight"], choices=preset_names()
    )
    made.add_argument("--workers", type=int, default=8)
    made.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    rows = []
    for preset in options.presets:
        for per_worker in options.groups:
            rows.append(measure(preset, options.workers, per_worker, options.seeds))
            print(rows[-1], flush=True)
    publish("scheduling", rows, COLUMNS, options)


if __name__ == "__main__":
    main()

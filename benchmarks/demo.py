"""What `make demo` gains over several seeds: held-out solve rate before and after, rollouts with and without drafts.

Each seed is a run of the recipe of its own: other keys, other order of the prompts, the same held-out problems with the
same keys. 186 of 256 solved for 168 is 1.7 standard errors, so one run says little: the row `mean` has the mean over
the seeds and, for `gain`, its standard error. `speedup` is the median of the compared rollouts of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, median, parser, publish, run_paceline

from paceline.record.reader import RecordReader
from paceline.record.schema import Comparison, Evaluation

COLUMNS = ("case", "before", "after", "gain", "gain_error", "speedup", "tokens", "diverged_tokens")
MEANS = ("before", "after", "gain", "speedup")


def train(recipe: Path, seed: int, folder: Path) -> None:
    """One run of the recipe; SystemExit if it fails."""
    run_paceline("train", recipe, "--out", folder, "--overwrite", "--set", f"seed={seed}")


def read_run(seed: int, folder: Path) -> dict[str, Any]:
    """The row of a run: its first and last evaluation, and all its comparisons."""
    with RecordReader(folder) as record:
        events = list(record)
    evaluations = [event for event in events if isinstance(event, Evaluation)]
    compared = [event for event in events if isinstance(event, Comparison)]
    before, after = evaluations[0].solve_rate, evaluations[-1].solve_rate
    return {
        "case": f"seed {seed}",
        "before": before,
        "after": after,
        "gain": after - before,
        "problems": evaluations[-1].n,
        "speedup": median([one.plain_s / one.accelerated_s for one in compared]),
        "tokens": sum(one.tokens for one in compared),
        "diverged_tokens": sum(one.diverged_tokens or 0 for one in compared),
    }


def average(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of all seeds together; gain_error: standard error of the mean gain, None for one seed."""
    gains = [run["gain"] for run in runs]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return {
        "case": "mean",
        **{key: statistics.fmean(run[key] for run in runs) for key in MEANS},
        "gain_error": error,
        "problems": runs[0]["problems"],
        "tokens": sum(run["tokens"] for run in runs),
        "diverged_tokens": sum(run["diverged_tokens"] for run in runs),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--recipe", type=Path, default=ROOT / "recipes/countdown.yaml")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--runs", type=Path, default=ROOT / "runs/demo-seeds", help="folder of the runs")
    options = made.parse_args()
    rows = []
    for seed in options.seeds:
        folder = options.runs / f"seed-{seed}"
        train(options.recipe, seed, folder)
        rows.append(read_run(seed, folder))
    publish("demo", [*rows, average(rows)], COLUMNS, options)


if __name__ == "__main__":
    main()

"""What growing a drafter costs a training run: the same steps with and without the section `adaptive_drafter`, in turn.

    python benchmarks/drafter_cost.py --json benchmarks/results/drafter_cost.json

Two runs of one recipe (`--recipe`) on two workers of one core each, one with a drafter that grows from nothing. One
takes a step while the other waits, and who is first alternates. After `--warm-up` steps every pair of steps counts:
`ratio` is the time of the step with the drafter over that without, from the weight push to the end of the update.
`accounted_s` is what the drafter takes of the run's own path, and `parts` what of it goes to swaps, to having states
collected, waiting until they are gathered, handing them to the trainer, and keeping them in the engines' steps (the
mean of the engines, which do so at the same time). Tokens, log-probabilities and the weights at the end are compared
bit by bit.

While the drafter is too young to be used, it can only cost; `drafts_from` is the first step that it drafted in.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness import ROOT, Stopwatch, parser, print_bars, publish

from paceline.record import DrafterSession, DrafterStep, RecordReader
from paceline.training.recipe import Recipe, load_recipe

SETTINGS = (
    "fleet.workers=2", "fleet.variant=even", "fleet.help=auto", "optimizer.precision=auto",
    "evaluation.problems=0", "output.save_every=1000", "adaptive_drafter.method=eagle",
    "batch.prompts=8", "batch.group_size=8", "batch.micro_batch=16",
)  # fmt: skip
COLUMNS = ("step", "ratio", "with_s", "without_s", "accounted_s", "tokens", "equal")
MOST_RATIO, MOST_ACCOUNTED = 1.03, 0.01
"""Bars: upper end of the 95 % interval; share of the rollouts' time."""


@contextmanager
def measured() -> Iterator[dict[str, Stopwatch]]:
    """The time of the drafter's parts of the run's path while it is open."""
    from paceline.distillation.spot_link import SpotLink
    from paceline.training.adaptive_rollouts import AdaptiveRollouts

    spent = {}
    with ExitStack() as stack:
        for part, owner, name in (
            ("swap", AdaptiveRollouts, "_swap"),
            ("collect", AdaptiveRollouts, "_collect"),
            ("gather", AdaptiveRollouts, "settle"),
            ("teach", SpotLink, "teach"),
        ):
            spent[part] = Stopwatch()
            stack.enter_context(patch.object(owner, name, spent[part].around(getattr(owner, name))))
        yield spent


def take_steps(pipe: Any, recipe: Recipe, folder: Path) -> None:
    """A run that waits before each step until it is told to go on, and tells what the step was."""
    from rich.console import Console

    import paceline.training.run as training_run
    from paceline.training.step_runner import StepRunner

    class PacedRunner(StepRunner):
        """Steps one by one."""

        def begin(self) -> None:
            super().begin()
            self._wait(None)

        def generate(self, requests: Any, params: Any) -> Any:
            responses = super().generate(requests, params)
            made = hashlib.sha256()
            for response in responses:
                made.update(np.asarray(response.tokens, np.int64).tobytes())
                made.update(np.asarray(response.logprobs, np.float64).tobytes())
            self.digest = made.hexdigest()
            return responses

        def end_update(self, train_s: float, metrics: Any) -> bool:
            rollout = self._step.rollout
            stops = super().end_update(train_s, metrics)
            assert rollout is not None
            self._wait(
                {
                    "wall_s": time.perf_counter() - self.began_s,
                    "rollout_s": rollout.wall_s,
                    "parts": {part: one.total_s - self.spent_s[part] for part, one in spent.items()},
                    "tokens": rollout.num_tokens,
                    "digest": self.digest,
                }
            )
            return stops

        def _wait(self, told: dict[str, Any] | None) -> None:
            pipe.send(told)
            pipe.recv()
            self.began_s = time.perf_counter()
            self.spent_s = {part: one.total_s for part, one in spent.items()}

    with measured() as spent, patch.object(training_run, "StepRunner", PacedRunner):
        training_run.TrainingRun(recipe, folder, Console(file=io.StringIO()), overwrite=True).run()
    pipe.send(hashlib.sha256((folder / "policy/model.safetensors").read_bytes()).hexdigest())


class PacedRun:
    """A run in a process of its own."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=take_steps, args=(theirs, recipe, folder))
        self._process.start()
        theirs.close()
        self.folder = folder
        self._hear()

    def step(self) -> dict[str, Any]:
        """Take the next step."""
        self._pipe.send(None)
        told: dict[str, Any] = self._hear()
        return told

    def finish(self) -> str:
        """Let it end; the digest of the weights that it leaves."""
        self._pipe.send(None)
        digest: str = self._hear()
        self._process.join()
        return digest

    def kill(self) -> None:
        """End it wherever it is."""
        self._process.terminate()
        self._process.join(20)

    def _hear(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(
                f"{self.folder.name}: its process ended, exit code {self._process.exitcode}"
            ) from None


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios and the ends of its 95 % interval (Student's t of the logarithms)."""
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def read_run(folder: Path) -> tuple[list[DrafterStep], float]:
    """What the record tells of the drafter: its steps, and processor time of its trainer."""
    steps, core_s = [], 0.0
    with RecordReader(folder) as record:
        for event in record:
            if isinstance(event, DrafterStep):
                steps.append(event)
            elif isinstance(event, DrafterSession):
                core_s += event.core_s or 0.0
    return steps, core_s


def take_turns(runs: dict[str, PacedRun], count: int) -> Iterator[dict[str, dict[str, Any]]]:
    """What each run says of each step; who goes first alternates."""
    for number in range(count):
        order = list(runs)[:: -1 if number % 2 else 1]
        yield {name: runs[name].step() for name in order}


def main() -> None:
    options = parse_arguments()
    count = options.warm_up + options.pairs
    recipe = load_recipe(options.recipe, [*SETTINGS, *options.set, f"steps={count}"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="paceline-cost-") as folder:
        runs = {
            "with": PacedRun(recipe, Path(folder) / "with"),
            "without": PacedRun(
                recipe.model_copy(update={"adaptive_drafter": None}), Path(folder) / "without"
            ),
        }
        try:
            steps = list(take_turns(runs, count))
            weights = {name: run.finish() for name, run in runs.items()}
        finally:
            for run in runs.values():
                run.kill()
        told, core_s = read_run(Path(folder) / "with")
    rows, num_workers = [], recipe.fleet.workers if recipe.fleet else 1
    for number, (step, drafter) in enumerate(zip(steps, told, strict=True), 1):
        ours, others = step["with"], step["without"]
        parts = ours["parts"] | {"states": drafter.collection_s / num_workers}
        row = {
            "step": number,
            "ratio": ours["wall_s"] / others["wall_s"],
            "with_s": ours["wall_s"],
            "without_s": others["wall_s"],
            "rollout_s": ours["rollout_s"],
            "rollout_ratio": ours["rollout_s"] / others["rollout_s"],
            "accounted_s": sum(parts.values()),
            "parts": parts,
            "tokens": ours["tokens"],
            "equal": ours["digest"] == others["digest"],
        }
        rows.append(row)
    mean, high, share = summarize(rows, options.warm_up)
    summary = {
        "ratio": mean,
        "interval": [mean * mean / high, high],
        "accounted_share": share,
        "equal_tokens": all(row["equal"] for row in rows),
        "equal_weights": weights["with"] == weights["without"],
        "trainer_core_s": core_s,
        "drafts_from": next((step.step for step in told if step.tried), None),
    }
    bars = check(high, share)
    print(summary)
    publish("drafter cost", rows, COLUMNS, options, summary=summary, bars=bars, settings=list(SETTINGS))
    print_bars(bars)
    if not (summary["equal_tokens"] and summary["equal_weights"]):
        raise SystemExit("the two runs differ: growing a drafter has changed a token or a weight")


def summarize(rows: Sequence[dict[str, Any]], warm_up: int) -> tuple[float, float, float]:
    """Mean ratio, the upper end of its interval, and the share of the rollouts' time that is accounted."""
    counted = rows[warm_up:]
    mean, _, high = interval([row["ratio"] for row in counted])
    share = sum(row["accounted_s"] for row in counted) / sum(row["rollout_s"] for row in counted)
    return mean, high, share


def check(high: float, share: float) -> list[dict[str, Any]]:
    """The bars, as `print_bars` takes them."""
    return [
        {"case": case, "reached": reached, "needed": needed, "met": reached <= needed}
        for case, reached, needed in (
            ("upper end of the ratio's interval", high, MOST_RATIO),
            ("accounted share", share, MOST_ACCOUNTED),
        )
    ]


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--recipe", type=Path, default=ROOT / "recipes/countdown-adaptive.yaml")
    made.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="of the recipe")
    made.add_argument("--pairs", type=int, default=20)
    made.add_argument("--warm-up", type=int, default=3, help="steps that do not count")
    return made.parse_args()


if __name__ == "__main__":
    main()

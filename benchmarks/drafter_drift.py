"""A policy that moves away from its drafter: does the drafter that goes on learning keep up (TLT 4.2)?

    python benchmarks/drafter_drift.py --json benchmarks/results/drafter_drift.json

A run moves the policy on purpose, from Countdown with three numbers to four, on two workers, once with a drafter
growing on (`adaptive`) and once with the same drafter as it is (`frozen`). That drafter should have learned the
starting policy to its plateau: with --method osd it is the shipped small model, distilled from it offline for 40
minutes; a draft head learns offline here, from the policy's responses (`plateau` in the result: acceptance lengths
after half of --core-seconds and after all of them; where they are not near each other, give it more). Both runs have
the same tokens, which is checked, and draft with the drafter alone, always --depth tokens, so `acceptance_length`,
tokens per response and step, is the drafter's. A third of the run is a row. `solve_rate` is that of held-out problems
of the new kind, at the begin and the end of a third.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from drafter_data import draw_samples
from harness import ROOT, parser, print_bars, publish, run_paceline
from pairs import PAIRS

from paceline.distillation.export import export
from paceline.distillation.measuring import measure
from paceline.distillation.methods import build_network
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.spot import growing_method
from paceline.distillation.target import load_model, share
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import describe
from paceline.record import DrafterSession, DrafterStep, Evaluation, RecordReader, ResponseDone

TASK = ("task.options.min_numbers=4", "task.options.max_numbers=4", "lengths.prompt_tokens=32")
SETTINGS = (
    "fleet.variant=even", "fleet.help=auto", "optimizer.precision=auto", "engine.drafter=none",
    "engine.budget.policy=fixed", "output.save_every=1000", "batch.prompts=8", "batch.group_size=8",
    "lengths.response_tokens=512",
)  # fmt: skip
SAMPLES, PARTS = 2, 3
COLUMNS = (
    "part", "steps", "adaptive", "frozen", "ratio", "solve_rate", "idle_core_s", "versions", "tokens",
)  # fmt: skip
OF_FROZEN, OF_SOLVED = 1.10, 0.9
"""Bars: acceptance length over that of the frozen head, in the last third; share of the solve rate at the start."""


def make_head(options: argparse.Namespace, folder: Path) -> list[float]:
    """A head that has reached its plateau, into `folder`; its acceptance lengths after half the time and after all."""
    pair = PAIRS["countdown"]
    target = load_model(pair.policy)
    shared, method = share(target), growing_method(options.method, 1.0)
    counts = options.prompts, options.held_out
    samples, held = draw_samples(pair, pair.policy, target, counts, SAMPLES)
    lengths: list[float] = []
    for seconds in (options.core_seconds / 2, options.core_seconds):
        torch.manual_seed(0)
        network = build_network(method, shared, None)
        trainer = Trainer(network, shared, method.objective)
        train_offline(
            trainer, samples, Schedule(seconds, options.rate), Progress(0.0, 0, 0.0), 0, lambda _: None
        )
        lengths.append(measure(network, shared, held, options.depth).acceptance_length)
    made = describe(network, options.method, method.objective.loss, 1.0, ())
    export(trainer.tensors(), made, folder, "huggingface", str(pair.policy))
    return lengths


def train(options: argparse.Namespace, drafter: Path, folder: Path, settings: Sequence[str]) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    given = ["--workers", 2, "--steps", options.steps, "--set", f"engine.model_drafter={drafter}"]
    run_paceline("train", options.recipe, "--out", folder, "--overwrite", *given, *words)


class Run:
    """What the record of a run tells."""

    def __init__(self, folder: Path) -> None:
        self.responses: list[ResponseDone] = []
        self.drafter: list[DrafterStep] = []
        self.sessions: list[DrafterSession] = []
        self.solve_rates: dict[int, float] = {}
        with RecordReader(folder) as record:
            for event in record:
                if isinstance(event, ResponseDone):
                    self.responses.append(event)
                elif isinstance(event, DrafterStep):
                    self.drafter.append(event)
                elif isinstance(event, DrafterSession):
                    self.sessions.append(event)
                elif isinstance(event, Evaluation):
                    self.solve_rates[event.step] = event.solve_rate

    def lengths(self, steps: range) -> list[tuple[int, int, int]]:
        """(step, group and sample, tokens) of all responses of these steps, in order."""
        found = [(r.step, 1000 * r.group + r.sample, r.response_tokens) for r in self._of(steps)]
        return sorted(found)

    def acceptance_length(self, steps: range) -> float:
        """Tokens per response and engine step."""
        own = self._of(steps)
        return sum(r.response_tokens for r in own) / max(sum(r.num_steps for r in own), 1)

    def _of(self, steps: range) -> list[ResponseDone]:
        return [response for response in self.responses if response.step in steps]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    drafter, lengths = PAIRS["countdown"].drafter, list[float]()
    if options.method != "osd":
        drafter = out / "head"
        lengths = make_head(options, drafter)
        print(f"plateau: acceptance length {lengths[0]:.3f} after half the time, {lengths[1]:.3f} after all")
    part = options.steps // PARTS
    settings = [
        *TASK,
        *SETTINGS,
        f"engine.budget.fixed_tokens={options.depth}",
        f"evaluation.every={part}",
        *options.set,
    ]
    grows = f"adaptive_drafter.method={options.method}"
    train(options, drafter, out / "adaptive", [*settings, grows])
    train(options, drafter, out / "frozen", [*settings, "adaptive_drafter=null"])
    adaptive, frozen = Run(out / "adaptive"), Run(out / "frozen")
    rows: list[dict[str, Any]] = []
    for number in range(PARTS):
        steps = range(number * part + 1, (number + 1) * part + 1)
        if adaptive.lengths(steps) != frozen.lengths(steps):
            raise SystemExit(f"the responses of steps {steps} differ: growing a drafter has changed a token")
        found = adaptive.acceptance_length(steps), frozen.acceptance_length(steps)
        rows.append(
            {
                "part": number + 1,
                "steps": part,
                "adaptive": found[0],
                "frozen": found[1],
                "ratio": found[0] / found[1],
                "solve_rate": [adaptive.solve_rates.get(at) for at in (steps[0] - 1, steps[-1])],
                "idle_core_s": sum(one.core_s or 0.0 for one in adaptive.sessions if one.step in steps),
                "versions": max((one.version for one in adaptive.drafter if one.step in steps), default=0),
                "tokens": sum(tokens for _, _, tokens in adaptive.lengths(steps)),
            }
        )
    bars = check(rows, adaptive.solve_rates)
    publish("drafter drift", rows, COLUMNS, options, plateau=lengths, settings=settings, bars=bars)
    print_bars(bars)


def check(rows: Sequence[dict[str, Any]], solve_rates: dict[int, float]) -> list[dict[str, Any]]:
    """The bars, as `print_bars` takes them."""
    kept = solve_rates[max(solve_rates)] / solve_rates[min(solve_rates)]
    return [
        {"case": case, "reached": reached, "needed": needed, "met": reached >= needed}
        for case, reached, needed in (
            ("goes on learning over frozen, last third", rows[-1]["ratio"], OF_FROZEN),
            ("solve rate at the end over that at the start", kept, OF_SOLVED),
        )
    ]


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--recipe", type=Path, default=ROOT / "recipes/countdown-adaptive.yaml")
    made.add_argument("--out", type=Path, default=ROOT / "runs/drafter-drift")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--method", choices=("eagle", "hass", "osd"), default="eagle")
    made.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="of the recipe")
    made.add_argument("--core-seconds", type=float, default=240.0, help="that the head learns before the run")
    made.add_argument("--prompts", type=int, default=768, help="that it learns from")
    made.add_argument("--held-out", type=int, default=96)
    made.add_argument("--rate", type=float, default=4e-3, help="its learning rate")
    made.add_argument("--depth", type=int, default=5)
    return made.parse_args()


if __name__ == "__main__":
    main()

"""A drafter that grows from nothing beside a training run: how fast, and what the idle time was worth.

    python benchmarks/drafter_growth.py --steps 120 --json benchmarks/results/drafter_growth.json

`paceline train` runs the recipe on two workers of one core each, responses divided evenly. The drafter's trainer has a
worker's core while that one has no response, no help would shorten the rollout and the learner does not train. Then
drafters are measured on responses of the final policy to held-out prompts, in chains of --depth tokens:

    grown      what the run has left behind
    offline    the same network, trained as long offline: on as many prompts' responses of the final policy itself, with
               all the processor time that the run's trainer has used, its loading and measuring included
    shipped    the pair's own drafter, distilled offline from the policy that the run began with

`curve` in the result has, for every step: idle core-seconds used so far, the processor time of training in them, and
how often a token of the drafter was the target's, as its trainer measured on held-out responses (agreement) and as the
engines met it (acceptance; none until they use it). Without `--overwrite` a run that is in `--out` goes on.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from drafter_data import draw_samples
from harness import ROOT, parser, print_bars, publish, run_paceline
from pairs import PAIRS

from paceline.distillation.fresh_drafter import make_small_model
from paceline.distillation.measuring import measure
from paceline.distillation.methods import METHODS, build_network
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.spot import growing_method
from paceline.distillation.target import load_model, share
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import find_newest, read_folder, rebuild_network
from paceline.record import DrafterSession, DrafterStep, RecordReader
from paceline.training.recipe import AdaptiveDrafterSection, load_recipe

SETTINGS = ("fleet.variant=even", "fleet.help=auto", "optimizer.precision=auto", "evaluation.problems=0")
SAMPLES = 2
"""Responses to each prompt, offline."""
COLUMNS = ("system", "acceptance_length", "first", "agreement", "core_s", "tokens", "of_grown")
OF_OFFLINE, OF_SHIPPED = 0.95, 0.8
"""Bars: acceptance length of the grown drafter, as a share of the other's."""
SHIPPED_S = 600.0
"""Idle core-seconds from which the second bar holds."""


def train(options: argparse.Namespace, settings: list[str]) -> None:
    """The run; its own view of it goes on."""
    mode = "--resume" if options.out.exists() and not options.overwrite else "--overwrite"
    chosen = [word for setting in settings for word in ("--set", setting)]
    words = ["--out", options.out, "--workers", 2, "--steps", options.steps, mode, *chosen]
    run_paceline("train", options.recipe, *words)


def read_curve(run: Path) -> list[dict[str, Any]]:
    """What the record tells of the drafter, step by step."""
    curve: list[dict[str, Any]] = []
    idle_s = 0.0
    with RecordReader(run) as record:
        for event in record:
            if isinstance(event, DrafterSession):
                idle_s += event.core_s or 0.0
            elif isinstance(event, DrafterStep):
                curve.append(
                    {
                        "step": event.step,
                        "idle_core_s": idle_s,
                        "trained_s": event.trained_s,
                        "agreement": event.agreement,
                        "acceptance": event.acceptance,
                    }
                )
    return curve


def fresh_network(policy: Path, shared: Shared, section: AdaptiveDrafterSection, folder: Path) -> Network:
    """What the run's drafter was in the beginning, but for the random numbers."""
    method = METHODS[section.method]
    if not issubclass(method.network, SmallModel):
        return build_network(method, shared, None)
    make_small_model(policy, folder, section.hidden_size, section.layers, 1)
    return build_network(method, shared, folder)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    chosen = [f"adaptive_drafter.method={options.method}"] if options.method else []
    settings = [*SETTINGS, *chosen, *options.set]
    recipe = load_recipe(options.recipe, settings)
    section = recipe.adaptive_drafter
    if section is None:
        raise SystemExit(
            f"{options.recipe} has no section adaptive_drafter: give recipes/countdown-adaptive.yaml"
        )
    train(options, settings)
    responses = options.out / "responses"
    shutil.rmtree(responses, ignore_errors=True)  # of an earlier state of the policy
    curve = read_curve(options.out)
    used_s = curve[-1]["idle_core_s"]
    found = read_folder(options.out / "drafter", find_newest(options.out / "drafter"))
    if found is None:
        raise SystemExit(f"after {used_s:.1f} idle core-seconds no drafter was saved: give more --steps")

    policy, pair = options.out / "policy", PAIRS["countdown"]
    target = load_model(policy)
    shared = share(target)
    counts = options.prompts, options.held_out
    samples, held = draw_samples(pair, policy, target, counts, SAMPLES, responses)

    torch.manual_seed(0)
    method = growing_method(section.method, recipe.sampling.temperature)
    offline = fresh_network(policy, shared, section, responses / "fresh")
    last = [Progress(0.0, 0, 0.0)]
    train_offline(
        Trainer(offline, shared, method.objective),
        samples,
        Schedule(used_s, options.rate),
        last[0],
        0,
        lambda progress: last.__setitem__(0, progress),
    )
    tensors, made = found
    systems: dict[str, tuple[Network, float, int]] = {
        "grown": (rebuild_network(made, tensors, shared), used_s, made.trained_tokens),
        "offline": (offline, last[0].core_s, last[0].num_tokens),
        "shipped": (SmallModel(load_model(pair.drafter)), 0.0, 0),
    }
    rows: list[dict[str, Any]] = []
    for system, (network, core_s, tokens) in systems.items():
        worth = measure(network, shared, held, options.depth)
        row = {"system": system, "acceptance_length": worth.acceptance_length, "first": worth.acceptance[0]}
        rows.append(row | {"agreement": worth.agreement[0], "core_s": core_s, "tokens": tokens})
        rows[-1]["of_grown"] = rows[0]["acceptance_length"] / worth.acceptance_length
    bars = check(rows, used_s)
    extra = {"method": section.method, "settings": settings, "bars": bars, "curve": curve}
    publish("drafter growth", rows, COLUMNS, options, **extra)
    print_bars(bars)


def check(rows: list[dict[str, Any]], used_s: float) -> list[dict[str, Any]]:
    """The bars, as `print_bars` takes them; the second one holds once enough idle time has been used."""
    grown = {row["system"]: row["of_grown"] for row in rows}
    reached = {"grown over offline": (grown["offline"], OF_OFFLINE)}
    if used_s >= SHIPPED_S:
        reached["grown over shipped"] = grown["shipped"], OF_SHIPPED
    return [
        {"case": case, "reached": value, "needed": needed, "met": value >= needed}
        for case, (value, needed) in reached.items()
    ]


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--recipe", type=Path, default=ROOT / "recipes/countdown-adaptive.yaml")
    made.add_argument("--out", type=Path, default=ROOT / "runs/drafter-growth")
    made.add_argument("--overwrite", action="store_true", help="begin the run anew")
    made.add_argument("--steps", type=int, default=120)
    made.add_argument("--method", choices=("osd", "eagle", "hass", "eagle3"), help="in place of the recipe's")
    made.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="of the recipe")
    made.add_argument("--prompts", type=int, default=768, help="that the offline drafter trains on")
    made.add_argument("--held-out", type=int, default=192)
    made.add_argument("--rate", type=float, default=4e-3, help="the offline drafter's learning rate")
    made.add_argument("--depth", type=int, default=5)
    return made.parse_args()


if __name__ == "__main__":
    main()

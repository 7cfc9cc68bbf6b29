"""What a second trainer of the same drafter brings in the same time (TLT 4.2).

    python benchmarks/drafter_team.py --json benchmarks/results/drafter_team.json

As beside a run: processes of one core each, which learn from responses of the Countdown policy to --prompts problems,
in state TRAINING all the while. A fresh drafter is trained by one of them, then another by as many as --trainers, for
--seconds by the clock after all have met. At each mark the newest drafter is measured on responses to other
prompts, in chains of --depth tokens; `core_s` is the processor time of all its trainers' steps so far, `tokens` what it
has learned from. Repetitions begin with other random weights, and take turns. Give each trainer a core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from drafter_data import Measured, draw_samples
from harness import median, parser, publish
from pairs import PAIRS

from paceline.distillation.checkpoints import write
from paceline.distillation.fresh_drafter import make_head, make_small_model
from paceline.distillation.measuring import measure
from paceline.distillation.packing import Sample
from paceline.distillation.spot import LESSON, SpotSettings, make_lesson
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.target import load_model, share
from paceline.distillation.team import ROUND, Round, read_json
from paceline.distillation.training_folder import find_newest, read_folder, rebuild_network

SAMPLES = 2
COLUMNS = ("seconds", "trainers", "acceptance_length", "acceptance_range", "agreement", "core_s", "tokens")
POLL_S = 0.05
PATIENCE_S = 120.0


def make_folder(options: argparse.Namespace, folder: Path, seed: int, lesson: Any) -> SpotSettings:
    """A fresh drafter, and what it is to learn from."""
    policy, drafter = PAIRS["countdown"].policy, folder / "fresh"
    if options.method == "osd":
        make_small_model(policy, drafter, None, 2, seed)
    else:
        make_head(policy, drafter, options.method, seed)
    (folder / "drafter").mkdir()
    write(folder / "drafter" / LESSON, *lesson)
    return SpotSettings(
        parent=os.getpid(),
        folder=str(folder / "drafter"),
        target=str(policy),
        method=options.method,
        drafter=str(drafter),
        temperature=1.0,
        rate=options.rate,
    )


def train(options: argparse.Namespace, settings: SpotSettings, num_trainers: int) -> list[Any]:
    """The newest drafter at each mark, with its description."""
    folder, found = Path(settings.folder), []
    link = SpotLink(settings, num_trainers)
    try:
        for number in range(num_trainers):
            link.resume(f"w{number}", "w0")
        until_s = time.monotonic() + PATIENCE_S
        while not have_begun(folder, num_trainers):
            if time.monotonic() > until_s:
                raise SystemExit(f"{num_trainers} trainers have not met in {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)
        begin_s = time.monotonic()
        for mark in options.seconds:
            time.sleep(max(begin_s + mark - time.monotonic(), 0.0))
            found.append(read_folder(folder, find_newest(folder)))
    finally:
        link.close()
    return found


def have_begun(folder: Path, num_trainers: int) -> bool:
    """Whether all train together, and something was saved."""
    if num_trainers > 1:
        together = read_json(folder / ROUND, Round)
        if together is None or len(together.members) < num_trainers:
            return False
    return read_folder(folder, find_newest(folder)) is not None


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    pair = PAIRS["countdown"]
    target = load_model(pair.policy)
    shared = share(target)
    counts = options.prompts, options.held_out
    samples, held = draw_samples(pair, pair.policy, target, counts, SAMPLES)
    if options.method == "osd":  # it computes the states itself
        samples = [Sample(one.ids, one.num_prompt_tokens, torch.empty(one.num_tokens, 0)) for one in samples]
    lesson = make_lesson(1, dict(target.named_parameters()), samples)
    teams = (1, options.trainers)
    measured: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for repetition in range(options.repetitions):
        for team in teams[:: -1 if repetition % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="paceline-") as name:
                settings = make_folder(options, Path(name), repetition, lesson)
                found = train(options, settings, team)
            for mark, one in zip(options.seconds, found, strict=True):
                measured.setdefault((mark, team), []).append(look(one, shared, held, options.depth))
    rows = [row_of(mark, team, measured[mark, team]) for mark in options.seconds for team in teams]
    publish("drafter team", rows, COLUMNS, options)


def look(found: Any, shared: Any, held: Measured, depth: int) -> dict[str, Any]:
    tensors, made = found
    worth = measure(rebuild_network(made, tensors, shared), shared, held, depth)
    return {
        "acceptance_length": worth.acceptance_length,
        "agreement": worth.agreement[0],
        "core_s": made.trained_s,
        "tokens": made.trained_tokens,
    }


def row_of(mark: float, team: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions."""
    row = {name: median([one[name] for one in found]) for name in found[0]}
    lengths = [one["acceptance_length"] for one in found]
    return {
        "seconds": mark,
        "trainers": team,
        **row,
        "acceptance_range": [min(lengths), max(lengths)],
    }


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--method", choices=("eagle", "hass", "osd"), default="osd")
    made.add_argument("--trainers", type=int, default=2)
    made.add_argument("--seconds", type=float, nargs="+", default=[20.0, 40.0, 80.0])
    made.add_argument("--prompts", type=int, default=384, help="that they learn from")
    made.add_argument("--held-out", type=int, default=96)
    made.add_argument("--repetitions", type=int, default=2)
    made.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    made.add_argument("--depth", type=int, default=5)
    return made.parse_args()


if __name__ == "__main__":
    main()

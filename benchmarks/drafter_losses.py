"""Ways to train a drafter at equal processor time: what is accepted of its drafts with the shared dice.

    python benchmarks/drafter_losses.py --json benchmarks/results/drafter_losses.json
    python benchmarks/drafter_losses.py --pair prose --prompts 200 --held-out 68 --samples 8 \\
        --json benchmarks/results/drafter_losses_prose.json

Every row trains a fresh drafter on the same responses of the pair's policy, for the same processor time on one thread,
and measures it on responses to other prompts, that no drafter has seen, in chains of --depth tokens. The target's
states are read once before and count for nobody. `shipped` is the pair's own small drafter, distilled offline.
Responses are made with `paceline rollout` and kept in runs/drafters.

The network of `eagle` with its own loss and with others tells losses apart; so does that of `eagle3` with its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, parser, publish
from pairs import PAIRS, Pair
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.distillation.measuring import Dice, measure
from paceline.distillation.methods import METHODS, Method, MethodName, build_network
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import ATTENTION_NAME, Sample
from paceline.distillation.responses import Response, read_responses
from paceline.distillation.target import choose_layers, load_model, read_samples, share
from paceline.distillation.trainer import Trainer

FOLDER = ROOT / "runs/drafters"
READ_TOKENS = 4096
VARIANTS: tuple[tuple[MethodName, str | None, int | None], ...] = (
    ("eagle", None, None),
    ("eagle", "forward_kl", None),
    ("eagle", "disagreement", None),
    ("eagle", "log_disagreement", None),
    ("hass", None, None),
    ("hass", "log_disagreement", None),
    ("eagle3", None, None),
    ("eagle3", "reverse_kl", None),
    ("eagle3", "total_variation", None),
    ("eagle3", "disagreement", None),
    ("eagle3", "log_disagreement", None),
    ("eagle3", None, 3),
    ("eagle3", "log_disagreement", 3),
    ("osd", "forward_kl", None),
    ("osd", "reverse_kl", None),
    ("osd", "log_disagreement", None),
)
"""(method, loss in place of its own, self-fed steps in place of its own)"""
COLUMNS = ("system", "loss", "steps", "acceptance_length", "first", "agreement", "tokens", "core_s")


def make_prompts(pair_name: str, pair: Pair, options: argparse.Namespace) -> tuple[Path, Path]:
    """Files of prompts to train on, and of held-out ones. The shipped drafter has seen none of them."""
    counts = {"train": options.prompts, "held-out": options.held_out}
    rows = iter(pair.draw_prompts(pair.policy, sum(counts.values()), 11))
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = []
    for part, count in counts.items():
        made.append(FOLDER / f"{pair_name}-{part}-{count}x{options.samples}-prompts.jsonl")
        lines = (json.dumps({"prompt_ids": row}) + "\n" for row in islice(rows, count))
        made[-1].write_text("".join(lines))
    return made[0], made[1]


def roll_out(policy: Path, prompts: Path, samples: int) -> list[Response]:
    """So many responses to each prompt, from the file of an earlier run if there is one."""
    out = prompts.with_name(prompts.name.replace("-prompts", ""))
    if not out.is_file():
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "paceline.cli",
            "rollout",
            policy,
            prompts,
            "--out",
            out,
        ]
        subprocess.run([*command, "--samples", str(samples), "--dtype", "float32"], check=True)
    return read_responses(out)


def read(model: Any, rows: Sequence[Response]) -> list[Sample]:
    """The responses with all the states that any network reads."""
    layers = choose_layers(model.config.num_hidden_layers)
    return list(read_samples(model, ((row.ids, row.num_prompt_tokens) for row in rows), layers, READ_TOKENS))


def fresh_network(method: Method, pair: Pair, shared: Shared) -> Network:
    """An untrained network; the small model is of the shipped drafter's shape."""
    if not issubclass(method.network, SmallModel):
        return build_network(method, shared, None)
    config = AutoConfig.from_pretrained(pair.drafter)
    return SmallModel(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME))


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    pair = PAIRS[options.pair]
    train_prompts, held_prompts = make_prompts(options.pair, pair, options)
    target = load_model(pair.policy)
    shared = share(target)
    samples = read(target, roll_out(pair.policy, train_prompts, options.samples))
    held_rows = roll_out(pair.policy, held_prompts, options.samples)
    held = list(zip(read(target, held_rows), [Dice(row.key or 0, 1.0) for row in held_rows], strict=True))
    rows = []

    def add(system: str, loss: str, steps: int, network: Network, used: Progress) -> None:
        worth = measure(network, shared, held, options.depth)
        rows.append(
            {
                "system": system,
                "loss": loss,
                "steps": steps,
                "acceptance_length": worth.acceptance_length,
                "first": worth.acceptance[0],
                "agreement": worth.agreement[0],
                "acceptance": list(worth.acceptance),
                "agreements": list(worth.agreement),
                "tokens": used.num_tokens,
                "core_s": used.core_s,
                "parameters": sum(p.numel() for p in network.parameters()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    add("shipped", "", 0, SmallModel(load_model(pair.drafter)), Progress(0.0, 0, 0.0))
    for name, loss, steps in VARIANTS:
        if options.methods and name not in options.methods.split(","):
            continue
        method = METHODS[name]
        method = method if loss is None else method.with_loss(loss)
        method = method if steps is None else method.with_steps(steps)
        torch.manual_seed(0)
        network = fresh_network(method, pair, shared)
        used = [Progress(0.0, 0, 0.0)]
        schedule = Schedule(options.core_seconds, options.rate)
        trainer = Trainer(network, shared, method.objective)
        train_offline(trainer, samples, schedule, used[0], 0, lambda p: used.__setitem__(0, p))  # noqa: B023
        label = method.objective.loss if loss else f"{method.objective.loss} (its own)"
        add(name, label, method.objective.steps, network, used[0])
    publish(
        f"drafter losses, {options.pair}, {options.core_seconds:g} core-seconds",
        rows,
        COLUMNS,
        options,
        depth=options.depth,
    )


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--pair", choices=sorted(PAIRS), default="countdown")
    made.add_argument("--core-seconds", type=float, default=180.0, help="of each row")
    made.add_argument("--rate", type=float, default=4e-3)
    made.add_argument("--depth", type=int, default=5)
    made.add_argument("--methods", default="", help="only these, with commas between")
    made.add_argument("--prompts", type=int, default=1536, help="to train on")
    made.add_argument("--held-out", type=int, default=192, help="to measure on")
    made.add_argument("--samples", type=int, default=2, help="responses to each prompt")
    return made.parse_args()


if __name__ == "__main__":
    main()

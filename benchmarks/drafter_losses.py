"""Ways to train a drafter at equal processor time: what is accepted of its drafts with the shared dice.

    python benchmarks/drafter_losses.py --json benchmarks/results/drafter_losses.json
    python benchmarks/drafter_losses.py --pair prose --prompts 200 --held-out 40 --samples 8 \\
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
from typing import Any

import torch
from drafter_data import draw_samples
from harness import parser, publish, save
from pairs import PAIRS, Pair
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.distillation.measuring import measure
from paceline.distillation.methods import METHODS, Method, MethodName, build_network
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import ATTENTION_NAME
from paceline.distillation.target import load_model, share
from paceline.distillation.trainer import Trainer

"""Responses to each prompt that is measured on."""
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
    target = load_model(pair.policy)
    shared, counts = share(target), (options.prompts, options.held_out)
    samples, held = draw_samples(pair, pair.policy, target, counts, options.samples)
    title = f"drafter losses, {options.pair}, {options.core_seconds:g} core-seconds"
    rows: list[dict[str, Any]] = []

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
        save(title, rows, options, depth=options.depth)

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
    publish(title, rows, COLUMNS, options, depth=options.depth)


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--pair", choices=sorted(PAIRS), default="countdown")
    made.add_argument("--core-seconds", type=float, default=60.0, help="of each row")
    made.add_argument("--rate", type=float, default=4e-3)
    made.add_argument("--depth", type=int, default=5)
    made.add_argument("--methods", default="", help="only these, with commas between")
    made.add_argument("--prompts", type=int, default=1536, help="to train on")
    made.add_argument("--held-out", type=int, default=192, help="to measure on")
    made.add_argument("--samples", type=int, default=2, help="responses to each prompt")
    return made.parse_args()


if __name__ == "__main__":
    main()

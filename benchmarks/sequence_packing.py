"""Training tokens per second of packed against padded batches, on the lengths of a file of responses (TLT 4.2).

    paceline rollout assets/countdown-policy recipes/countdown-prompts.jsonl --out runs/responses.jsonl
    python benchmarks/sequence_packing.py runs/responses.jsonl --json benchmarks/results/sequence_packing.json

Both take the same optimizer steps on the same responses, drawn at random: a padded batch pads each to its longest, a
pack puts them behind each other. Tokens are those of prompts and responses; padding counts for nothing. `sorted` pads
batches of neighbours in length, which changes what a batch is made of. Seconds are processor time, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from harness import ROOT, parser, publish

from paceline.distillation.packing import Pack, Sample, pack_samples

COLUMNS = ("method", "batch", "system", "tokens_per_s", "ratio", "ratio_range")


def pad_samples(samples: Sequence[Sample]) -> Pack:
    """A padded batch, as a pack of documents of one length."""
    width = max(len(sample.ids) for sample in samples)
    padded = [
        replace(
            sample,
            ids=torch.cat([sample.ids, sample.ids.new_zeros(width - len(sample.ids))]),
            states=torch.cat(
                [sample.states, sample.states.new_zeros(width - len(sample.ids), sample.states.shape[1])]
            ),
        )
        for sample in samples
    ]
    deciding = [
        torch.arange(row * width + sample.num_prompt_tokens - 1, row * width + len(sample.ids) - 1)
        for row, sample in enumerate(samples)
    ]
    return replace(pack_samples(padded), deciding=torch.cat(deciding))


def measure(
    make_trainer: Callable[[], Any],
    batches: Sequence[Sequence[Sample]],
    build: Callable[[Sequence[Sample]], Pack],
) -> float:
    """Tokens per second of processor time over the batches, after one to warm up; building the batches counts."""
    trainer = make_trainer()
    trainer.step(build(batches[0]), 1e-4)
    began_s = time.process_time()
    for batch in batches:
        trainer.step(build(batch), 1e-4)
    return sum(len(s.ids) for batch in batches for s in batch) / (time.process_time() - began_s)


def main() -> None:
    options = parse_arguments()
    from paceline.distillation.methods import METHODS, build_network
    from paceline.distillation.responses import read_responses
    from paceline.distillation.target import choose_layers, load_model, read_samples, share
    from paceline.distillation.trainer import Trainer

    torch.set_num_threads(options.threads)
    target = load_model(options.target)
    shared = share(target)
    rows = read_responses(options.responses)
    layers = choose_layers(shared.config.num_hidden_layers)
    chosen = Random(0).sample(rows, min(len(rows), options.batch * options.batches))
    samples = list(read_samples(target, [(r.ids, r.num_prompt_tokens) for r in chosen], layers, 4096))
    batches = [samples[i : i + options.batch] for i in range(0, len(samples), options.batch)]
    by_length = sorted(samples, key=lambda s: s.num_tokens)
    neighbours = [by_length[i : i + options.batch] for i in range(0, len(by_length), options.batch)]
    systems = {
        "padded": (batches, pad_samples),
        "sorted": (neighbours, pad_samples),
        "packed": (batches, pack_samples),
    }
    table = []
    for name in options.methods.split(","):
        method = METHODS[name]
        speeds: dict[str, list[float]] = {system: [] for system in systems}
        for repetition in range(options.repetitions):
            order = list(systems) if repetition % 2 == 0 else list(reversed(systems))
            for system in order:
                torch.manual_seed(0)
                speeds[system].append(
                    measure(
                        lambda: Trainer(build_network(method, shared, None), shared, method.objective),  # noqa: B023
                        *systems[system],
                    )
                )
        for system, values in speeds.items():
            ratios = [value / base for value, base in zip(values, speeds["padded"], strict=True)]
            table.append(
                {
                    "method": name,
                    "batch": options.batch,
                    "system": system,
                    "tokens_per_s": statistics.median(values),
                    "ratio": statistics.median(ratios),
                    "ratio_range": [min(ratios), max(ratios)],
                }
            )
    lengths = sorted(len(s.ids) for s in samples)
    quantiles = {f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (10, 50, 90, 99)}
    publish("sequence packing", table, COLUMNS, options, length_tokens=quantiles)


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("responses", type=Path, help="file of 'paceline rollout'")
    made.add_argument("--target", type=Path, default=ROOT / "assets/countdown-policy")
    made.add_argument("--methods", default="eagle,hass,eagle3")
    made.add_argument("--batch", type=int, default=32, help="responses of an optimizer step")
    made.add_argument("--batches", type=int, default=12)
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--threads", type=int, default=1)
    return made.parse_args()


if __name__ == "__main__":
    main()

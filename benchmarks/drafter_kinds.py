"""Kinds of drafters beside one target: what a draft token costs, how many are right, and the speed over the batch size.

    python benchmarks/drafter_kinds.py --pair countdown --json benchmarks/results/drafter_kinds.json

The target is the pair's policy, inflated to a size that is bound by memory. Drafters:

    suffix          suffix trees alone; all others have them too
    shipped         the pair's small language model, distilled offline
    eagle, eagle3   draft heads, trained on the policy's responses for --core-seconds, then inflated as the target is
    small           a small language model of the shipped one's shape, trained as long from nothing
    grown           what a run with `adaptive_drafter` has left behind (--run), whose final policy is the target then

`plain` is Paceline without drafts. Every engine does the same rollouts, with the same keys, in turn; tokens are the
same (`equal`), so `over_suffix` and `over_plain` compare times for the same tokens. ms_per_token: what a draft token
takes the model drafter at that batch size; share: of the rollout's time. Training prompts and measured ones differ.

    python benchmarks/drafter_kinds.py --run runs/drafter-growth --methods --batches 8 --json FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rollouts
from drafter_data import FOLDER, roll_out
from harness import Child, median, parser, print_bars, publish, run_paceline, save
from pairs import PAIRS, TARGETS, Pair, Prompt
from rollouts import System, Timed, Work

from paceline.distillation.fresh_drafter import lend_tokenizer
from paceline.drafting.drafter import is_draft_head
from paceline.tasks.inflation import inflate_checkpoint, inflate_head
from paceline.training.run_folder import DRAFTER, POLICY
from paceline.training.run_folder import GROWN as MODEL
from paceline.types import DraftGrowth

SHAPES = {1: (1, 1), 8: (2, 4), 64: (8, 8)}
"""By batch size, prompts and responses to each."""
ROLLOUTS = {1: 4, 8: 2, 64: 1}
"""In a repetition."""
WARM_UP_SEED, SEED = 3, 11
OF_SUFFIX, OF_SUFFIX_BATCH = 1.2, 8
"""The bar of a drafter that has grown: its speed over that of suffix trees alone, at this batch size."""
NUM_WARM_UP_PROMPTS = 2
COLUMNS = (
    "batch", "system", "tokens_per_s", "over_suffix", "over_suffix_range", "over_plain", "acceptance_length",
    "ms_per_token", "share", "equal",
)  # fmt: skip
Serve = Callable[[Work], tuple[Timed, DraftGrowth]]


def make_engine(model: str, drafter: str, options: dict[str, Any]) -> Serve:
    """Start an engine (in the child process). drafter: a folder; empty: suffix trees alone."""
    engine = rollouts.start_engine(
        System("paceline" if drafter else "paceline_suffix", True), model, drafter, options
    )
    loop = engine.scheduler.loop
    receive = loop.receive

    def serve(work: Work) -> tuple[Timed, DraftGrowth]:
        grown = DraftGrowth()

        def count(drafts: Any) -> None:
            nonlocal grown
            grown += drafts.growth
            receive(drafts)

        with patch.object(loop, "receive", count):
            return rollouts.roll_out(engine, work), grown

    return serve


def train(pair: Pair, method: str, responses: Path, options: argparse.Namespace) -> Path:
    """The folder of a drafter that has learned from responses, from an earlier run if there is one."""
    folder = FOLDER / f"{responses.stem}-{method}-{options.loss}-{options.core_seconds:g}"
    model = folder / "model"
    if not (model / "config.json").is_file():
        network = ["--method", method]
        if method == "small":
            fresh = make_fresh(pair, FOLDER / f"{options.pair}-fresh")
            network = ["--method", "osd", "--small-model", str(fresh)]
        schedule = ["--loss", options.loss, "--core-minutes", options.core_seconds / 60, "--threads", 1]
        run_paceline(
            "drafter", "train", pair.policy, responses, "--out", folder, "--overwrite", *network, *schedule
        )
        run_paceline("drafter", "export", folder, "--out", model)
    return model


def make_fresh(pair: Pair, folder: Path) -> Path:
    """A small model of the shipped one's shape that has learned nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair.drafter)).save_pretrained(folder)
    lend_tokenizer(pair.policy, folder)
    return folder


def make_drafters(
    pair: Pair, target: Path, prompts: Sequence[Prompt], options: argparse.Namespace
) -> dict[str, str]:
    """Folders of all drafters, of a size that suits the target. prompts: to train on."""
    made = {"suffix": "", "shipped": pair.make_drafter(TARGETS / f"{options.pair}-drafter")}
    models = {"grown": options.run / DRAFTER / MODEL} if options.run else {}
    if options.methods:
        responses = roll_out(pair.policy, prompts, options.samples)
        models |= {method: train(pair, method, responses, options) for method in options.methods}
    for name, model in models.items():
        large = TARGETS / f"{options.pair}-{name}"
        if is_draft_head(model):
            inflate_head(model, target, large)
        else:
            lend_tokenizer(pair.policy, model)
            if pair.drafter_sizes is None:
                large = model
            else:
                inflate_checkpoint(model, large, **pair.drafter_sizes)
        made[name] = str(large)
    return made


def main() -> None:
    options = parse_arguments()
    pair, target = PAIRS[options.pair], TARGETS / options.pair
    if options.run:
        pair, target = replace(pair, policy=options.run / POLICY), TARGETS / f"{options.pair}-run"
    model = pair.make_target(target)
    per_repetition = sum(SHAPES[batch][0] * ROLLOUTS[batch] for batch in options.batches)
    count = options.prompts + options.repetitions * per_repetition + NUM_WARM_UP_PROMPTS
    drawn = pair.draw_prompts(pair.policy, count, SEED)
    drafters = make_drafters(pair, target, drawn[: options.prompts], options)
    engine_options = {"threads": options.threads, "dtype": options.dtype, "rival_kernels": "vllm"}
    children = {
        name: Child(name, make_engine, model, folder, engine_options) for name, folder in drafters.items()
    }
    fresh = iter(drawn[options.prompts :])
    warm_up = Work(list(islice(fresh, NUM_WARM_UP_PROMPTS)), 4, options.max_tokens, WARM_UP_SEED)
    for child in children.values():
        child.ready()
        child.call(warm_up)
        print(f"{child.name}: ready", file=sys.stderr, flush=True)
    title, rows = f"drafters, {options.pair}", list[dict[str, Any]]()
    for batch in options.batches:
        prompts, samples = SHAPES[batch]
        runs: dict[str, list[list[tuple[Timed, DraftGrowth]]]] = {name: [] for name in ("plain", *drafters)}
        for repetition in range(options.repetitions):
            works = [
                Work(list(islice(fresh, prompts)), samples, options.max_tokens, SEED + repetition)
                for _ in range(ROLLOUTS[batch])
            ]
            for name in list(runs)[:: -1 if repetition % 2 else 1]:
                child = children["suffix" if name == "plain" else name]
                runs[name].append([child.call(replace(work, drafting=name != "plain")) for work in works])
        rows += [row_of(batch, name, runs) for name in runs]
        save(title, rows, options, parameters=count_parameters(drafters))
        for row in rows[-len(runs) :]:
            print(json.dumps(row), file=sys.stderr, flush=True)
    for child in children.values():
        child.close()
    bars = check(rows)
    publish(title, rows, COLUMNS, options, parameters=count_parameters(drafters), bars=bars)
    print_bars(bars)


def check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bar of a grown drafter, where there is one and its batch size was measured."""
    return [
        {
            "case": f"grown over suffix trees at batch {OF_SUFFIX_BATCH}",
            "reached": row["over_suffix"],
            "needed": OF_SUFFIX,
            "met": row["over_suffix"] >= OF_SUFFIX,
        }
        for row in rows
        if (row["system"], row["batch"]) == ("grown", OF_SUFFIX_BATCH)
    ]


def row_of(batch: int, name: str, runs: dict[str, list[list[tuple[Timed, DraftGrowth]]]]) -> dict[str, Any]:
    """runs: by system, repetition and rollout, what each took and its model drafter's part of it."""
    walls = {system: [sum(t.wall_s for t, _ in one) for one in made] for system, made in runs.items()}
    ids = {system: [[t.ids for t, _ in one] for one in made] for system, made in runs.items()}
    own = [timed for one in runs[name] for timed, _ in one]
    grown = sum((g for one in runs[name] for _, g in one), DraftGrowth())
    tokens = [sum(t.num_tokens for t, _ in one) for one in runs[name]]
    over = {
        other: [theirs / mine for theirs, mine in zip(walls[other], walls[name], strict=True)]
        for other in ("suffix", "plain")
    }
    return {
        "batch": batch,
        "system": name,
        "tokens_per_s": median([n / wall for n, wall in zip(tokens, walls[name], strict=True)]),
        "over_suffix": median(over["suffix"]),
        "over_suffix_range": [min(over["suffix"]), max(over["suffix"])],
        "over_plain": median(over["plain"]),
        "acceptance_length": sum(tokens) / sum(sum(timed.num_steps) for timed in own),
        "ms_per_token": 1e3 * grown.seconds / grown.num_rows if grown.num_rows else None,
        "share": grown.seconds / sum(walls[name]),
        "equal": ids[name] == ids["plain"],
    }


def count_parameters(drafters: dict[str, str]) -> dict[str, int]:
    """Of each model drafter as it was measured; what a head shares with the target is not its own."""
    from safetensors import safe_open

    counts = {}
    for name, folder in drafters.items():
        if folder:
            with safe_open(Path(folder) / "model.safetensors", "np") as file:
                shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
            counts[name] = sum(map(prod, shapes))
    return counts


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--pair", choices=sorted(PAIRS), default="countdown")
    made.add_argument("--methods", nargs="*", default=["eagle", "eagle3", "small"], help="drafters to train")
    made.add_argument(
        "--run", type=Path, metavar="FOLDER", help="with a grown drafter; its policy is the target"
    )
    made.add_argument("--loss", default="log_disagreement", help="that they are trained with")
    made.add_argument("--core-seconds", type=float, default=300.0, help="of training each of them")
    made.add_argument("--prompts", type=int, default=1536, help="to train on")
    made.add_argument("--samples", type=int, default=2, help="responses to each prompt to train on")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], choices=list(SHAPES))
    made.add_argument("--repetitions", type=int, default=2)
    made.add_argument("--max-tokens", type=int, default=640)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--dtype", default="bfloat16")
    return made.parse_args()


if __name__ == "__main__":
    main()

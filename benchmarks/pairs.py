"""The pairs of target and drafter that benchmarks decode with, and prompts that neither has learned from.

The Countdown drafter was distilled on search traces and on the policy's responses to prompts of
`scripts/pretrain_countdown.py prompts`. Both draw from the problems that the task does not hold out, so every prompt
here comes from the held-out ones: the two are told apart by a hash of the puzzle, whatever the seed or the order of its
numbers (tests/unit/test_benchmark_pairs.py). The prose pair's prompts are a file of the problems that its script held
out of everything (scripts/pretrain_prose.py prompts --held-out).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ROOT / "runs/targets"
"""Where inflated targets lie; fixed, because vLLM's compile cache tells models apart by their folder."""

TARGET_SIZES = {"hidden": 1024, "intermediate": 2816, "layers": 16, "heads": 16, "kv_heads": 8}
"""189 M parameters beside the embedding."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A small policy, how its target is made of it, and its drafter."""

    policy: Path
    drafter: Path
    draw_prompts: Callable[[Path, int, int], list[Prompt]]
    """(policy's folder, count, seed) -> token ids of so many different prompts."""
    rollouts: Mapping[str, int]
    """Rollouts in a repetition of `speed.py`, by case: few responses differ in length and in how well they are drafted
    for, the Countdown pair's more than prose."""
    drafter_sizes: Mapping[str, int] | None = None
    """What the drafter is inflated to; None: it keeps its size."""

    def make_target(self, folder: Path) -> str:
        """Inflate the policy into `folder` to a model of memory-bound size, its function unchanged."""
        from paceline.tasks.inflation import inflate_checkpoint

        inflate_checkpoint(self.policy, folder, **TARGET_SIZES)
        return str(folder)

    def make_drafter(self, folder: Path) -> str:
        """The drafter's folder; inflated into `folder` where it would cost too little beside the target."""
        from paceline.tasks.inflation import inflate_checkpoint

        if self.drafter_sizes is None:
            return str(self.drafter)
        inflate_checkpoint(self.drafter, folder, **self.drafter_sizes)
        return str(folder)


def draw_countdown(model: Path | str, count: int, seed: int, **problems: int) -> list[Prompt]:
    """Held-out Countdown prompts, no puzzle twice; problems: the task's options."""
    from transformers import AutoTokenizer

    from paceline.tasks import load_task

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_task("countdown", **problems).held_out_rows(count, seed)
    return [tuple(tokenizer(row["prompt"])["input_ids"]) for row in rows]


def draw_lines(file: Path, model: Path | str, count: int, seed: int) -> list[Prompt]:
    """Prompts drawn from a file with one `{"prompt": text}` a line, no line twice."""
    from transformers import AutoTokenizer

    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    if count > len(texts):
        raise SystemExit(f"{file} has {len(texts)} prompts, {count} are needed: lower --repetitions")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tuple(tokenizer(text)["input_ids"]) for text in Random(seed).sample(texts, count)]


PAIRS = {
    "countdown": Pair(
        ROOT / "assets/countdown-policy",
        ROOT / "assets/countdown-drafter",
        draw_countdown,
        {"8x16": 1, "2x4": 4, "1x1": 16},
    ),
    "prose": Pair(
        ROOT / "assets/prose-policy",
        ROOT / "assets/prose-drafter",
        partial(draw_lines, ROOT / "assets/prose-prompts.jsonl"),
        {"8x16": 1, "2x4": 2, "1x1": 6},
        {"hidden": 512, "intermediate": 1408, "layers": 5, "heads": 8, "kv_heads": 4},
    ),
}


def make_prompts(model: Path | str, count: int, seed: int, **problems: int) -> list[Prompt]:
    """Prompts of the first pair, for the benchmarks that know no other."""
    return draw_countdown(model, count, seed, **problems)


def prepare_target(model: str | None, folder: Path) -> str:
    """The target's folder: the one given, or the Countdown policy inflated into `folder`."""
    return model if model is not None else PAIRS["countdown"].make_target(folder / "target")

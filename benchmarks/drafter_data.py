"""Responses that benchmarks of drafters train and measure on, and what their target thought at each token."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, run_paceline
from pairs import Pair, Prompt

from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.distillation.measuring import Dice
from paceline.distillation.packing import Sample
from paceline.distillation.responses import Response, read_responses
from paceline.distillation.target import choose_layers, read_samples

FOLDER = ROOT / "runs/drafters"
READ_TOKENS = 4096
Measured = list[tuple[Sample, Dice]]


def roll_out(policy: Path, prompts: Sequence[Prompt], samples: int, folder: Path = FOLDER) -> Path:
    """A file with so many responses to each prompt, from an earlier run that asked the same of the same weights.

    One that was interrupted does not count.
    """
    asked = "".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts)
    name = (
        f"{policy.name}-{read_checkpoint(policy).fingerprint()}-{zlib.crc32(asked.encode()):08x}-x{samples}"
    )
    out = folder / f"{name}.jsonl"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        prompts_file, part = out.with_suffix(".prompts"), out.with_suffix(".part")
        prompts_file.write_text(asked)
        switches = "--overwrite", "--samples", samples, "--dtype", "float32"
        run_paceline("rollout", policy, prompts_file, "--out", part, *switches)
        part.replace(out)
    return out


def draw_samples(
    pair: Pair, policy: Path, target: Any, counts: tuple[int, int], samples: int, folder: Path = FOLDER
) -> tuple[list[Sample], Measured]:
    """What to train on and what to measure on: `samples` responses to each of so many prompts, no prompt in both.

    The pair's shipped drafter has seen none of them. policy: the pair's, or a later state of it; target: it, loaded.
    """
    prompts = pair.draw_prompts(policy, sum(counts), 11)
    train_file, held_file = (
        roll_out(policy, part, samples, folder) for part in (prompts[: counts[0]], prompts[counts[0] :])
    )
    return read(target, train_file), read_measured(target, held_file)


def read(target: Any, responses: Path) -> list[Sample]:
    """A file's responses with all the states that any network reads."""
    return _read(target, read_responses(responses))


def read_measured(target: Any, responses: Path) -> Measured:
    """The same with the dice that threw them."""
    rows = read_responses(responses)
    return list(zip(_read(target, rows), [Dice(row.key or 0, 1.0) for row in rows], strict=True))


def _read(target: Any, rows: Sequence[Response]) -> list[Sample]:
    layers = choose_layers(target.config.num_hidden_layers)
    with torch.no_grad():
        return list(
            read_samples(target, ((row.ids, row.num_prompt_tokens) for row in rows), layers, READ_TOKENS)
        )

"""Responses that benchmarks of drafters train and measure on, and what their target thought at each token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pairs import Prompt

from paceline.distillation.measuring import Dice
from paceline.distillation.packing import Sample
from paceline.distillation.responses import Response, read_responses
from paceline.distillation.target import choose_layers, read_samples

READ_TOKENS = 4096
Measured = list[tuple[Sample, Dice]]


def roll_out(policy: Path, prompts: Sequence[Prompt], samples: int, out: Path) -> list[Response]:
    """So many responses to each prompt, from `out` if an earlier run has left them there."""
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        asked = out.with_name(f"{out.stem}-prompts.jsonl")
        asked.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
        command: list[str | Path] = [sys.executable, "-m", "paceline.cli", "rollout", policy, asked]
        subprocess.run([*command, "--out", out, "--samples", str(samples), "--dtype", "float32"], check=True)
    return read_responses(out)


def read(target: Any, rows: Sequence[Response]) -> list[Sample]:
    """The responses with all the states that any network reads."""
    layers = choose_layers(target.config.num_hidden_layers)
    with torch.no_grad():
        return list(
            read_samples(target, ((row.ids, row.num_prompt_tokens) for row in rows), layers, READ_TOKENS)
        )


def read_measured(target: Any, rows: Sequence[Response]) -> Measured:
    """The same with the dice that threw them."""
    dice = [Dice(row.key or 0, 1.0) for row in rows]
    return list(zip(read(target, rows), dice, strict=True))

"""A head that has learned a little of the shipped Countdown policy, and prompts for both."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import ATTENTION_NAME, Sample
from paceline.distillation.target import choose_layers, load_model, read_samples, share
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import Description, describe
from paceline.tasks import load_task

DEPTH = 3
POLICY = Path(__file__).resolve().parents[2] / "assets/countdown-policy"


@cache
def load_target() -> Any:
    """The policy, one for all tests: what it writes, and heads that learned from it, are remembered with it."""
    return load_model(POLICY)


def draw_prompts(count: int) -> list[list[int]]:
    """Token ids of Countdown problems."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rows = load_task("countdown").held_out_rows(count, seed=3)
    return [tokenizer(row["prompt"])["input_ids"] for row in rows]


@cache
def write_samples(target: Any) -> list[Sample]:
    """What the target writes."""
    layers = choose_layers(target.config.num_hidden_layers)
    torch.manual_seed(0)
    target.set_attn_implementation("sdpa")
    written = []
    for prompt in draw_prompts(8):
        rows = target.generate(
            torch.tensor([prompt]), max_new_tokens=100, do_sample=True, num_return_sequences=3
        )
        for ids in rows:
            ends = (ids == target.config.eos_token_id).nonzero()
            written.append((ids[: int(ends[0]) + 1] if len(ends) else ids, len(prompt)))
    target.set_attn_implementation(ATTENTION_NAME)
    return list(read_samples(target, written, layers, 4096))


@cache
def learn(target: Any, method: MethodName) -> tuple[Trainer, Description]:
    """A head after a few steps on what the target writes; the same one for the same target."""
    samples, shared = write_samples(target), share(target)
    torch.manual_seed(0)
    chosen = METHODS[method].with_steps(DEPTH)
    network = build_network(chosen, shared, None)
    trainer = Trainer(network, shared, chosen.objective)
    steps = itertools.count()
    schedule, begun = Schedule(60, rate=4e-3), Progress(0.0, 0, 0.0)
    train_offline(trainer, samples, schedule, begun, 0, lambda _: None, lambda: float(next(steps)))
    fused = choose_layers(target.config.num_hidden_layers) if network.num_fused else ()
    return trainer, describe(network, method, chosen.objective.loss, 1.0, fused)

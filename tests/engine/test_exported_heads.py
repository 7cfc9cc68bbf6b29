"""Exported heads in vLLM's own methods: they load, and are accepted as often as was measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from paceline.distillation.export import Form, export
from paceline.distillation.measuring import Dice, measure
from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import ATTENTION_NAME
from paceline.distillation.target import choose_layers, load_model, read_samples, share
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import Description, describe
from paceline.tasks import load_task

DEPTH = 3
MAX_TOKENS = 160
POLICY = Path(__file__).resolve().parents[2] / "assets/countdown-policy"


def draw_prompts(count: int) -> list[list[int]]:
    """Token ids of Countdown problems."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rows = load_task("countdown").held_out_rows(count, seed=3)
    return [tokenizer(row["prompt"])["input_ids"] for row in rows]


def learn(target: Any, method: MethodName) -> tuple[Trainer, Description]:
    """A head after a few steps on what the target writes."""
    shared = share(target)
    layers = choose_layers(target.config.num_hidden_layers)
    torch.manual_seed(0)
    target.set_attn_implementation("sdpa")
    written = []
    for prompt in draw_prompts(24):
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=True)
        written.append((ids[0], len(prompt)))
    target.set_attn_implementation(ATTENTION_NAME)
    samples = list(read_samples(target, written, layers, 4096))
    chosen = METHODS[method].with_steps(DEPTH)
    network = build_network(chosen, shared, None)
    trainer = Trainer(network, shared, chosen.objective)
    steps = itertools.count()
    schedule, begun = Schedule(60, rate=4e-3), Progress(0.0, 0, 0.0)
    train_offline(trainer, samples, schedule, begun, 0, lambda _: None, lambda: float(next(steps)))
    fused = layers if network.num_fused else ()
    return trainer, describe(network, method, chosen.objective.loss, 1.0, fused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form"), [("eagle", "huggingface"), ("eagle3", "huggingface"), ("eagle3", "speculators")]
)
def test_vllm_accepts_as_often_as_was_measured(tmp_path: Path, method: MethodName, form: Form) -> None:
    from vllm import LLM, SamplingParams

    target = load_model(POLICY)
    trainer, made = learn(target, method)
    export(trainer.tensors(), made, tmp_path / "head", form, str(POLICY))
    engine = LLM(
        str(POLICY),
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 27,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "model": str(tmp_path / "head"),
            "method": method,
            "num_speculative_tokens": DEPTH,
        },
    )
    prompts = draw_prompts(40)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        use_tqdm=False,
    )
    counted = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    accepted = counted["vllm:spec_decode_num_accepted_tokens"] / counted["vllm:spec_decode_num_drafts"]
    written = [
        (torch.tensor(prompt + list(output.outputs[0].token_ids)), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    samples = read_samples(target, written, choose_layers(4), 4096)
    greedy = ((sample, Dice(0, 0.0)) for sample in samples)
    worth = measure(trainer.network, share(target), greedy, DEPTH, float("inf"))
    assert accepted > 0.2
    assert worth.acceptance_length == pytest.approx(1 + accepted, rel=0.02)

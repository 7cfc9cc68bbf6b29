"""Exported heads in vLLM's own methods: they load, and are accepted as often as was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trained_head import DEPTH, POLICY, draw_prompts, learn, load_target

from paceline.distillation.export import Form, export
from paceline.distillation.measuring import Dice, measure
from paceline.distillation.methods import MethodName
from paceline.distillation.target import choose_layers, read_samples, share

MAX_TOKENS = 160


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form"), [("eagle", "huggingface"), ("eagle3", "huggingface"), ("eagle3", "speculators")]
)
def test_vllm_accepts_as_often_as_was_measured(tmp_path: Path, method: MethodName, form: Form) -> None:
    from vllm import LLM, SamplingParams

    target = load_target()
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

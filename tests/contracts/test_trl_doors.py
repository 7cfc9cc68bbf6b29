"""Every private door of TRL and transformers that Paceline uses still exists and has the shape we rely on."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import transformers
import trl.trainer.grpo_trainer as grpo
import trl.trainer.rloo_trainer as rloo
from trl.generation.vllm_generation import VLLMGeneration

TRAINERS = [(grpo, grpo.GRPOTrainer), (rloo, rloo.RLOOTrainer)]
both = pytest.mark.parametrize(("module", "trainer"), TRAINERS, ids=["grpo", "rloo"])


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@both
def test_trainer_looks_the_generation_class_up_in_its_module(module: ModuleType, trainer: type) -> None:
    assert module.VLLMGeneration is VLLMGeneration
    source = inspect.getsource(trainer.__init__)
    assert "VLLMGeneration(" in source
    for keyword in ("model=", "accelerator=", "processing_class=", "max_completion_length=", "temperature="):
        assert keyword in source.partition("VLLMGeneration(")[2]


@both
def test_trainer_pushes_before_it_generates(module: ModuleType, trainer: type) -> None:
    source = inspect.getsource(trainer._generate_single_turn)
    assert source.index("vllm_generation.sync_weights()") < source.index("vllm_generation.generate(")


def test_generation_calls() -> None:
    assert names(VLLMGeneration.sync_weights) == ["self"]
    assert names(VLLMGeneration.generate) == ["self", "prompts", "images", "num_generations", "profiler"]


@both
def test_rewards_see_the_rows_in_order(module: ModuleType, trainer: type) -> None:
    assert names(trainer._calculate_rewards) == [
        "self",
        "inputs",
        "prompts",
        "completions",
        "completion_ids_list",
    ]
    source = inspect.getsource(trainer._calculate_rewards)
    assert "reward_kwargs = {key: [example[key] for example in inputs] for key in keys}" in source


@both
def test_scores_are_made_in_one_place(module: ModuleType, trainer: type) -> None:
    wanted = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    assert names(trainer._get_per_token_logps_and_entropies)[:6] == wanted


@both
def test_micro_batches_are_buffered(module: ModuleType, trainer: type) -> None:
    source = inspect.getsource(trainer._prepare_inputs)
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in source


@both
def test_metrics_are_lists_by_mode(module: ModuleType, trainer: type) -> None:
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in inspect.getsource(
        trainer.__init__
    )


def test_checkpoint_can_be_saved_at_any_time() -> None:
    assert names(transformers.Trainer._save_checkpoint) == ["self", "model", "trial"]
    assert "self._save_rng_state(" in inspect.getsource(transformers.Trainer._save_checkpoint)

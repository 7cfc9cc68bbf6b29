"""Every private door of TRL and transformers that Paceline uses still exists and has the shape we rely on.

The lists of them (`MODULES`, `TRAINERS_OWN`, `ELSEWHERE`) are complete. Nothing of veRL's is touched.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import torch
import transformers
import trl.trainer.grpo_trainer as grpo
import trl.trainer.rloo_trainer as rloo
from torch import distributed as dist
from trl import GRPOConfig, RLOOConfig
from trl.generation.vllm_generation import VLLMGeneration

import paceline
from paceline.engine.doors import has_member
from paceline.integrations.trl import options
from paceline.integrations.trl.generation import EngineGeneration
from paceline.integrations.trl.trainers import EngineTrainer

TRAINERS = [(grpo, grpo.GRPOTrainer), (rloo, rloo.RLOOTrainer)]
both = pytest.mark.parametrize(("module", "trainer"), TRAINERS, ids=["grpo", "rloo"])


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# -- the lists are complete

MODULES = {grpo.__name__, rloo.__name__}
"""Imported from below TRL's top."""

TRAINERS_OWN = {
    *("_calculate_rewards", "_prepare_inputs", "_get_per_token_logps_and_entropies"),
    *("_metrics", "_buffered_inputs", "_step"),
    *("vllm_generation", "args", "model", "state"),
}
"""Methods of TRL's trainers that ours replaces, and attributes that it reads."""

ELSEWHERE = {
    *("_load_from_checkpoint", "_save_checkpoint", "_attn_implementation"),
    *("_Options", "_set_default_timeout"),
}
"""Private names of transformers' trainer and configurations, and of torch's gloo."""

PACKAGE = Path(paceline.__file__).parent
SOURCES = sorted({*PACKAGE.rglob("*.py")} - {*(PACKAGE / "engine").rglob("*.py")})


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def foreign(tree: ast.Module) -> set[str]:
    """Private names of other objects than `self` that the file does not give to any of its own."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    read = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
    }
    return {name for name in read - own - {"_replace"} if re.match("_[^_]", name)}


def test_every_private_name_of_another_package_is_listed() -> None:
    """Those that the engine touches stand in engine/doors.py (test_vllm_doors.py)."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    assert set().union(*map(foreign, trees)) == ELSEWHERE
    modules = {name for tree in trees for name in imported(tree)}
    assert {name for name in modules if name.startswith("trl.")} == MODULES
    assert not {name for name in modules if name.split(".")[0] == "verl"}


@both
def test_what_our_trainer_replaces_and_reads_is_listed(module: ModuleType, trainer: type) -> None:
    [node] = ast.parse(inspect.getsource(EngineTrainer)).body
    own = {*vars(EngineTrainer), *inspect.get_annotations(EngineTrainer)}
    own |= {
        read.attr
        for read in ast.walk(node)
        if isinstance(read, ast.Attribute) and ast.unparse(read.value) in {"self", "super()"}
    }
    found = {name for name in own if not name.startswith("__") and has_member(trainer, name)}
    assert found == TRAINERS_OWN


@both
def test_what_trl_asks_its_generation_for_is_there(module: ModuleType, trainer: type) -> None:
    asked = set(re.findall(r"self\.vllm_generation\.(\w+)", inspect.getsource(module)))
    assert {name for name in asked if not hasattr(EngineGeneration, name)} <= {"vllm_client"}, "of a server"
    paths = set(re.findall(r"self\.vllm_generation\.llm\.([\w.]+)", inspect.getsource(module)))
    assert paths <= {"llm_engine.model_config.max_model_len"}


# -- and each door has its shape


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


PASSED = (
    {
        "model",
        "accelerator",
        "processing_class",
        "mode",
        "structured_outputs_regex",
        "server_base_url",
        "server_host",
    }
    | {
        "server_port",
        "server_timeout",
        "group_port",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "model_impl",
    }
    | {
        "max_model_length",
        "max_num_seqs",
        "enable_sleep_mode",
        "trust_remote_code",
        "repetition_penalty",
        "top_p",
    }
    | {"temperature", "top_k", "min_p", "max_completion_length", "logprobs", "generation_kwargs"}
)
"""What TRL gives its generation class: from options of options.py, and the size of a batch."""


def test_generation_is_given_what_we_know() -> None:
    assert set(names(VLLMGeneration.__init__)) - {"self"} == PASSED


def test_every_option_of_trl_is_honoured_the_trainers_or_refused() -> None:
    tables = (options.HONOURED, options.TRAINERS, options.ENGINES.keys(), options.REFUSED.keys())
    known = [name for table in tables for name in table]
    general = {field.name for field in fields(transformers.TrainingArguments)}
    found = {field.name for kind in (GRPOConfig, RLOOConfig) for field in fields(kind)} - general
    assert sorted(known) == sorted(found)


def test_every_option_of_sampling_is_honoured_or_refused() -> None:
    sampling = pytest.importorskip("vllm", reason="vLLM is not installed").SamplingParams
    found = {name for name in names(sampling) if not name.startswith("_")}
    assert sorted([*options.SAMPLING, *options.NOT_SAMPLING]) == sorted(found)


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


def test_a_checkpoint_can_be_read_without_training() -> None:
    assert names(transformers.Trainer._load_from_checkpoint)[:2] == ["self", "resume_from_checkpoint"]


def test_a_gloo_group_has_its_own_device_and_time_to_meet() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=3.0)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    group._set_default_timeout(timedelta(seconds=5.0))
    values = torch.ones(2)
    work = group.allreduce([values])
    work.wait()
    assert work.is_completed()
    assert values.tolist() == [1.0, 1.0]


def test_a_configuration_says_how_its_model_attends() -> None:
    assert hasattr(transformers.PretrainedConfig, "_attn_implementation")

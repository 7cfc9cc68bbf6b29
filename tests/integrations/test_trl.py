"""TRL's trainers on a real engine: every algorithm runs, and rollout and trainer agree after every weight push."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from digit_task import DigitTask

from paceline.config import EngineSettings
from paceline.dice import derive_key
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, EngineError
from paceline.integrations.trl import options
from paceline.integrations.trl.generation import EngineGeneration
from paceline.tasks.alphabet import encode_prompt
from paceline.training.policy import load_policy, load_tokenizer
from paceline.training.recipe import Recipe
from paceline.training.trl_arguments import trainer_arguments
from paceline.types import Response, RolloutRequest

PROMPTS, GROUP = 2, 4
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(policy_dir: Path) -> Iterator[RolloutEngine]:
    with RolloutEngine(
        policy_dir, EngineSettings(), dtype="float32", max_model_len=128, kv_cache_bytes=1 << 27
    ) as made:
        yield made


def make_trainer(engine: RolloutEngine, policy_dir: Path, folder: Path, **sections: Any) -> tuple[Any, Seen]:
    """A trainer for two tiny steps, and the list in which its reward function keeps what it is given."""
    from datasets import Dataset

    from paceline.integrations.trl import trainers as trl

    fields: dict[str, Any] = {
        "task": {"name": "countdown"},
        "model": str(policy_dir),
        "steps": 2,
        "batch": {"prompts": PROMPTS, "group_size": GROUP, "micro_batch": 4},
        "lengths": {"prompt_tokens": 32, "response_tokens": 48},
        "optimizer": {"learning_rate": 1e-2},
    }
    recipe = Recipe.model_validate(fields | sections)
    task, seen = DigitTask(), []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.append(columns | {"completions": completions})
        return [task.reward(text, {"number": 1}) for text in completions]

    kind = trl.RLOOTrainer if recipe.algorithm.name == "rloo" else trl.GRPOTrainer
    arguments = trainer_arguments(recipe, folder, on_cpu=True)
    arguments.save_strategy = "no"
    trainer = kind(
        model=load_policy(policy_dir, 80, on_cpu=True),
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(task.train_rows(16, 0)),
        processing_class=load_tokenizer(policy_dir),
        engine=engine,
        run_seed=5,
    )
    return trainer, seen


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    """The log line of each step."""
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "rloo"])
def test_algorithm_trains_on_the_engine(
    engine: RolloutEngine, policy_dir: Path, tmp_path: Path, name: str
) -> None:
    trainer, seen = make_trainer(engine, policy_dir, tmp_path, algorithm={"name": name})
    before = trainer.model.model.norm.weight.detach().clone()
    trainer.train()
    lines = steps_of(trainer)
    assert len(lines) == len(seen) == 2
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(sum(columns["rollout_accepted_tokens"]) > 0 for columns in seen), (
        "its group guesses each other"
    )
    assert not before.equal(trainer.model.model.norm.weight)
    if name != "rloo":  # TRL's RLOO has no importance-sampling correction
        for line in lines:
            assert line["sampling/sampling_logp_difference/max"] < 1e-4
            assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)


def test_without_a_push_rollout_and_trainer_disagree(
    engine: RolloutEngine, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the bound of the other test would catch a push that does nothing."""
    trainer, _ = make_trainer(engine, policy_dir, tmp_path, optimizer={"learning_rate": 1e-1})
    generation = trainer.vllm_generation
    generation.sync_weights()
    monkeypatch.setattr(generation, "push_weights", lambda: None)
    trainer.train()
    first, second = (line["sampling/sampling_logp_difference/max"] for line in steps_of(trainer))
    assert first < 1e-4
    assert second > 0.1


def test_reward_functions_receive_the_rollout(
    engine: RolloutEngine, policy_dir: Path, tmp_path: Path
) -> None:
    trainer, seen = make_trainer(engine, policy_dir, tmp_path)
    trainer.train()
    keys = [key for columns in seen for key in columns["rollout_key"]]
    assert len(set(keys)) == 2 * PROMPTS * GROUP
    for step, columns in enumerate(seen):
        assert columns["rollout_sample"] == list(range(GROUP)) * PROMPTS
        groups = columns["rollout_group"]
        assert [groups.index(group) for group in groups] == [i - i % GROUP for i in range(PROMPTS * GROUP)]
        for i, (tokens, reason) in enumerate(
            zip(columns["completion_ids"], columns["rollout_finish_reason"], strict=True)
        ):
            assert (reason == "length") == (len(tokens) == 48 and tokens[-1] != trainer.eos_token_ids[0])
            prompt = encode_prompt(columns["prompts"][i])  # what TRL fed is what the task's tokenizer makes
            place, sample = divmod(i, GROUP)
            assert columns["rollout_key"][i] == derive_key(5, (0, step, 0, place, *prompt), sample)
        assert all(
            a <= d
            for a, d in zip(*(columns[f"rollout_{n}_tokens"] for n in ("accepted", "drafted")), strict=True)
        )
    assert seen[0]["rollout_policy_version"][0] + 1 == seen[1]["rollout_policy_version"][0]


def test_padding_is_saved_without_a_change(engine: RolloutEngine, policy_dir: Path, tmp_path: Path) -> None:
    import torch

    from paceline.integrations.trl import trainers as trl

    trainer, _ = make_trainer(engine, policy_dir, tmp_path)
    lengths, prompts, kept = [3, 17, 1, 9], [5, 2, 4, 1], 20
    ids = torch.randint(4, 20, (4, 6 + kept))
    mask = torch.zeros_like(ids)
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        mask[row, 6 - prompt : 6 + length] = 1
    model = trainer.model.eval()
    arguments = (model, ids, mask, kept)
    with torch.no_grad():
        trimmed = trainer._get_per_token_logps_and_entropies(*arguments, batch_size=2, compute_entropy=True)
        plain = super(trl.EngineTrainer, trainer)._get_per_token_logps_and_entropies(
            *arguments, compute_entropy=True
        )
    real = mask[:, 6:].bool()
    for ours, theirs in zip(trimmed[:2], plain[:2], strict=True):
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)


SAMPLING: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["a"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 7,
    "min_tokens": 18,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "bad_words": ["b"],
    "structured_outputs": {"regex": "[0-9]+"},
    "logit_bias": {4: 1.0},
    "allowed_token_ids": [3, 4],
    "extra_args": {"their_own": 1},
    "skip_reading_prefix_cache": True,
    "repetition_detection": None,
}


@pytest.mark.parametrize("name", sorted(options.SAMPLING))
def test_a_sampling_option_reaches_the_engine(policy_dir: Path, name: str) -> None:
    seen: list[tuple[RolloutRequest, Any]] = []

    class Keeper:
        def generate(self, requests: list[RolloutRequest], params: Any) -> list[Any]:
            seen.extend((request, params) for request in requests)
            return []

    state = SimpleNamespace(global_step=0)
    generation = EngineGeneration(
        trainer=SimpleNamespace(state=state, model=SimpleNamespace(training=True)),
        engine=Keeper(),  # type: ignore[arg-type]
        run_seed=0,
        model=object(),
        accelerator=SimpleNamespace(num_processes=1),
        processing_class=None,
        temperature=1.0,
        max_completion_length=20,
        generation_kwargs={name: SAMPLING[name]},
    )
    generation.generate([[3, 4]], None, 1)
    request, params = seen[0]
    assert request.max_tokens == (7 if name == "max_tokens" else 20)
    if name == "structured_outputs":
        assert params.structured_outputs.regex == "[0-9]+"
    else:
        assert getattr(params, name) == SAMPLING[name]


def test_a_failed_response_has_the_reward_of_a_failure() -> None:
    """A fleet delivers it; reward functions see half a response."""
    from paceline.integrations.trl.trainers import EngineTrainer

    class Scored:
        def _calculate_rewards(self, inputs: list[Any], *told: Any) -> torch.Tensor:
            return torch.ones(len(inputs), 2)

    class Trainer(EngineTrainer, Scored):
        def __init__(self, failure_reward: float | None) -> None:
            self._failure_reward = failure_reward
            whole = Response(RolloutRequest((1,), 5), (4,), (-1.0,), "stop", 0, 0, 0, 0, 0, 1)
            failed = replace(whole, finish_reason="error", failure="ended its workers")
            turns = [[whole, failed]]
            self.vllm_generation = SimpleNamespace(responses=turns[0], turns=turns)  # type: ignore[assignment]
            self.model = SimpleNamespace(training=True)
            self._metrics = {"train": defaultdict(list)}

    told = [{}, {}], ["", ""], ["", ""], [[4], [4]]
    assert Trainer(-2.0)._calculate_rewards(*told).tolist() == [[1.0, 1.0], [-2.0, -2.0]]
    with pytest.raises(
        EngineError, match="response 1 ended its workers; it has no reward: set failure_reward"
    ):
        Trainer(None)._calculate_rewards(*told)


def test_refuses_an_option_that_would_do_nothing(engine: RolloutEngine, tmp_path: Path) -> None:
    from trl import GRPOConfig

    from paceline.integrations.trl import GRPOTrainer

    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_enable_sleep_mode=True)
    with pytest.raises(ConfigError, match="vllm_enable_sleep_mode"):
        GRPOTrainer(args=config, engine=engine)


def test_refuses_a_trainer_without_vllm(engine: RolloutEngine, tmp_path: Path) -> None:
    from trl import GRPOConfig

    from paceline.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match="use_vllm=True"):
        GRPOTrainer(args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), engine=engine)

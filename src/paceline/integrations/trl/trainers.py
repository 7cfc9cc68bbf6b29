"""TRL's trainers with Paceline's rollouts: `GRPOTrainer` and `RLOOTrainer` that take an `engine`.

    from paceline.integrations.trl import GRPOTrainer
    trainer = GRPOTrainer(model=..., args=GRPOConfig(use_vllm=True, ...), ..., engine=RolloutEngine(...))

Everything else stays TRL's: data, advantages, losses, importance-sampling correction, weight sync. What becomes of each
of its options is in options.py. The doors used (tests/contracts/test_trl_doors.py): the class `VLLMGeneration`, which
the trainer looks up when it is built (generation.py stands in for it); the method `_calculate_rewards` and `_metrics`,
by which the columns of `rollout_columns` reach reward functions and logs; two methods in which padding is saved
(padding.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trl.trainer.grpo_trainer as grpo_module
import trl.trainer.rloo_trainer as rloo_module

from paceline.errors import ConfigError, EngineError
from paceline.integrations.trl.generation import Engine, EngineGeneration
from paceline.integrations.trl.options import check_options
from paceline.integrations.trl.padding import score_trimmed, sort_by_length, sorting_span
from paceline.integrations.trl.prompt_order import PromptOrder
from paceline.types import Response


def rollout_columns(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """What reward functions receive about the responses that they score, one list per column.

    rollout_group (one id per prompt and step), rollout_sample, rollout_finish_reason ("stop", "length", or
    "error": it has failed, and ends where it did),
    rollout_key, rollout_policy_version, rollout_drafted_tokens, rollout_accepted_tokens, rollout_engine_steps.
    """
    return {
        "rollout_group": [r.group for r in responses],
        "rollout_sample": [r.request.sample for r in responses],
        "rollout_finish_reason": [r.finish_reason for r in responses],
        "rollout_key": [r.key for r in responses],
        "rollout_policy_version": [r.policy_version for r in responses],
        "rollout_drafted_tokens": [r.num_draft_tokens for r in responses],
        "rollout_accepted_tokens": [r.num_accepted_tokens for r in responses],
        "rollout_engine_steps": [r.num_steps for r in responses],
    }


def rollout_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Means over a rollout for the trainer's log."""
    steps = sum(r.num_steps for r in responses)
    tokens = sum(len(r.logprobs) for r in responses)
    drafted = sum(r.num_draft_tokens for r in responses)
    accepted = sum(r.num_accepted_tokens for r in responses)
    return {
        "rollout/acceptance_length": tokens / max(steps, 1),
        "rollout/acceptance_rate": accepted / max(drafted, 1),
        "rollout/drafted_tokens": float(drafted),
        "rollout/truncated_share": sum(r.finish_reason == "length" for r in responses)
        / max(len(responses), 1),
        "rollout/policy_version": float(responses[-1].policy_version) if responses else 0.0,
    }


def failed_rows(turns: Sequence[Sequence[Response]], completions: Sequence[Sequence[int]]) -> dict[int, str]:
    """What the rows of a batch have failed of, in any turn; a row without a failure is not there.

    Args:
        turns: responses to all rows, then those to the rows that called a tool, and so on.
        completions: token ids of each row, over all turns, cut to TRL's limit.

    A later turn does not say to which row it belongs, so its tokens do: its prompt is what the row had before. Of rows
    that are equal to there, the first that is free.
    """
    failed: dict[int, str] = {}
    for turn in turns:
        whole_batch = len(turn) == len(completions)
        for index, response in enumerate(turn):
            if response.failure is None:
                continue
            rows = [index] if whole_batch else _rows_of(response, turns[0], completions)
            if (row := next((row for row in rows if row not in failed), None)) is not None:
                failed[row] = response.failure
    return failed


def _rows_of(
    response: Response, first_turn: Sequence[Response], completions: Sequence[Sequence[int]]
) -> Iterator[int]:
    """Rows that begin with a response and its prompt, as far as they go."""
    ids = (*response.request.prompt, *response.tokens)
    for row, (first, completion) in enumerate(zip(first_turn, completions, strict=False)):
        whole = (*first.request.prompt, *completion)
        if ids[: len(whole)] == whole[: len(ids)]:
            yield row


class EngineTrainer:
    """Mixin over a TRL trainer: `engine` in place of TRL's own vLLM, rollout columns for the rewards.

    Args (beside TRL's):
        engine: serves this trainer alone while it lives; built from the same checkpoint.
        run_seed: seed of all response keys.
        failure_reward: what every reward function's value is for a response that has failed, whatever it gave: such a
            response ends where its engine gave it up. None: training stops with an EngineError.
    """

    _module: Any
    vllm_generation: EngineGeneration
    args: Any
    model: Any
    state: Any
    _metrics: Any
    _buffered_inputs: Any
    _step: int

    def __init__(
        self,
        *args: Any,
        engine: Engine,
        run_seed: int = 0,
        failure_reward: float | None = 0.0,
        **kwargs: Any,
    ) -> None:
        self._failure_reward = failure_reward
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        config = given.arguments.get("args")
        if config is None or not config.use_vllm:
            raise ConfigError("use_vllm=False: set use_vllm=True in args, or TRL will not ask the engine")
        check_options(config)

        def build(**options: Any) -> EngineGeneration:
            return EngineGeneration(trainer=self, engine=engine, run_seed=run_seed, **options)

        given.arguments["callbacks"] = [*(given.arguments.get("callbacks") or ()), PromptOrder()]
        with _replaced(self._module, "VLLMGeneration", build):
            super().__init__(*given.args, **given.kwargs)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        turns, self.vllm_generation.turns = self.vllm_generation.turns, []
        responses = self.vllm_generation.responses
        if len(responses) == len(inputs):
            columns = rollout_columns(responses)
            inputs = [
                {**row, **{name: values[i] for name, values in columns.items()}}
                for i, row in enumerate(inputs)
            ]
        mode = "train" if self.model.training else "eval"
        for name, value in rollout_metrics(responses).items():
            self._metrics[mode][name].append(value)
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        for row, failure in failed_rows(turns, completion_ids_list).items():
            rewards[row] = self._reward_failure(row, failure)
        return rewards

    def _reward_failure(self, index: int, failure: str) -> float:
        if self._failure_reward is None:
            raise EngineError(
                f"response {index} {failure}; it has no reward: set failure_reward to go on with a number"
            )
        return self._failure_reward

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        fresh = self._buffered_inputs
        if fresh is before or (size := sorting_span(self)) is None:
            return inputs
        self._buffered_inputs = [
            batch
            for start in range(0, len(fresh), size)
            for batch in sort_by_length(fresh[start : start + size])
        ]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        def score(ids: Any, mask: Any, kept: int) -> Any:
            return super(EngineTrainer, self)._get_per_token_logps_and_entropies(  # type: ignore[misc]
                model, ids, mask, kept, **options
            )

        size = batch_size or len(input_ids)
        return score_trimmed(score, input_ids, attention_mask, logits_to_keep, size)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


class GRPOTrainer(EngineTrainer, grpo_module.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer (GRPO, DAPO, Dr. GRPO, GSPO and GRPOConfig's other losses) on a RolloutEngine."""

    _module = grpo_module


class RLOOTrainer(EngineTrainer, rloo_module.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer on a RolloutEngine. Its loss does not use the rollout's log-probabilities."""

    _module = rloo_module

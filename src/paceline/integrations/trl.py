"""TRL's trainers with Paceline's rollouts: `GRPOTrainer` and `RLOOTrainer` that take an `engine`.

    from paceline.integrations.trl import GRPOTrainer
    trainer = GRPOTrainer(model=..., args=GRPOConfig(use_vllm=True, ...), ..., engine=RolloutEngine(...))

Everything else stays TRL's: data, advantages, losses, importance-sampling correction, weight sync. The doors used
(tests/contracts/test_trl_doors.py): the class `VLLMGeneration`, which the trainer looks up when it is built; the
method `_calculate_rewards` and `_metrics`, by which the columns of `rollout_columns` reach reward functions and logs;
two methods in which padding is saved (padding.py).

Invariant: a response's dice key is a pure function of (run seed, training or evaluation, optimizer step, rollout
within the step, prompt's place and token ids, sample): every step throws new dice, a resumed run the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import trl.trainer.grpo_trainer as grpo_module
import trl.trainer.rloo_trainer as rloo_module

from paceline.dice import derive_key
from paceline.errors import ConfigError, UnsupportedError
from paceline.integrations.padding import ORDER_FREE_LOSSES, score_trimmed, sort_by_length
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams

TRAINING, EVALUATION = 0, 1


class Engine(Protocol):
    """What generates: a RolloutEngine, or something around one that also measures."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Response]:
        """Responses in the order of the requests."""
        ...

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> int:
        """Take new weights under this number; returns the policy version."""
        ...

    @property
    def vllm_engine(self) -> Any:
        """The vLLM engine behind it."""
        ...


class _Trainer(Protocol):
    """What the seam reads of a TRL trainer."""

    model: Any
    state: Any


class EngineGeneration:
    """Stands in for TRL's `VLLMGeneration`: same calls, a RolloutEngine behind them."""

    def __init__(
        self,
        *,
        trainer: _Trainer,
        engine: Engine,
        run_seed: int,
        model: Any,
        accelerator: Any,
        processing_class: Any,
        **options: Any,
    ) -> None:
        if accelerator.num_processes > 1:
            raise UnsupportedError(
                f"{accelerator.num_processes} trainer processes: one RolloutEngine serves one process; start a "
                "single trainer process"
            )
        if hasattr(model, "peft_config"):
            raise UnsupportedError(
                "PEFT adapters are not pushed to the engine: train the full model, or merge first"
            )
        if options.get("mode", "colocate") != "colocate":
            raise ConfigError(
                f"vllm_mode={options['mode']!r}: the engine runs in this process; use 'colocate'"
            )
        self.engine = engine
        self.responses: list[Response] = []
        """The responses of the last `generate`, in order."""
        self._trainer = trainer
        self._run_seed = run_seed
        self._model = model
        self._accelerator = accelerator
        self._options = options
        self._drawn = (TRAINING, -1)
        self._draw = 0
        self._num_groups = 0
        self._pushed: int | None = None

    @property
    def llm(self) -> Any:
        """The vLLM engine, where TRL looks for an LLM (context length with tools)."""
        return _LLM(self.engine.vllm_engine)

    def sync_weights(self) -> None:
        """Give the trainer's weights to the engine, once after each optimizer step."""
        step = self._trainer.state.global_step
        if self._pushed == step:
            return
        self.push_weights()
        self._pushed = step

    def push_weights(self) -> None:
        """Give the trainer's weights to the engine in any case, numbered by optimizer steps from 1."""
        model = self._accelerator.unwrap_model(self._model)
        weights = ((name, weight.detach()) for name, weight in model.named_parameters())
        self.engine.push_weights(weights, version=int(self._trainer.state.global_step) + 1)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Generate one response per prompt; `prompts` holds each prompt `num_generations` times in a row.

        Returns what TRL's class returns: prompt ids, response ids, and for each position the sampled token's
        processed log-probability and id as lists of one.
        """
        if images is not None:
            raise UnsupportedError("prompts with images: only text prompts can be rolled out")
        requests = self._requests(prompts, num_generations)
        with profiler or nullcontext():
            self.responses = self.engine.generate(requests, self._params())
        tokens = [list(response.tokens) for response in self.responses]
        logprobs = [[[value] for value in response.logprobs] for response in self.responses]
        return prompts, tokens, logprobs, [[[token] for token in row] for row in tokens]

    def _requests(self, prompts: Sequence[Sequence[int]], num_generations: int) -> list[RolloutRequest]:
        mode, step, draw = self._next_draw()
        requests = []
        for i, prompt in enumerate(prompts):
            place, sample = divmod(i, num_generations)
            requests.append(
                RolloutRequest(
                    prompt=tuple(prompt),
                    max_tokens=self._options["max_completion_length"],
                    key=derive_key(self._run_seed, (mode, step, draw, place, *prompt), sample),
                    group=self._num_groups + place,
                    sample=sample,
                )
            )
        self._num_groups += -(-len(prompts) // num_generations)
        return requests

    def _next_draw(self) -> tuple[int, int, int]:
        """(mode, optimizer step, rollouts made before within that step)."""
        mode = TRAINING if self._trainer.model.training else EVALUATION
        now = (mode, int(self._trainer.state.global_step))
        self._draw = self._draw + 1 if now == self._drawn else 0
        self._drawn = now
        return (*now, self._draw)

    def _params(self) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        options = self._options
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        given = {name: options[name] for name in names if options.get(name) is not None}
        given["min_p"] = options.get("min_p") or 0.0
        given |= options.get("generation_kwargs") or {}
        if regex := options.get("structured_outputs_regex"):
            given["structured_outputs"] = StructuredOutputsParams(regex=regex)
        return SamplingParams(**given)


class _LLM:
    """The attribute path `llm.llm_engine.model_config` that TRL reads."""

    def __init__(self, engine: Any) -> None:
        self.llm_engine = engine


def rollout_columns(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """What reward functions receive about the responses that they score, one list per column.

    rollout_group (one id per prompt and step), rollout_sample, rollout_finish_reason ("stop", "length"),
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


class EngineTrainer:
    """Mixin over a TRL trainer: `engine` in place of TRL's own vLLM, rollout columns for the rewards.

    Args (beside TRL's):
        engine: serves this trainer alone while it lives; built from the same checkpoint.
        run_seed: seed of all response keys.
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
        **kwargs: Any,
    ) -> None:
        config = kwargs.get("args")
        if config is None or not config.use_vllm:
            raise ConfigError("use_vllm=False: set use_vllm=True in args, or TRL will not ask the engine")

        def build(**options: Any) -> EngineGeneration:
            return EngineGeneration(trainer=self, engine=engine, run_seed=run_seed, **options)

        with _replaced(self._module, "VLLMGeneration", build):
            super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
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
        return super()._calculate_rewards(inputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        fresh = self._buffered_inputs
        if fresh is before or getattr(self, "loss_type", "grpo") not in ORDER_FREE_LOSSES:
            return inputs
        size = self.args.gradient_accumulation_steps
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

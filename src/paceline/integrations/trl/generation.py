"""What stands in for TRL's `VLLMGeneration`: the same calls, with a RolloutEngine behind them.

Invariant: a response's dice key is a pure function of (run seed, training or evaluation, optimizer step, rollout
within the step, prompt's place and token ids, sample): every step throws new dice, a resumed run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paceline.dice import derive_key
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, EngineError, UnsupportedError
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams

TRAINING, EVALUATION = 0, 1


class Engine(Protocol):
    """What generates: a RolloutEngine, or something around one that also measures."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Response]:
        """Responses in the order of the requests; one that fails comes with the others, and says so."""
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
        self.turns: list[list[Response]] = []
        """Those of each `generate` since the trainer last counted rewards: the second and later ones go on after calls
        of tools, for the rows that called one."""
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
            self.responses = _delivering(self.engine)(requests, self.sampling_params())
        self.turns.append(self.responses)
        _refuse_empty(self.responses)
        tokens = [list(response.tokens) for response in self.responses]
        logprobs = [[[value] for value in response.logprobs] for response in self.responses]
        return prompts, tokens, logprobs, [[[token] for token in row] for row in tokens]

    def _requests(self, prompts: Sequence[Sequence[int]], num_generations: int) -> list[RolloutRequest]:
        mode, step, draw = self._next_draw()
        limits = self._options.get("generation_kwargs") or {}
        max_tokens = limits.get("max_tokens") or self._options["max_completion_length"]
        requests = []
        for i, prompt in enumerate(prompts):
            place, sample = divmod(i, num_generations)
            requests.append(
                RolloutRequest(
                    prompt=tuple(prompt),
                    max_tokens=max_tokens,
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

    def sampling_params(self) -> SamplingParams:
        """What responses are sampled with, by the trainer's options."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        options = self._options
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        given = {name: options[name] for name in names if options.get(name) is not None}
        given["min_p"] = options.get("min_p") or 0.0
        # Requests have their own; min_tokens is held to this one.
        given["max_tokens"] = options["max_completion_length"]
        given |= options.get("generation_kwargs") or {}
        if regex := options.get("structured_outputs_regex"):
            given["structured_outputs"] = {"regex": regex}
        if isinstance(outputs := given.get("structured_outputs"), dict):
            given["structured_outputs"] = StructuredOutputsParams(**outputs)
        return SamplingParams(**given)


def _delivering(engine: Engine) -> Callable[[Sequence[RolloutRequest], SamplingParams], list[Response]]:
    """The engine's `generate`; a RolloutEngine alone has to be told that one failed response shall not end all."""
    if isinstance(engine, RolloutEngine):
        return partial(engine.generate, on_failure="deliver")
    return engine.generate


def _refuse_empty(responses: Sequence[Response]) -> None:
    """Raise EngineError for a response that failed before its first token: TRL looks at the last token of each."""
    for index, response in enumerate(responses):
        if response.failure is not None and not response.tokens:
            raise EngineError(
                f"response {index} {response.failure}; it has no token, and TRL cannot train on an empty response: "
                "mend what it failed of, or leave its prompt out"
            )


class _LLM:
    """The attribute path `llm.llm_engine.model_config` that TRL reads."""

    def __init__(self, engine: Any) -> None:
        self.llm_engine = engine

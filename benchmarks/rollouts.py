"""Group rollouts on one engine in a process of its own, timed step by step. Runs in the children of speed.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pairs import Prompt
from rivals import Rival, configure, correct_vllm_sampling, forget_arctic
from steps import Step, watch_steps

TAIL_SHARE = 0.9
"""The tail begins when this share of the responses has finished."""
MAX_NUM_SEQS = 128


@dataclass(frozen=True)
class System:
    """What is measured: plain vLLM, one of its own speculators, or Paceline."""

    name: str
    compiled: bool
    rival: Rival | None = None
    is_tuned: bool = False
    """The engine is to try several settings of the rival's family."""


@dataclass(frozen=True)
class Work:
    """One rollout that a system is to do."""

    prompts: list[Prompt]
    samples: int
    max_tokens: int
    seed: int
    lengths: list[int] | None = None
    """So many tokens of each response, whatever they are; None: a response ends by itself."""
    drafting: bool = True
    """Paceline: with drafts."""
    rival: Rival | None = None
    """The setting to try, for an engine that tries several."""


@dataclass(frozen=True)
class Ended:
    """When the responses of a rollout ended."""

    ends_s: list[float]
    """Of each, from the start of the rollout; ascending."""

    @property
    def wall_s(self) -> float:
        """Until the last response ended."""
        return self.ends_s[-1]

    @property
    def tail_s(self) -> float:
        """From TAIL_SHARE of the responses finished to the last."""
        return self.ends_s[-1] - self.ends_s[int(TAIL_SHARE * (len(self.ends_s) - 1))]


@dataclass(frozen=True)
class Timed(Ended):
    """A finished rollout."""

    steps: list[Step]
    prompts: list[Prompt]
    """Of each response."""
    keys: list[int]
    ids: list[tuple[int, ...]]
    num_steps: list[int]
    """Steps in which each response grew."""
    nats: float
    """Minus the sum of the generated tokens' log-probabilities."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(ids) for ids in self.ids]

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(self.lengths)


def make_system(system: System, model: str, drafter: str, options: dict[str, Any]) -> Callable[[Work], Timed]:
    """Start the engine (in the child process) and return the function that does a rollout on it."""
    engine = start_engine(system, model, drafter, options)
    return lambda work: roll_out(engine, work)


def start_engine(system: System, model: str, drafter: str, options: dict[str, Any]) -> Any:
    """A RolloutEngine in this process. drafter: for systems that have one."""
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine, prepare_environment
    from paceline.processor import best_linear_kernel

    prepare_environment()
    settings: EngineSettings | None = None
    extra: dict[str, Any] = {}
    if system.rival is not None:
        correct_vllm_sampling()
        rival = system.rival.tuning_engine(MAX_NUM_SEQS) if system.is_tuned else system.rival
        extra["speculative_config"] = rival.speculative_config(drafter)
    elif system.name == "paceline":
        settings = EngineSettings(model_drafter=drafter, compiled=system.compiled)
    elif system.name == "paceline_suffix":
        settings = EngineSettings(compiled=system.compiled)
    kernels: AbstractContextManager[None] = nullcontext()
    if settings is None:
        extra["enforce_eager"] = not system.compiled
        if options["rival_kernels"] == "paceline":
            from paceline.engine.linear import replacing_kernels

            kernels = replacing_kernels(best_linear_kernel())
            extra["additional_config"] = {"linear_kernel": best_linear_kernel()}  # in the compile cache's key
    with kernels:
        return RolloutEngine(
            model,
            settings,
            dtype=options["dtype"],
            max_model_len=2048,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_bytes=1 << 30,
            **extra,
        )


def roll_out(engine: Any, work: Work) -> Timed:
    """Generate `work.samples` responses to each prompt, from empty suffix trees and an empty prefix cache."""
    from vllm import SamplingParams

    if work.rival is not None:
        configure(engine, work.rival)
    requests = make_requests(work)
    engine.reset_prefix_cache()
    forget_arctic(engine)
    if engine.settings is not None:
        engine.set_drafting(work.drafting)
    params = SamplingParams(temperature=1.0, ignore_eos=work.lengths is not None)
    ends: list[float] = []
    responses: list[Any] = [None] * len(requests)
    num_steps = [0] * len(requests)
    with watch_steps(engine.scheduler) as log:
        start = time.perf_counter()
        for event in engine.stream(requests, params):
            num_steps[event.index] += bool(event.tokens)
            log.num_gained += len(event.tokens)
            if event.response is not None:
                ends.append(time.perf_counter() - start)
                responses[event.index] = event.response
    return Timed(
        ends,
        log.steps,
        [request.prompt for request in requests],
        [request.key or 0 for request in requests],
        [response.tokens for response in responses],
        num_steps,
        -sum(sum(response.logprobs) for response in responses),
    )


def make_requests(work: Work) -> list[Any]:
    """A request for each response, with its key and its length if that is given."""
    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    requests = [
        RolloutRequest(prompt, work.max_tokens, key=derive_key(work.seed, prompt, sample), sample=sample)
        for prompt in work.prompts
        for sample in range(work.samples)
    ]
    if work.lengths is None:
        return requests
    return [replace(r, max_tokens=n) for r, n in zip(requests, work.lengths, strict=True)]

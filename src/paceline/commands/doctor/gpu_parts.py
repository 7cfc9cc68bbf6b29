"""What `paceline doctor --gpu` measures, part by part. Each part runs in child processes and returns what it found.

In the order of the parts a failure explains those of later ones: other dice make other tokens; logits that depend on
the batch make tokens differ although the code is right; times mean something once the tokens do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.bench.command import compare as compare_speed
from paceline.commands.bench.contender import Contender, Measurement
from paceline.commands.doctor.child import in_child
from paceline.commands.doctor.invariance_check import (
    INVARIANT,
    MAX_LEN,
    Way,
    check_invariance,
    compare,
    make_requests,
    small_engine,
)
from paceline.commands.inputs.launch import Launch, build_settings
from paceline.commands.inputs.model_folder import load_tokenizer, read_checkpoint
from paceline.commands.inputs.sampling import Sampling
from paceline.record.profile import StepPoint
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from paceline.engine.rollout_engine import RolloutEngine
    from paceline.engine.v2.checks import ThrownDice, VerifyingCost

DTYPE = "bfloat16"
QWEN_VOCAB_SIZE = 151_936
WORKLOADS = ((1, 8), (64, 2), (64, 8))
"""(requests, draft tokens of each) whose verification is timed."""
STEPS = ((1, 16, 64), (1, 2, 4, 8))
"""(requests, tokens of each) of the steps that are timed: every pair."""
CONTEXT = 512
QUESTIONS = (
    "Using each of the numbers 3, 7, 25 and 50 once, make an expression that equals 104. Think step by step.",
    "A train leaves at 9:40 and arrives at 13:05 after two stops of 12 minutes. How long does it move? Explain.",
    "List the prime numbers between 100 and 150, and say for each other odd number which factor it has.",
    "Prove that the square root of two is irrational.",
)
SAMPLES, LONGEST = 16, 512


@contextmanager
def batch_invariance(wanted: bool) -> Iterator[None]:
    """Let engines that start inside run with vLLM's batch-invariant kernels, or without."""
    before = os.environ.get(INVARIANT)
    os.environ[INVARIANT] = str(int(wanted))
    try:
        yield
    finally:
        if before is None:
            del os.environ[INVARIANT]
        else:
            os.environ[INVARIANT] = before


def check_dice() -> ThrownDice:
    """Does vLLM's kernel throw our dice on this device?"""
    return in_child(_throw_dice)


def _throw_dice() -> ThrownDice:
    from paceline.engine.v2.checks import throw_dice

    return throw_dice("cuda")


def check_exactness(model: Path) -> list[Way]:
    """Are the tokens those of plain vLLM with `seed=key`? Batch-invariant, or near-ties would part them."""
    with batch_invariance(True):
        plain = in_child(generate_plain, model, make_requests(), DTYPE)
        ours = in_child(generate_ours, model, make_requests(), DTYPE)
    return [compare(name, plain, responses) for name, responses in ours.items()]


def generate_plain(model: Path, requests: Sequence[RolloutRequest], dtype: str) -> list[Response]:
    """Responses of vLLM without Paceline, each request's key for its seed."""
    from paceline.engine.rollout_engine import RolloutEngine

    with RolloutEngine(model, None, dtype=dtype, **_SIZES, **small_engine()) as engine:
        return _generate(engine, requests, seeded=True)


def generate_ours(model: Path, requests: Sequence[RolloutRequest], dtype: str) -> dict[str, list[Response]]:
    """Responses of Paceline's engine, by what drafts them; the model drafts for itself, which is accepted often."""
    from paceline.config import BudgetSettings, EngineSettings
    from paceline.engine.profiling import RandomDrafts
    from paceline.engine.rollout_engine import RolloutEngine

    budget = BudgetSettings(policy="fixed", fixed_tokens=4)
    settings = EngineSettings(budget=budget, max_draft_tokens=4, draft_floor=0.0, model_drafter=str(model))
    made: dict[str, list[Response]] = {}
    with RolloutEngine(model, settings, dtype=dtype, **_SIZES, **small_engine()) as engine:
        engine.set_drafting(False)
        made["without drafts"] = _generate(engine, requests)
        engine.set_drafting(True)
        made["suffix trees and a draft model"] = _generate(engine, requests)
        half = [
            replace(one.request, generated=one.tokens[: len(one.tokens) // 2])
            for one in made["without drafts"]
        ]
        made["cut and resumed"] = _generate(engine, half)
        engine.scheduler.loop.free.drafter = RandomDrafts(engine.vocab_size)
        made["wrong drafts too"] = _generate(engine, requests)
    return made


_SIZES: Mapping[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
}


def _generate(
    engine: RolloutEngine, requests: Iterable[RolloutRequest], *, seeded: bool = False
) -> list[Response]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    found: dict[int, Response] = {}
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=1.0, ignore_eos=True, seed=request.key if seeded else None)
        engine.submit(index, request, params)
    while engine.num_running():
        for event in engine.step():
            if event.response is not None:
                found[event.index] = event.response
    return [found[index] for index in sorted(found)]


def check_batches(wanted: bool) -> list[Way]:
    """Are logits the same in every batch, with vLLM's batch-invariant kernels or without?"""
    with batch_invariance(wanted):
        return check_invariance(DTYPE)


def time_verifying(model: Path) -> list[VerifyingCost]:
    """What does deciding by the dice cost, beside vLLM's own verification?"""
    return in_child(_time_verifying, model)


def _time_verifying(model: Path) -> list[VerifyingCost]:
    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine
    from paceline.engine.v2.checks import time_verifying

    batch = max(num_requests for num_requests, _ in WORKLOADS)
    sizes = {**_SIZES, **small_engine(), "max_num_seqs": batch}
    with RolloutEngine(model, EngineSettings(max_draft_tokens=8), dtype=DTYPE, **sizes) as engine:
        runner = engine.vllm_engine.model_executor.driver_worker.worker.model_runner
        return [time_verifying(runner, *workload, QWEN_VOCAB_SIZE, 20) for workload in WORKLOADS]


def time_steps(model: Path) -> tuple[StepPoint, ...]:
    """What does a step take, by requests and tokens of each?"""
    return in_child(_time_steps, model)


def _time_steps(model: Path) -> tuple[StepPoint, ...]:
    from paceline.config import EngineSettings
    from paceline.engine.profiling import Shape, longest_response, measure_steps

    batches, widths = STEPS
    shapes = [Shape(batch, width, CONTEXT) for batch, width in product(batches, widths)]
    settings = EngineSettings(max_draft_tokens=max(widths) - 1)
    length = CONTEXT + longest_response(widths)
    launch = Launch(model, settings, "auto", length, max(batches), 1 << 30, True, True)
    with launch.start(max_num_batched_tokens=max(batches) * CONTEXT) as engine:
        return measure_steps(engine, shapes, 2)


def compare_with_plain(model: Path) -> list[dict[str, Any]]:
    """Tokens per second of plain vLLM and of Paceline with suffix trees, one engine after the other.

    Of QUESTIONS' groups of SAMPLES responses; a warm-up and one measurement each. Rows as of `paceline bench`.
    """
    tokenizer = load_tokenizer(read_checkpoint(model))
    prompts = [tuple(tokenizer.encode(question)) for question in QUESTIONS]
    longest = max(map(len, prompts)) + LONGEST
    measured: dict[str, list[Measurement]] = {}
    for name, drafter in (("plain", None), ("none", "none"), ("suffix", "suffix")):
        settings = None if drafter is None else build_settings(0, drafter, None, compiled=True)
        launch = Launch(model, settings, "auto", longest, len(prompts) * SAMPLES, 1 << 30, False, True)
        contender = Contender(name, launch, Sampling(LONGEST), 0.9)
        try:
            contender.wait_until_ready()
            _, *measured[name] = [contender.measure(_requests(prompts, turn)) for turn in range(2)]
        finally:
            contender.close()
    return [compare_speed(name, measured) for name in measured]


def _requests(prompts: Sequence[tuple[int, ...]], turn: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(prompt, LONGEST, key=(turn << 32) + (group << 16) + sample, sample=sample)
        for group, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


def describe_device() -> dict[str, Any]:
    """The first GPU and what drives it. Called in a child: CUDA that is begun in a process stays in it."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
    }

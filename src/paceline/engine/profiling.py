"""Measures what engine steps of a given shape take, on whatever machine this is: the target's half of a profile.

Every request of a step verifies the same number of random draft tokens, which the target rejects, so that the shape
and the context stay as asked. The engine is the one that serves rollouts, with its scheduler, sampler and dice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import numpy as np

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.drafter import Forgetful
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, EngineError
from paceline.record.profile import StepPoint
from paceline.types import DraftBatch, DraftQuery, Float32Array, RolloutRequest

STEPS = 4
"""Steps of each shape that one pass measures."""

MOST_TOKENS = 128
"""Tokens of one request that a step can verify: the longest draft of `EngineSettings.max_draft_tokens`, and one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step consists of."""

    batch: int
    tokens_per_request: int
    context: int


class RandomDrafts(Forgetful):
    """Stands in for a drafter: as many random tokens as a request has room for."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        """As `Drafter.draft`, whatever the sharpness; claims to be certain, so that nothing is cut."""
        shape = len(query.groups), max(int(query.max_tokens.max(initial=0)), 1)
        return DraftBatch(
            tokens=self._random.integers(0, self._vocab_size, shape, dtype=np.int32),
            num_tokens=query.max_tokens.astype(np.int32),
            acceptance=np.ones(shape, np.float32),
            cells=np.zeros(shape, np.int32),
            probes=np.full((shape[0], len(sharpness_grid)), -1, np.int32),
        )


def profiling_settings(tokens_per_request: int, compiled: bool = False) -> EngineSettings:
    """Settings of an engine that can be profiled with up to so many tokens per request. Raises ConfigError."""
    if not 1 <= tokens_per_request <= MOST_TOKENS:
        raise ConfigError(
            f"{tokens_per_request} tokens per request and step: profile 1 to {MOST_TOKENS} (a draft and one more)"
        )
    return EngineSettings(max_draft_tokens=max(tokens_per_request - 1, 1), compiled=compiled)


def longest_response(widths: Sequence[int]) -> int:
    """Response tokens that measuring these tokens per request adds to a context; by chance, drafts are accepted."""
    return 3 * STEPS * len(widths) + 2 * max(widths)


def measure_steps(
    engine: RolloutEngine,
    shapes: Sequence[Shape],
    repetitions: int,
    tell: Callable[[Shape], None] = lambda shape: None,
) -> tuple[StepPoint, ...]:
    """Median step time of each shape, over `repetitions` passes through all of them.

    engine: started with `profiling_settings` and room for the largest step in `max_num_batched_tokens`. tell: called
    before each measurement. Passes alternate their direction, so that a machine that slows down or speeds up favours no
    shape. Raises EngineError for shapes that the engine never ran whole.
    """
    engine.scheduler.loop.free.drafter = RandomDrafts(engine.vocab_size)
    random = np.random.default_rng(1)
    longest = max(shape.context for shape in shapes)
    prompts = random.integers(0, engine.vocab_size, (max(s.batch for s in shapes), longest)).tolist()
    found: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    order = sorted(shapes, key=lambda s: (-s.context, -s.batch, s.tokens_per_request))
    batches = [list(same) for _, same in groupby(order, key=lambda s: (s.context, s.batch))]
    for turn in range(repetitions):
        for same in batches if turn % 2 == 0 else [batch[::-1] for batch in batches[::-1]]:
            for shape, seconds in _measure(engine, same, prompts, tell):
                found[shape] += seconds
    if missing := [shape for shape, seconds in found.items() if not seconds]:
        one = missing[0]
        raise EngineError(
            f"{len(missing)} of {len(shapes)} shapes never ran whole, among them batch {one.batch} x "
            f"{one.tokens_per_request} tokens at context {one.context}: profile smaller ones, or give the engine more "
            "key-value cache"
        )
    return tuple(
        StepPoint(s.batch, s.tokens_per_request, s.context, median(found[s]), len(found[s])) for s in shapes
    )


def _measure(
    engine: RolloutEngine, shapes: Sequence[Shape], prompts: list[list[int]], tell: Callable[[Shape], None]
) -> Iterator[tuple[Shape, list[float]]]:
    """Seconds of STEPS steps of each shape, after one that is not counted; all of one batch and context.

    The same requests go on from shape to shape, so that their prompts are computed once; they begin short of the
    context by half of what they grow.
    """
    from vllm import SamplingParams

    batch, context = shapes[0].batch, shapes[0].context
    begin = max(context - (STEPS + 1) * len(shapes) // 2, 1)
    max_tokens = longest_response([shape.tokens_per_request for shape in shapes])
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    loop = engine.scheduler.loop
    loop.use_budget(BudgetSettings(policy="off"))
    for number, prompt in enumerate(prompts[:batch]):
        engine.submit(number, RolloutRequest(tuple(prompt[:begin]), max_tokens, key=number), params)
    try:
        while engine.num_running() and not _steps(engine, (batch, 0)):
            pass  # until all prompts are computed
        for shape in shapes:
            tell(shape)
            if num := shape.tokens_per_request - 1:
                loop.use_budget(BudgetSettings(policy="fixed", fixed_tokens=num, max_draft_tokens=num))
            else:
                loop.use_budget(BudgetSettings(policy="off"))
            seconds: list[float] = []
            for _ in range(2 * STEPS):
                if engine.num_running() and len(seconds) <= STEPS:
                    seconds += _steps(engine, (batch, batch * num))
            yield shape, seconds[1 : STEPS + 1]
    finally:
        engine.abort(range(batch), keep_kv=False)


def _steps(engine: RolloutEngine, wanted: tuple[int, int]) -> list[float]:
    """Run a step: its seconds, if it had as many (requests, draft tokens) and nothing to prefill."""
    engine.step()
    return [
        step.step_s
        for step in engine.take_observations()
        if (step.num_requests, step.num_draft_tokens) == wanted and not step.num_prefill_tokens
    ]

"""Measures the draft ladder's rungs on the running engine: what does each drafter gain at which acceptance rate?

Responses of an earlier run are generated again, plainly and with each of the engine's model drafters, which really
drafts while its tokens are right as often as wanted (drafting/synthetic.py), and once by itself. The tokens are the
same every time; the time of the steps is the measurement. What a draft token takes is measured for all responses and
for one, as a helper drafts for few. Called by the `ladder` command and by training runs, between rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafting.synthetic import Play
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import EngineError
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

RATES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Acceptance rates at which rungs are measured."""

LEAST_TOKENS = 16
"""Of the longest response: the steps of shorter ones tell nothing."""

MOST_TOKENS = 128
"""Of a response that are generated again."""


def measure_ladder(
    engine: RolloutEngine,
    responses: Sequence[Response],
    params: SamplingParams,
    rates: Sequence[float] = RATES,
    tell: Callable[[str], None] = lambda text: None,
) -> LadderFile:
    """The ladder at the batch of these responses, which the engine has generated with the present weights, and how
    often each drafter is right by itself.

    The model-free drafter rests meanwhile. rates: ascending. tell: called before each run. Afterwards the engine drafts
    with its first model, of which it has learned nothing; its drafters' score is as before.

    Raises UnsupportedError as `RolloutEngine.use_drafter`, EngineError for responses that are too short.
    """
    assert engine.settings is not None
    if (longest := max((len(one.tokens) for one in responses), default=0)) < LEAST_TOKENS:
        raise EngineError(
            f"the longest of {len(responses)} responses has {longest} tokens: the ladder is measured with at least "
            f"{LEAST_TOKENS}"
        )
    requests = [
        replace(
            one.request,
            key=one.key,
            max_tokens=min(len(one.tokens), MOST_TOKENS),
            generated=(),
            keep_kv=False,
        )
        for one in responses
    ]
    known = {one.key: np.array([*one.request.prompt, *one.tokens], np.int32) for one in responses}
    names = engine.settings.drafter_names
    loop = engine.scheduler.loop
    seconds: dict[str, list[float]] = {}
    draft_s: dict[str, tuple[float, float]] = {}
    tried: dict[str, Tried] = {}
    free, loop.free.drafter = loop.free.drafter, None
    score = loop.watch.score
    try:
        _generate_s(engine, requests, params)  # prompts come from the prefix cache from now on
        plain_s = [_plain_s(engine, requests, params)]
        for place, name in enumerate(names):
            for rate in rates:
                tell(f"{name} at an acceptance rate of {rate:g}")
                engine.use_drafter(place, Play(known, rate))
                seconds.setdefault(name, []).append(_generate_s(engine, requests, params))
            _generate_s(engine, [max(requests, key=lambda one: one.max_tokens)], params)
            draft_s[name] = loop.level_s(len(requests)), loop.level_s(1)
            tried[name] = _try(engine, place, requests, params)
        plain_s.append(_plain_s(engine, requests, params))
    finally:
        loop.free.drafter, loop.watch.score = free, score
        engine.use_drafter(0)
    drafters = [
        Rungs(name, _speedups(sum(plain_s) / 2, own), *draft_s[name]) for name, own in seconds.items()
    ]
    return LadderFile(ladder=Ladder(len(requests), tuple(rates), tuple(drafters)), tried=tried)


def _speedups(plain_s: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """By rate; whoever is right more often is not slower."""
    return tuple(np.maximum.accumulate(plain_s / np.array(seconds)).tolist())


def _try(
    engine: RolloutEngine, place: int, requests: Sequence[RolloutRequest], params: SamplingParams
) -> Tried:
    """How often a drafter is right by itself."""
    engine.use_drafter(place)
    before = engine.drafter_score()
    engine.generate(requests, params)
    score = engine.drafter_score() - before
    return Tried(score.right, score.tried)


def _plain_s(engine: RolloutEngine, requests: Sequence[RolloutRequest], params: SamplingParams) -> float:
    engine.set_drafting(False)
    try:
        return _generate_s(engine, requests, params)
    finally:
        engine.set_drafting(True)


def _generate_s(engine: RolloutEngine, requests: Sequence[RolloutRequest], params: SamplingParams) -> float:
    """Seconds of the steps that prefill nothing."""
    engine.take_observations()
    engine.generate(requests, params)
    return sum(step.step_s for step in engine.take_observations() if not step.num_prefill_tokens)

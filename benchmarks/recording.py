"""What replay.py needs of the real engine: rollouts, the clock of their steps, and a draft at every position."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from clock import StepClock, fit_relative, step_features
from numpy.typing import NDArray

from paceline.config import EngineSettings
from paceline.types import DraftGrowth, DraftQuery, ModelDrafts, StepObservation

SHARPNESS = 1.5
DEPTH = EngineSettings().max_draft_tokens


@dataclass
class Rollout:
    """Responses and what the model drafter proposes at each of their positions."""

    prompts: list[tuple[int, ...]]
    keys: list[int]
    groups: list[int]
    responses: list[NDArray[np.int32]]
    tokens: NDArray[np.int32]  # [num_responses, max_tokens, DEPTH]
    cells: NDArray[np.int16]  # [num_responses, max_tokens, DEPTH]
    max_tokens: int
    measured_s: dict[str, float]  # by policy


@dataclass
class Clock(StepClock):
    """The time of a drafting call as well."""

    level: NDArray[np.float64]

    def drafting_s(self, growth: DraftGrowth) -> float:
        """Drafting of so many levels and rows."""
        return float(np.array([1.0, growth.num_levels, growth.num_rows]) @ self.level)

    def catching_up_s(self, num_tokens: int) -> float:
        """Bringing so many tokens into the drafter's cache, each at the price of a row more."""
        return float(num_tokens * self.level[2])


class Recorder:
    """Generates with the real engine and keeps the times of its steps and of its drafting."""

    def __init__(self, model: str, drafter: str, max_tokens: int, num_prompts: int, num_samples: int) -> None:
        from paceline.engine.rollout_engine import RolloutEngine

        self.engine = RolloutEngine(
            model,
            EngineSettings(drafter="none", model_drafter=drafter, sharpness=SHARPNESS),
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=num_prompts * num_samples,
            kv_cache_bytes=1 << 30,
        )
        self.max_tokens, self.num_samples = max_tokens, num_samples
        self.steps: list[tuple[int, int, int, float]] = []
        self.calls: list[tuple[DraftGrowth, float]] = []
        self.last: list[tuple[int, int, int]] = []
        self._watch()

    def _watch(self) -> None:
        """Note each step when the next one begins; what drafting took in between is taken out."""
        scheduler = self.engine.scheduler
        receive, observe, schedule = scheduler.loop.receive, scheduler.loop.observe, scheduler.schedule
        last, since = self.last, [0.0]

        def timed_receive(drafts: ModelDrafts) -> None:
            self.calls.append((drafts.growth, drafts.total_s))
            since[0] += drafts.total_s
            receive(drafts)

        def timed_observe(step: StepObservation) -> StepObservation:
            if step.num_requests and not step.num_prefill_tokens:
                last.append((step.num_requests, step.num_tokens, step.num_context_tokens))
            observed: StepObservation = observe(step)
            return observed

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            if last:
                self.steps.append((*last.pop(), now - since[0]))
            since[0] = now
            return schedule(*args, **kwargs)

        scheduler.loop.receive, scheduler.loop.observe = timed_receive, timed_observe
        scheduler.schedule = timed_schedule

    def rollout(self, prompts: list[tuple[int, ...]], seed: int) -> tuple[list[Any], dict[str, float]]:
        """The responses, and the seconds without and with drafts."""
        from vllm import SamplingParams

        from paceline.dice import derive_key
        from paceline.types import RolloutRequest

        requests = [
            RolloutRequest(p, self.max_tokens, key=derive_key(seed, p, s), sample=s)
            for p in prompts
            for s in range(self.num_samples)
        ]
        took, made = {}, []
        for policy, wanted in (("off", False), ("marginal", True)):
            self.engine.reset_prefix_cache()
            self.engine.set_drafting(wanted)
            self.last.clear()
            start = time.perf_counter()
            made = self.engine.generate(requests, SamplingParams(temperature=1.0))
            took[policy] = time.perf_counter() - start
        return made, took

    def clock(self) -> Clock:
        """What the steps and the drafting calls so far say."""
        steps = np.array([step[:3] for step in self.steps])
        seconds = np.array([step[3] for step in self.steps])
        growths = [growth for growth, _ in self.calls if growth.num_levels]
        calls = np.array([[1.0, g.num_levels, g.num_rows] for g in growths])
        drafting_s = np.array([total for growth, total in self.calls if growth.num_levels])
        return Clock(fit_relative(step_features(steps), seconds), fit_relative(calls, drafting_s))


def draft_everywhere(made: list[Any], drafter: str, took: dict[str, float]) -> Rollout:
    """The model drafter's proposals behind every prefix of every response."""
    from paceline.drafting.model import ModelDrafter
    from paceline.planning.sharpness import SHARPNESS_GRID

    prompts = [response.request.prompt for response in made]
    responses = [np.array(response.tokens, np.int32) for response in made]
    longest, keys = max(map(len, responses)), [response.key for response in made]
    model = ModelDrafter(
        drafter, max_model_len=len(max(prompts, key=len)) + longest + DEPTH, max_requests=len(made)
    )
    contexts = [np.concatenate([np.array(p, np.int32), r]) for p, r in zip(prompts, responses, strict=True)]
    tokens = np.zeros((len(made), longest, DEPTH), np.int32)
    cells = np.zeros((len(made), longest, DEPTH), np.int16)
    for at in range(1, longest):
        rows = [row for row, response in enumerate(responses) if len(response) > at]
        query = make_query(
            rows, [len(prompts[row]) + at for row in rows], keys, [0] * len(made), [DEPTH + 1] * len(rows)
        )
        batch, _ = model.draft(
            [contexts[row][: len(prompts[row]) + at] for row in rows],
            query,
            DEPTH,
            sharpness=SHARPNESS,
            sharpness_grid=np.asarray(SHARPNESS_GRID, np.float32),
            calibration=model.prior_calibration(),
            floor=0.0,
        )
        tokens[rows, at], cells[rows, at] = batch.tokens, batch.cells
    groups, max_tokens = [r.group for r in made], made[0].request.max_tokens
    return Rollout(prompts, keys, groups, responses, tokens, cells, max_tokens, took)


def make_query(
    rows: list[int],
    positions: list[int],
    keys: list[int],
    groups: list[int],
    left: list[int],
    depth: int = DEPTH,
) -> DraftQuery:
    """What the scheduler would ask for the responses `rows`, which may still grow by `left` tokens."""
    return DraftQuery(
        groups=np.array([groups[row] for row in rows], np.int64),
        responses=np.array(rows, np.int64),
        keys=np.array([keys[row] for row in rows], np.uint64),
        positions=np.array(positions, np.int64),
        temperatures=np.ones(len(rows), np.float32),
        max_tokens=np.clip(left, 1, depth + 1).astype(np.int32) - 1,
    )

"""What a case's own tokens would have taken without waste, and under the clairvoyant policy. From recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clock import StepClock, fit_relative, step_features
from numpy.typing import NDArray
from recording import SHARPNESS, make_query
from rollouts import TAIL_SHARE, Timed
from scipy.optimize import nnls
from steps import Step


def fit_clock(runs: Sequence[Timed]) -> StepClock:
    """The step-time model of Paceline's engine, from its decoding steps with and without drafts."""
    steps = [step for run in runs for step in run.steps if step.is_decode]
    seconds = np.array([max(step.step_s - step.drafting_s, 1e-6) for step in steps])
    return StepClock(fit_relative(step_features(np.array([step[:3] for step in steps])), seconds))


def wasted_s(run: Timed, clock: StepClock) -> tuple[float, float]:
    """Seconds of drafting and of verifying tokens that were rejected, in all and in the tail: what a free drafter that
    knew which of its tokens will be accepted would have saved in the same steps."""
    passed_s = wasted = wasted_tail = 0.0
    for step in reversed(run.steps):
        if step.is_decode:
            wasted += step.drafting_s + max(_rejected_s(step, clock), 0.0)
        passed_s += step.step_s
        if passed_s <= run.tail_s:
            wasted_tail = wasted
    return wasted, wasted_tail


def _rejected_s(step: Step, clock: StepClock) -> float:
    needed = max(step.num_gained, step.num_requests)
    verified, kept = (
        clock.step_s(step.num_requests, n, step.num_context_tokens) for n in (step.num_tokens, needed)
    )
    return verified - kept


@dataclass(frozen=True)
class DraftPrice:
    """What the model drafter takes of a step in which it drafts: a straight line through measured steps, seconds."""

    step_s: float
    token_s: float

    @classmethod
    def fit(cls, runs: Sequence[Timed]) -> DraftPrice:
        """From the decoding steps with drafts of the model; tokens that the budget cut off are in the price."""
        steps = [step for run in runs for step in run.steps if step.is_decode and step.drafting_s > 0]
        if not steps:
            return cls(0.0, 0.0)
        tokens = np.array([step.num_tokens - step.num_requests for step in steps])
        seconds = np.array([step.drafting_s for step in steps])
        found, _ = nnls(np.stack([np.ones(len(steps)), tokens], axis=1), seconds)
        return cls(*found.tolist())

    def total_s(self, steps: Sequence[tuple[int, int, int]]) -> float:
        """Of all these steps: (requests, tokens, context) each."""
        drafted = [tokens - requests for requests, tokens, _ in steps if tokens > requests]
        return self.step_s * len(drafted) + self.token_s * sum(drafted)


@dataclass(frozen=True)
class Clairvoyant:
    """Seconds of a rollout if each step verified exactly the tokens that will be accepted."""

    free_s: float
    """With free drafts."""
    paid_s: float
    """At the drafter's price."""
    tail_s: float
    """Of `free_s`, in the tail."""

    def __add__(self, other: Clairvoyant) -> Clairvoyant:
        """Both rollouts, one after the other."""
        return Clairvoyant(self.free_s + other.free_s, self.paid_s + other.paid_s, self.tail_s + other.tail_s)


NOTHING = Clairvoyant(0.0, 0.0, 0.0)


def play_clairvoyant(
    off: Timed, clock: StepClock, price: DraftPrice, drafter: str, depth: int
) -> Clairvoyant:
    """This rollout with drafts of the model up to `depth` tokens a request. off: the rollout without drafts."""
    steps = clairvoyant_steps(ModelDrafts(drafter, off, depth), off)
    free_s = steps_s(off, clock, steps)
    return Clairvoyant(free_s, free_s + price.total_s(steps), tail_steps_s(off, clock, steps))


def tail_steps_s(off: Timed, clock: StepClock, steps: Sequence[tuple[int, int, int]]) -> float:
    """Seconds of the steps in which as few responses run as in the tail. (`Timed.tail_s`)"""
    most = len(off.ids) - 1 - int(TAIL_SHARE * (len(off.ids) - 1))
    tail = [step for step in steps if step[0] <= most]
    return float(clock.steps_s(np.array(tail)).sum()) if tail else 0.0


def steps_s(off: Timed, clock: StepClock, steps: Sequence[tuple[int, int, int]]) -> float:
    """Seconds of a rollout that decodes in these steps, (requests, tokens, context) each, by the clock.

    Its prefill takes as long as in `off`. How long `off` decoded does not count: the machine may have been slower then.
    """
    prefill_s = sum(step.step_s for step in off.steps if not step.is_decode)
    return prefill_s + float(clock.steps_s(np.array(steps)).sum())


def clairvoyant_steps(drafts: Any, run: Timed) -> list[tuple[int, int, int]]:
    """(requests, tokens, context) of each step; drafts(rows, positions) -> [num_rows, depth] proposed tokens.

    The first token of each response comes from prefill and its last is never a draft's.
    """
    lengths = np.array(run.lengths)
    prompts = np.array([len(prompt) for prompt in run.prompts])
    at = np.ones(len(lengths), np.int64)
    steps = []
    while len(live := np.flatnonzero(at < lengths)):
        tokens = drafts(live, at[live])
        hits = np.array(
            [count_hits(run.ids[row][at[row] : -1], tokens[i]) for i, row in enumerate(live.tolist())]
        )
        steps.append((len(live), len(live) + int(hits.sum()), int((prompts[live] + at[live]).sum())))
        at[live] += hits + 1
    return steps


def count_hits(truth: Sequence[int], drafted: NDArray[Any]) -> int:
    """Leading tokens of the draft that are the response's."""
    hits = 0
    for token, proposed in zip(truth, drafted.tolist(), strict=False):
        if token != proposed:
            break
        hits += 1
    return hits


@dataclass
class ModelDrafts:
    """What the small model proposes behind any prefix of a rollout's responses, with their own dice."""

    drafter: str
    run: Timed
    depth: int

    def __post_init__(self) -> None:
        from paceline.drafting.model import ModelDrafter

        pairs = zip(self.run.prompts, self.run.ids, strict=True)
        self.contexts = [np.array([*prompt, *ids], np.int32) for prompt, ids in pairs]
        longest = max(map(len, self.contexts)) + self.depth
        self.model = ModelDrafter(self.drafter, max_model_len=longest, max_requests=len(self.contexts))

    def __call__(self, rows: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int32]:
        from paceline.planning.sharpness import SHARPNESS_GRID

        prompts = [len(self.run.prompts[row]) for row in rows.tolist()]
        positions = [prompt + one for prompt, one in zip(prompts, at.tolist(), strict=True)]
        groups = [0] * len(self.contexts)
        left = [self.depth + 1] * len(rows)
        query = make_query(rows.tolist(), positions, self.run.keys, groups, left, self.depth)
        batch, _ = self.model.draft(
            [self.contexts[row][:n] for row, n in zip(rows.tolist(), positions, strict=True)],
            query,
            self.depth,
            sharpness=SHARPNESS,
            sharpness_grid=np.asarray(SHARPNESS_GRID, np.float32),
            calibration=self.model.prior_calibration(),
            floor=0.0,
        )
        return batch.tokens

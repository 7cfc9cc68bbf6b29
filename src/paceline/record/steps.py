"""Merges engine steps, thousands per second on a fast engine, into samples that keep the record small."""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeVar

from paceline.record.schema import EngineStepSample
from paceline.types import StepObservation

_Count = TypeVar("_Count", int, float)


def add_counts(one: tuple[_Count, ...], other: tuple[_Count, ...]) -> tuple[_Count, ...]:
    """Sums place by place; what the shorter lacks counts 0."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0))) if other else one


class StepMerger:
    """Merges consecutive engine steps of one worker and one train step into samples of about `bucket_s`."""

    def __init__(self, bucket_s: float, step: int, worker: str) -> None:
        self.bucket_s = bucket_s
        self.step = step
        self.worker = worker
        self._clear()

    def _clear(self) -> None:
        self._t_s = 0.0
        self._num_steps = 0
        self._step_s = 0.0
        self._running = 0
        self._waiting = 0
        self._tokens = [0] * 6  # drafted, accepted, generated, prefilled, the model's accepted, wasted
        self._branches = [0] * 2  # prepared, hit
        self._adopted, self._wait_s = 0, 0.0
        self._further: tuple[int, ...] = ()  # accepted tokens of each further drafter
        self._further_wasted: tuple[int, ...] = ()
        self._ahead_tokens: tuple[int, ...] = ()
        self._ahead_s: tuple[float, ...] = ()

    def add(self, t_s: float, seen: StepObservation, num_generated_tokens: int) -> bool:
        """Add the step that began at `t_s`; True when the bucket is full and should be taken."""
        if self._num_steps == 0:
            self._t_s = t_s
        self._num_steps += 1
        self._step_s += seen.step_s
        self._running += seen.num_requests
        self._waiting += seen.num_waiting
        tokens = self._tokens
        tokens[0] += seen.num_draft_tokens
        tokens[1] += seen.num_accepted_tokens
        tokens[2] += num_generated_tokens
        tokens[3] += seen.num_prefill_tokens
        tokens[4] += seen.num_model_tokens
        tokens[5] += seen.num_wasted_tokens
        self._adopted += seen.num_adopted_tokens
        self._wait_s += seen.wait_s
        self._branches[0] += seen.num_branches
        self._branches[1] += seen.num_branch_hits
        self._further = add_counts(self._further, seen.further_tokens)
        self._further_wasted = add_counts(self._further_wasted, seen.further_wasted_tokens)
        self._ahead_tokens = add_counts(self._ahead_tokens, seen.ahead_tokens)
        self._ahead_s = add_counts(self._ahead_s, seen.ahead_s)
        return t_s + seen.step_s - self._t_s >= self.bucket_s

    def take(self) -> EngineStepSample | None:
        """The merged sample, None when no step was added since the last one."""
        if self._num_steps == 0:
            return None
        drafted, accepted, generated, prefilled, model, wasted = self._tokens
        sample = EngineStepSample(
            t_s=round(self._t_s, 6),
            num_steps=self._num_steps,
            step_s=round(self._step_s, 6),
            num_running=self._running / self._num_steps,
            num_waiting=self._waiting / self._num_steps,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_model_tokens=model,
            num_adopted_tokens=self._adopted,
            num_wasted_tokens=wasted,
            further_tokens=self._further,
            further_wasted_tokens=self._further_wasted,
            num_branches=self._branches[0],
            num_branch_hits=self._branches[1],
            ahead_tokens=self._ahead_tokens,
            ahead_s=tuple(round(seconds, 6) for seconds in self._ahead_s),
            wait_s=round(self._wait_s, 6),
            num_generated_tokens=generated,
            num_prefill_tokens=prefilled,
            step=self.step,
            worker=self.worker,
        )
        self._clear()
        return sample

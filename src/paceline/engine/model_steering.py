"""Steers the model drafter from step to step: what it costs, whether it pays, where its drafts end.

Holds the state of the decisions in planning/drafter_worth.py. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning import drafter_worth
from paceline.planning.budget import BudgetSnapshot, BudgetState, decide, expected_accepted
from paceline.planning.latency import StepTimeModel, predict_one_s, predict_s, update_measured_time
from paceline.types import DraftGrowth, Float32Array, Int32Array


@dataclass(slots=True)
class Outlook:
    """What the drafter would have to read before it can draft for all, and how long that would serve."""

    num_open: int = 0
    """Responses."""
    backlog: float = 0.0
    """Their tokens that it has not read; those of the last step it reads as it drafts."""
    coming: float = 0.0
    """The same of responses that begin now."""
    steps_left: float = float("inf")
    """Steps to their ends, in the mean, as far as is known."""


class ModelSteering:
    """One per engine."""

    def __init__(self) -> None:
        self.outlook = Outlook()
        self.renew(is_other=True)

    def open(self, num_tokens: int) -> None:
        """A response of so many tokens, its prompt included."""
        self.outlook.num_open += 1
        self.outlook.backlog += num_tokens

    def grow(self, num_tokens: int) -> None:
        """So many tokens more, of all together."""
        self.outlook.backlog += num_tokens

    def close(self) -> None:
        """A response has ended, which may or may not have been read: it takes its part of the backlog along."""
        self.outlook.backlog *= 1.0 - 1.0 / self.outlook.num_open
        self.outlook.num_open -= 1

    def renew(self, *, is_other: bool) -> None:
        """The drafter has other weights: whether it pays is not known yet. is_other: nor is what it costs."""
        self._worth, self._rest = drafter_worth.Worth(), drafter_worth.Rest()
        self._rests: dict[int, drafter_worth.Rest] = {}  # by batch size, as the rates
        if is_other:
            self._level_time = StepTimeModel.initial()
            self._drafting_s, self._num_drafting, self._reading_s = 0.0, 0, 0.0
            self._read_s, self._num_read = 0.0, 0.0  # decayed sums

    def receive(self, growth: DraftGrowth, num_requests: int, reading_s: float) -> None:
        """What the drafts of the coming step cost, and for how many requests they are.

        reading_s: catching up with prompts, and with what was written in a rest. It is paid once each: it counts before
        it is paid (`_pays_reading`), and in a trial that has read for a sample of the requests alone.
        """
        self._drafting_s, self._num_drafting = growth.seconds, num_requests
        self._reading_s = self._reading_s + reading_s if self._rest.sample else 0.0
        num_read = self.outlook.backlog * min(num_requests / max(self.outlook.num_open, 1), 1.0)
        self.outlook.backlog -= num_read
        if num_read > num_requests:
            self._read_s = drafter_worth.MEMORY * self._read_s + reading_s
            self._num_read = drafter_worth.MEMORY * self._num_read + num_read
        if growth.num_levels:
            rows = max(round(growth.num_rows / growth.num_levels), 1)
            self._level_time = update_measured_time(
                self._level_time, rows, growth.seconds / growth.num_levels
            )

    def level_s(self, batch: int) -> float:
        """What a draft token of each of `batch` requests takes; 0 before there were any."""
        return predict_one_s(self._level_time, batch) if self._level_time.num_observations else 0.0

    def judge(
        self,
        snapshot: BudgetSnapshot,
        lengths: Int32Array,
        free: Float32Array | None,
        states: tuple[BudgetState, BudgetState],
        settings: BudgetSettings,
    ) -> None:
        """Compare the decided step with the one that would have been decided without the model drafter.

        Where it drafted for a sample of the requests alone, its cost is their share of drafting for all. The first step
        of each part of a trial is not judged: what is known of T at its size is old, and renewed by it.

        lengths: the decision about `snapshot`. free: path probabilities of the model-free drafts, None without any.
        [num_requests, max_draft_tokens]. states: what the budget knew, for a step after a model's drafts and for one
        without (`BudgetState.at_context`).
        """
        if self._rest.trial_left == drafter_worth.TRIAL_STEPS:
            return
        state, state_alone = states
        batch, others, trust = snapshot.num_requests, snapshot.num_other_tokens, state.confidence
        time, time_alone = (one.prefill_time if others else one.decode_time for one in states)
        drafted, expected = int(lengths.sum()), expected_accepted(snapshot, lengths)
        drafted_alone, expected_alone = 0, 0.0
        if free is not None:
            alone = replace(snapshot, path_probability=free)
            lengths = decide(alone, state_alone, settings)
            drafted_alone, expected_alone = int(lengths.sum()), expected_accepted(alone, lengths)
        step_s = predict_one_s(time, batch + others + drafted)
        alone_s = predict_one_s(time_alone, batch + others + drafted_alone)
        shared_s = 0.0
        if others:  # prompts take that whatever is drafted: counted, it would hide what drafting costs
            plain_s = predict_one_s(state_alone.decode_time, batch)
            shared_s = max(predict_one_s(time_alone, batch + others) - plain_s, 0.0)
        self._worth = drafter_worth.update_worth(
            self._worth,
            batch,
            (batch + trust * expected, step_s - shared_s + self._share_of_cost(batch, state.decode_time)),
            (batch + trust * expected_alone, max(alone_s - shared_s, 1e-6)),
        )

    def _share_of_cost(self, batch: int, step_time: StepTimeModel) -> float:
        """What the drafts took; for a sample of the requests its part of drafting, and of reading, for all."""
        if not 0 < self._num_drafting < batch:
            return self._drafting_s
        sample = np.array([self._num_drafting])
        share = self._num_drafting / batch
        all_s = drafter_worth.scale_up(self._level_time, step_time, sample, 1 / share)
        growth = float((all_s / predict_s(self._level_time, sample))[0])
        return self._drafting_s * growth * share + self._reading_s / min(
            self._rest.last, max(self.outlook.steps_left, 1.0)
        )

    def advance(self, batch: int, step_time: StepTimeModel, is_alive: bool = True) -> bool:
        """Go on to the next step; returns whether the drafter works after it. is_alive: see `next_rest`."""
        size = drafter_worth.size_of(batch)
        before = self._rests.get(size, drafter_worth.Rest())
        is_positive = self._worth.is_positive(batch) and (
            before.sample > 0 or self._pays_reading(batch, step_time)
        )
        self._rest = drafter_worth.next_rest(before, batch, is_positive, step_time, is_alive=is_alive)
        self._rests[size] = self._rest
        goes_to_rest = before.left == 0 and self._rest.left > 0
        if goes_to_rest or self._rest.sample != before.sample:
            self._worth = drafter_worth.fade(self._worth, batch)
        return self._rest.left == 0

    def _pays_reading(self, batch: int, step_time: StepTimeModel) -> bool:
        """Whether what drafting saves to the end of the present responses is worth reading what they have written."""
        if not self._num_read:
            return True
        reading_s = (self.outlook.backlog + self.outlook.coming) * self._read_s / self._num_read
        steps_left = max(self.outlook.steps_left, 1.0)
        saved = self._worth.gain(batch) * predict_one_s(step_time, batch) * steps_left
        return saved >= reading_s

    def limits(
        self, batch: int, num_drafted: int, step_time: StepTimeModel, lowest: float, *, for_all: bool = False
    ) -> tuple[float, Float32Array, int | None]:
        """(floor, level costs, most requests) of the drafts to come, as in `DraftOrder`. for_all: a trial's too."""
        plain_s = predict_one_s(step_time, batch) / batch
        token_s = min(self._worth.token_s(batch) or plain_s, plain_s)
        floor = drafter_worth.choose_floor(batch, num_drafted, token_s, step_time, lowest)
        drafting = None if for_all else self._rest.sample or None
        return (
            floor,
            drafter_worth.level_costs(batch, token_s, self._level_time, step_time, drafting),
            drafting,
        )

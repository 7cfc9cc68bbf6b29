"""Steers the model drafter from step to step: what it costs, whether it pays, where its drafts end.

Holds the state of the decisions in planning/drafter_worth.py. One thread.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning import drafter_worth
from paceline.planning.budget import BudgetSnapshot, BudgetState, decide, expected_accepted
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time
from paceline.types import DraftGrowth, Float32Array, Int32Array


class ModelSteering:
    """One per engine."""

    def __init__(self) -> None:
        self._level_time = StepTimeModel.initial()
        self._drafting_s = 0.0
        self.renew()

    def renew(self) -> None:
        """Another drafter of the same cost: whether it pays is not known yet."""
        self._worth, self._rest = drafter_worth.Worth(), drafter_worth.Rest()

    def receive(self, growth: DraftGrowth) -> None:
        """What the drafts of the coming step cost. Catching up with new prompts is left out: it is paid once each."""
        self._drafting_s = growth.seconds
        if growth.num_levels:
            rows = max(round(growth.num_rows / growth.num_levels), 1)
            self._level_time = update_measured_time(
                self._level_time, rows, growth.seconds / growth.num_levels
            )

    @property
    def drafting_s(self) -> float:
        """What the last drafts took, all levels together; 0 before there were any."""
        return self._drafting_s

    def level_s(self, batch: int) -> float:
        """What a draft token of each of `batch` requests takes; 0 before there were any."""
        return float(predict_s(self._level_time, batch)) if self._level_time.num_observations else 0.0

    def judge(
        self,
        snapshot: BudgetSnapshot,
        lengths: Int32Array,
        free: Float32Array | None,
        state: BudgetState,
        settings: BudgetSettings,
    ) -> None:
        """Compare the decided step with the one that would have been decided without the model drafter.

        lengths: the decision about `snapshot`. free: path probabilities of the model-free drafts, None without any.
        [num_requests, max_draft_tokens]. state: what the budget knew.
        """
        batch, trust = snapshot.num_requests, state.confidence
        drafted, expected = int(lengths.sum()), expected_accepted(snapshot, lengths)
        drafted_alone, expected_alone = 0, 0.0
        if free is not None:
            alone = replace(snapshot, path_probability=free)
            lengths = decide(alone, state, settings)
            drafted_alone, expected_alone = int(lengths.sum()), expected_accepted(alone, lengths)
        step_s = predict_s(state.decode_time, np.array([batch + drafted, batch + drafted_alone])).tolist()
        self._worth = drafter_worth.update_worth(
            self._worth,
            batch,
            (batch + trust * expected, step_s[0] + self._drafting_s),
            (batch + trust * expected_alone, step_s[1]),
        )

    def advance(self, batch: int, longest_rest: int) -> bool:
        """Go on to the next step; returns whether the drafter works after it."""
        was_drafting = self._rest.left == 0
        is_positive = self._worth.is_positive(batch)
        self._rest = drafter_worth.next_rest(self._rest, batch, is_positive, longest_rest)
        if was_drafting and self._rest.left:
            self._worth = drafter_worth.fade(self._worth, batch)
        return self._rest.left == 0

    def limits(
        self, batch: int, num_drafted: int, step_time: StepTimeModel, lowest: float
    ) -> tuple[float, Float32Array]:
        """(floor, level costs) of the drafts to come, as in `DraftOrder`."""
        token_s = self._worth.token_s(batch) or float(predict_s(step_time, batch)) / batch
        floor = drafter_worth.choose_floor(batch, num_drafted, token_s, step_time, lowest)
        return floor, drafter_worth.level_costs(batch, token_s, self._level_time)

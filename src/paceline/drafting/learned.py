"""What the engine learns about one drafter: its acceptance by calibration cell, and how sharply it should draft."""

from __future__ import annotations

from dataclasses import replace

from paceline.planning import acceptance, sharpness
from paceline.types import Float32Array, Int32Array


class Learned:
    """One per drafter.

    prior: acceptance assumed of each calibration cell; where a token is wrong, its runner-up is right half the time.
    [num_cells]
    fixed_sharpness: the exponent if it is not to be learned.
    """

    def __init__(self, prior: Float32Array, fixed_sharpness: float | None) -> None:
        self.table = acceptance.AcceptanceTable.initial(prior)
        self.calibration = acceptance.estimate(self.table)
        self._alone = self.table
        self._rivals = acceptance.AcceptanceTable.initial((1.0 - prior) / 2.0)
        self._sharpness = sharpness.SharpnessState.initial()
        self._fixed = fixed_sharpness

    @property
    def beta(self) -> float:
        """Exponent on the drafter's distribution."""
        return self._sharpness.beta if self._fixed is None else self._fixed

    @property
    def num_cells(self) -> int:
        """Of the calibration."""
        return len(self.calibration)

    def learn(self, outcomes: acceptance.Outcomes) -> None:
        """What a step says about the drafter's tokens."""
        if outcomes.verified.any():
            self.table = acceptance.update_outcomes(self.table, outcomes)
            self.calibration = acceptance.estimate(self.table)

    @property
    def alone(self) -> Float32Array:
        """Acceptance by cell in steps in which no other drafter drafted. [num_cells]

        Beside another drafter a token is told of only where that one was right so far, which is where text is easy. The
        calibration of all steps is the prior here.
        """
        return acceptance.estimate(replace(self._alone, prior=self.calibration))

    def learn_alone(self, outcomes: acceptance.Outcomes) -> None:
        """As `learn`, of a step in which no other drafter drafted."""
        if outcomes.verified.any():
            self._alone = acceptance.update_outcomes(self._alone, outcomes)

    @property
    def rivals(self) -> Float32Array:
        """Probability that a token's runner-up is right, by the token's calibration cell. [num_cells]"""
        return acceptance.estimate(self._rivals)

    def learn_rivals(self, cells: Int32Array, outcomes: acceptance.BoolArray) -> None:
        """cells, outcomes: of each draft token that a step says something about, and of its runner-up. [num_told]"""
        if cells.size:
            self._rivals = acceptance.update_acceptance(self._rivals, cells, outcomes)

    def learn_sharpness(self, probes: Int32Array, targets: Int32Array) -> None:
        """probes: first token that each sharpness would have drafted. targets: the target's. [num_requests, ...]"""
        if self._fixed is None and len(targets):
            self._sharpness = sharpness.update_sharpness(self._sharpness, probes, targets)

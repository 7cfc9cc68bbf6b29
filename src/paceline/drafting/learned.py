"""What the engine learns about one drafter: its acceptance by calibration cell, and how sharply it should draft."""

from __future__ import annotations

from paceline.planning import acceptance, sharpness
from paceline.types import Float32Array, Int32Array


class Learned:
    """One per drafter.

    prior: acceptance assumed of each calibration cell. [num_cells]
    fixed_sharpness: the exponent if it is not to be learned.
    """

    def __init__(self, prior: Float32Array, fixed_sharpness: float | None) -> None:
        self.table = acceptance.AcceptanceTable.initial(prior)
        self.calibration = acceptance.estimate(self.table)
        self._sharpness = sharpness.SharpnessState.initial()
        self._fixed = fixed_sharpness

    @property
    def beta(self) -> float:
        """Exponent on the drafter's distribution."""
        return self._sharpness.beta if self._fixed is None else self._fixed

    def learn(self, cells: Int32Array, outcomes: acceptance.BoolArray) -> None:
        """cells, outcomes: of each draft token that the step says something about. [num_told]"""
        if cells.size:
            self.table = acceptance.update_acceptance(self.table, cells, outcomes)
            self.calibration = acceptance.estimate(self.table)

    def learn_sharpness(self, probes: Int32Array, targets: Int32Array) -> None:
        """probes: first token that each sharpness would have drafted. targets: the target's. [num_requests, ...]"""
        if self._fixed is None and len(targets):
            self._sharpness = sharpness.update_sharpness(self._sharpness, probes, targets)

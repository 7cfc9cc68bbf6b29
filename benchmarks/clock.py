"""A model clock: how long the engine's steps take, fitted to those that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class StepClock:
    """Seconds of a step without drafting, as fitted to the real engine's."""

    step: NDArray[np.float64]

    def step_s(self, requests: int, tokens: int, context: int) -> float:
        """A step of `requests` over `tokens`, draft tokens included; context: tokens before it, of all requests."""
        return float(self.steps_s(np.array([[requests, tokens, context]]))[0])

    def steps_s(self, steps: NDArray[Any]) -> NDArray[np.float64]:
        """[num_steps, 3] requests, tokens, context -> [num_steps] seconds."""
        return step_features(steps) @ self.step  # type: ignore[no-any-return]


def step_features(steps: NDArray[Any]) -> NDArray[np.float64]:
    """[num_steps, 3] requests, tokens, context -> what a step's time is linear in."""
    requests, tokens, context = steps.T.astype(float)
    few, some = np.minimum(tokens, 32), np.clip(tokens - 32, 0, 96)
    many = np.maximum(tokens - 128, 0)
    attended = tokens * context / requests / 1000
    return np.stack([np.ones_like(tokens), few, some, many, requests, context / 1000, attended], axis=1)


def fit_relative(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of the relative error, outliers weighing less; no weight is negative."""
    from scipy.optimize import nnls

    weights = 1.0 / seconds
    fitted = np.zeros(features.shape[1])
    for _ in range(6):
        fitted, _ = nnls(features * weights[:, None], seconds * weights)
        error = np.abs(features @ fitted / seconds - 1)
        weights = 1.0 / seconds / (1 + error / 0.05)
    usual = error < 0.3  # relative errors favour the fast steps: the sum has to agree
    return fitted * float(seconds[usual].sum() / (features @ fitted)[usual].sum())

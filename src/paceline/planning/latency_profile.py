"""Latency models of drafters and verifiers, fitted offline from profile points (SpecActor 4.1, "Modeling TGS").

A model is a function of the tokens of one forward pass: D_g(b) = seconds(b), one drafted token for each of b requests
on g GPUs, and V_{g,w}(b) = seconds(b (w + 1)), w draft tokens and the token before them of each. Invariants: seconds
are non-negative and never fall as tokens rise, so that a planner may take bounds. Called by placement and
reconfiguration; the running engine learns its step time online instead (`latency.py`).

Differs from the paper, which fits a line in b for every (g, w): a line in b (w + 1) needs one profile per g instead of
one per window, and implies V'_{g,w} = (w + 1) x slope and beta_{g,w} = base. The piecewise linear model covers what no
line does, a pass that is level while memory-bound and rises beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import ConfigError
from paceline.types import Float64Array


@dataclass(frozen=True, slots=True)
class AffineLatency:
    """base_s + per_token_s x tokens."""

    base_s: float
    """Seconds of a pass however few its tokens, non-negative."""
    per_token_s: float
    """Seconds each token adds, non-negative."""

    def seconds(self, tokens: ArrayLike) -> Float64Array:
        """Seconds of a pass over each entry of `tokens`, in its shape."""
        return np.asarray(self.base_s + self.per_token_s * np.asarray(tokens, dtype=np.float64))

    def scaled(self, factor: float) -> AffineLatency:
        """The model of passes over `factor` times as many tokens as are named."""
        return AffineLatency(self.base_s, self.per_token_s * factor)


@dataclass(frozen=True, slots=True)
class PiecewiseLatency:
    """Straight between knots; beyond the last one the last segment goes on."""

    knot_tokens: Float64Array  # [num_knots] ascending, at least two, the first is 0
    knot_s: Float64Array  # [num_knots] non-negative, non-decreasing

    def seconds(self, tokens: ArrayLike) -> Float64Array:
        """Seconds of a pass over each entry of `tokens`, in its shape."""
        x = np.asarray(tokens, dtype=np.float64)
        last = (self.knot_s[-1] - self.knot_s[-2]) / (self.knot_tokens[-1] - self.knot_tokens[-2])
        beyond = np.maximum(x - self.knot_tokens[-1], 0.0)
        return np.asarray(np.interp(x, self.knot_tokens, self.knot_s) + last * beyond)

    def scaled(self, factor: float) -> PiecewiseLatency:
        """The model of passes over `factor` times as many tokens as are named."""
        return PiecewiseLatency(self.knot_tokens / factor, self.knot_s)


LatencyModel = AffineLatency | PiecewiseLatency


@dataclass(frozen=True, slots=True)
class StepLatency:
    """by_tokens + context_s x context: a step's attention reads the context of all its requests."""

    by_tokens: LatencyModel
    context_s: float
    """Seconds per token of context, non-negative."""

    def seconds(self, tokens: ArrayLike, context: ArrayLike) -> Float64Array:
        """Seconds of steps over `tokens` whose requests have `context` tokens in all."""
        return np.asarray(self.by_tokens.seconds(tokens) + self.context_s * np.asarray(context))

    def for_requests_of(self, num_tokens: float) -> RequestLatency:
        """The model of steps whose requests have so many tokens each."""
        return RequestLatency(self.by_tokens, self.context_s * num_tokens)


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """by_tokens + request_s x requests: every request of the step has the same context to be read."""

    by_tokens: LatencyModel
    request_s: float
    """Seconds per request, non-negative."""


VerifyLatency = LatencyModel | RequestLatency
"""What the time of a verification follows from."""


def verify_s(model: VerifyLatency, batch: ArrayLike, window: ArrayLike) -> Float64Array:
    """V_w(b): seconds to verify `window` draft tokens and the token before them of each of `batch` requests."""
    b = np.asarray(batch, dtype=np.float64)
    tokens = b * (np.asarray(window) + 1)
    if isinstance(model, RequestLatency):
        return np.asarray(model.by_tokens.seconds(tokens) + model.request_s * b)
    return model.seconds(tokens)


_Model = TypeVar("_Model", AffineLatency, StepLatency)


@dataclass(frozen=True, slots=True)
class LatencyFit(Generic[_Model]):
    """A fitted model and how well it meets the points it was fitted to."""

    model: _Model
    r_squared: float
    """Share of the variance of the seconds that the model explains, at most 1; 1 for equal seconds met exactly."""
    largest_relative_error: float
    """Largest |predicted - measured| / measured."""


def fit_affine(tokens: ArrayLike, seconds: ArrayLike) -> LatencyFit[AffineLatency]:
    """Least-squares line through profile points [num_points], base and slope held non-negative.

    Raises ConfigError for points of fewer than two distinct token counts, or with a time that is not positive.
    """
    x, y = _checked_points(tokens, seconds, num_distinct=2)
    base, slope = _nonnegative_least_squares(np.stack([np.ones_like(x), x], axis=1), y).tolist()
    model = AffineLatency(base, slope)
    return _assessed(model, model.seconds(x), y)


def fit_step(
    tokens: ArrayLike, context: ArrayLike, seconds: ArrayLike, num_segments: int | None = 8
) -> LatencyFit[StepLatency]:
    """Least squares of the relative error through steps [num_points] at several contexts.

    Relative, as a profile runs from a few milliseconds to seconds and a planner asks for ratios. num_segments: of the
    curve over tokens, cut to what the distinct token counts allow; None: a line. Raises ConfigError as `fit_affine`, or
    for contexts of another shape.
    """
    x, y = _checked_points(tokens, seconds, num_distinct=2)
    c = np.asarray(context, dtype=np.float64)
    if c.shape != x.shape:
        raise ConfigError(
            f"profile points need as many contexts as tokens: got shapes {c.shape} and {x.shape}"
        )
    knots, curve = np.empty(0), np.stack([np.ones_like(x), x], axis=1)
    if num_segments is not None:
        knots, curve = _ramps(x, min(num_segments, len(np.unique(x)) - 1))
    columns = np.concatenate([curve, c[:, None]], axis=1) if c.any() else curve
    found = _nonnegative_least_squares(columns / y[:, None], np.ones_like(y))
    own = found[: curve.shape[1]]
    by_tokens: LatencyModel = (
        AffineLatency(*own.tolist()) if num_segments is None else PiecewiseLatency(knots, np.cumsum(own))
    )
    model = StepLatency(by_tokens, float(found[-1]) if c.any() else 0.0)
    return _assessed(model, model.seconds(x, c), y)


def _ramps(x: Float64Array, num_segments: int) -> tuple[Float64Array, Float64Array]:
    """Knots [num_segments + 1], evenly over the distinct counts, and the columns whose sum is a rising curve.

    [num_points, num_segments + 1]
    """
    if num_segments < 1:
        raise ConfigError(f"{num_segments} segments make no curve: ask for at least 1")
    distinct = np.unique(x)
    inner = np.linspace(0, len(distinct) - 1, num_segments + 1)[1:]
    knots = np.array([0.0, *distinct[np.round(inner).astype(np.int64)]])
    ramps = np.clip((x[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
    return knots, np.concatenate([np.ones((len(x), 1)), ramps], axis=1)


def _checked_points(
    tokens: ArrayLike, seconds: ArrayLike, num_distinct: int
) -> tuple[Float64Array, Float64Array]:
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ConfigError(
            f"profile points need equally many tokens and times: got shapes {x.shape} and {y.shape}"
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise ConfigError(
            "profile points need positive, finite tokens and seconds: drop the points that were not measured"
        )
    distinct = len(np.unique(x))
    if distinct < num_distinct:
        raise ConfigError(
            f"a profile of {distinct} distinct token counts cannot fix {num_distinct} parameters: "
            f"profile at least {num_distinct}, or fit a simpler model"
        )
    return x, y


def _nonnegative_least_squares(columns: Float64Array, y: Float64Array) -> Float64Array:
    """argmin |columns x - y| over x >= 0 (Lawson and Hanson 1974, chapter 23). [num_columns]"""
    scale = np.linalg.norm(columns, axis=0)
    unit = columns / scale
    solution = np.zeros_like(scale)
    free = np.zeros(len(scale), dtype=np.bool_)
    for _ in range(3 * len(scale)):  # ends long before; the limit is for columns that are nearly the same
        gain = np.where(free, 0.0, unit.T @ (y - unit @ solution))
        if gain.max() <= 1e-12 * np.linalg.norm(y):
            break
        free[gain.argmax()] = True
        solution, free = _feasible_solution(unit, y, solution, free)
    return np.asarray(solution / scale)


def _feasible_solution(
    columns: Float64Array, y: Float64Array, solution: Float64Array, free: NDArray[np.bool_]
) -> tuple[Float64Array, NDArray[np.bool_]]:
    """Least squares over the free columns, less those that would turn negative on the way from `solution`."""
    while True:
        target = np.zeros_like(solution)
        target[free] = np.linalg.lstsq(columns[:, free], y, rcond=None)[0]
        blocked = np.flatnonzero(free & (target <= 0.0))
        if not blocked.size:
            return target, free
        shares = solution[blocked] / np.maximum(solution[blocked] - target[blocked], 1e-300)
        solution = np.maximum(solution + shares.min() * (target - solution), 0.0)
        free = free & (np.arange(len(free)) != blocked[shares.argmin()])


def _assessed(model: _Model, predicted: Float64Array, y: Float64Array) -> LatencyFit[_Model]:
    residual = predicted - y
    unexplained, total = float((residual**2).sum()), float(((y - y.mean()) ** 2).sum())
    r_squared = 1.0 - unexplained / total if total > 0 else float(np.allclose(residual, 0.0))
    return LatencyFit(model, r_squared, float((np.abs(residual) / y).max()))

"""A model drafter's proposals: how a token is drawn, how sure it is, and how far a draft grows.

Owns the calibration cells of the model drafter and the growth of one call's drafts; knows no network. The margin of a
proposal is that of the *coupled* score log q + G (sharpness 1) whatever sharpness proposed the token: the target's own
score differs from it by the drafter's error alone. It is negative where a sharper drafter proposes something else than
the coupling would. Called by `model.ModelDrafter` and `head.HeadDrafter`, and by the replay benchmark.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline import dice
from paceline.errors import ConfigError
from paceline.types import DraftQuery, Float32Array, Int32Array, Int64Array, ModelBatch

CONFIDENCE_EDGES: Float32Array = np.linspace(-4.0, 6.0, 15, dtype=np.float32)
"""Bounds of the 16 levels of logit(q), q the drafter's own probability of the proposal."""

MARGIN_EDGES: Float32Array = np.array(
    [-1.5, -0.75, -0.3, 0.0, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 1.9, 2.5, 3.3, 4.5, 6.5], np.float32
)
"""Bounds of the 16 levels of the margin, nats."""

NUM_CELLS = (len(CONFIDENCE_EDGES) + 1) * (len(MARGIN_EDGES) + 1)
"""Cells of the calibration table: confidence level * 16 + margin level."""

NO_GRID: Float32Array = np.empty(0, np.float32)
"""The sharpness grid of drafts that say nothing about sharpness."""

PRIOR_ERROR_NATS = 0.6
"""Assumed disagreement of drafter and target about the margin (scale of a logistic error)."""


def prior_calibration() -> Float32Array:
    """Acceptance per cell before anything was observed. [NUM_CELLS] float32.

    The target accepts the proposal if its own margin is positive. With a logistic error of scale
    PRIOR_ERROR_NATS between the drafter's margin and the target's, that has probability sigmoid(margin /
    PRIOR_ERROR_NATS); the confidence level does not enter before it is learned.
    """
    inner = (MARGIN_EDGES[:-1] + MARGIN_EDGES[1:]) / 2
    middles = np.concatenate([MARGIN_EDGES[:1] * 1.5, inner, MARGIN_EDGES[-1:] * 1.2])
    column = 1.0 / (1.0 + np.exp(-middles / PRIOR_ERROR_NATS))
    return np.tile(column, len(CONFIDENCE_EDGES) + 1).astype(np.float32)


class Draft:
    """The draft of one call while it grows; one row per request of the query, as in `DraftBatch`."""

    def __init__(
        self,
        query: DraftQuery,
        limits: Int64Array,
        depth: int,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        level_costs: Float32Array | None,
    ) -> None:
        shape = (len(limits), depth)
        self.query, self.limits, self.depth = query, limits, depth
        self.sharpness, self.sharpness_grid = sharpness, sharpness_grid
        self.calibration, self.floor, self.level_costs = calibration, floor, level_costs
        self.tokens: Int32Array = np.full(shape, -1, np.int32)
        self.num_tokens: Int32Array = np.zeros(len(limits), np.int32)
        self.acceptance: Float32Array = np.zeros(shape, np.float32)
        self.cells: Int32Array = np.zeros(shape, np.int32)
        self.rivals: Int32Array = np.full(shape, -1, np.int32)
        self.probes: Int32Array = np.full((len(limits), len(sharpness_grid)), -1, np.int32)
        self.path: Float32Array = np.ones(len(limits), np.float32)
        self.failed: NDArray[np.bool_] = np.zeros(len(limits), np.bool_)  # ended by a row without a token

    def put(
        self,
        requests: Int64Array,
        level: int,
        tokens: Int64Array,
        cells: Int32Array,
        rivals: Int64Array,
    ) -> NDArray[np.bool_]:
        """Add one token to each of `requests`; returns which of them grow further. NO_TOKEN ends a draft.

        The next level promises at most what the path probabilities are above the floor.
        """
        drawn = tokens != dice.NO_TOKEN
        acceptance = np.where(drawn, self.calibration[cells], np.float32(0.0))
        self.tokens[requests, level] = tokens
        self.cells[requests, level] = cells
        self.rivals[requests, level] = rivals
        self.acceptance[requests, level] = acceptance
        self.num_tokens[requests] = level + drawn
        self.failed[requests] = ~drawn
        self.path[requests] *= acceptance
        grows: NDArray[np.bool_] = (
            drawn & (self.limits[requests] > level + 1) & (self.path[requests] >= self.floor)
        )
        if self.level_costs is not None:
            promised = float((self.path[requests[grows]] - self.floor).sum())
            grows &= promised >= self.level_costs[min(int(grows.sum()), len(self.level_costs) - 1)]
        return grows

    def batch(self) -> ModelBatch:
        return ModelBatch(self.tokens, self.num_tokens, self.acceptance, self.cells, self.probes, self.rivals)


def grow_levels(
    draft: Draft,
    requests: Int64Array,
    logits: Float32Array,
    feed: Callable[[Int64Array, int, Int64Array], Float32Array],
) -> tuple[int, int]:
    """Grow the drafts of `requests` level by level; returns (levels, requests in all of them together).

    logits: of each request's first draft token; overwritten. [len(requests), vocab]
    feed: (lanes, level, tokens) -> the next logits of the lanes, places in `requests`, that take `tokens` and grow.
    """
    query = draft.query
    for column, sharpness in enumerate(draft.sharpness_grid):
        temperatures = query.temperatures[requests] / sharpness
        draft.probes[requests, column] = dice.sample(
            logits, query.keys[requests], query.positions[requests], temperatures
        )
    lanes = np.arange(len(requests))
    num_rows = len(lanes)
    for level in range(draft.depth):
        growing = requests[lanes]
        tokens, log_q, margin, rivals = dice.propose(
            logits,
            query.keys[growing],
            query.positions[growing] + level,
            query.temperatures[growing],
            draft.sharpness,
        )
        grows = draft.put(growing, level, tokens, calibration_cells(log_q, margin), rivals)
        lanes = lanes[grows]
        if not len(lanes):
            break
        logits = feed(lanes, level, tokens[grows])
        num_rows += len(lanes)
    return level + 1, num_rows


def check_draft(sharpness: float, calibration: Float32Array) -> None:
    """Raise ConfigError for a sharpness that is not above 0, or a calibration table of another shape."""
    if not sharpness > 0:
        raise ConfigError(f"sharpness is {sharpness}, must be above 0 (1 = coupled, inf = greedy)")
    if calibration.shape != (NUM_CELLS,):
        raise ConfigError(
            f"the calibration table has shape {calibration.shape}, the model drafter's has ({NUM_CELLS},): "
            "start it from prior_calibration()"
        )


def calibration_cells(log_q: Float32Array, margin: Float32Array) -> Int32Array:
    """Calibration cells from log q of the proposal and its margin, both [num_rows] float32."""
    log_rest = np.log(np.maximum(-np.expm1(log_q), np.float32(1e-7)))
    confidence = np.searchsorted(CONFIDENCE_EDGES, log_q - log_rest)
    level = np.searchsorted(MARGIN_EDGES, margin)
    cells: Int32Array = (confidence * (len(MARGIN_EDGES) + 1) + level).astype(np.int32)
    return cells

"""A fast loop that lives through random steps without an engine: random drafts, outcomes and step times."""

from __future__ import annotations

import numpy as np

from paceline.config import EngineSettings
from paceline.drafting.drafter import Forgetful
from paceline.engine.draft_rows import table_of
from paceline.engine.fast_loop import FastLoop, Proposal
from paceline.engine.model_free import GRID
from paceline.types import (
    DraftBatch,
    DraftGrowth,
    DraftPaths,
    DraftQuery,
    Float32Array,
    ModelDrafts,
    StepObservation,
)

WIDTH, MOST_REQUESTS = 8, 6


class RandomDrafter(Forgetful):
    """Drafts a few tokens of a tiny vocabulary, so that paths share some, and is rather sure of them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        made = self.draft_paths(query, num_paths=1, sharpness=sharpness, calibration=calibration, floor=floor)
        probes = np.full((len(query.groups), len(sharpness_grid)), -1, np.int32)
        return DraftBatch(
            made.tokens[:, 0], made.num_tokens[:, 0], made.acceptance[:, 0], made.cells[:, 0], probes
        )

    def draft_paths(
        self, query: DraftQuery, *, num_paths: int, sharpness: float, calibration: Float32Array, floor: float
    ) -> DraftPaths:
        shape = len(query.groups), num_paths, WIDTH
        return DraftPaths(
            self.rng.integers(3, 6, shape).astype(np.int32),
            self.rng.integers(0, WIDTH + 1, shape[:2]).astype(np.int32),
            (self.rng.random(shape) ** 0.2).astype(np.float32),
            np.zeros(shape, np.int32),
        )


def live(
    settings: EngineSettings, seed: int, num_steps: int, *, overlaps: bool = False, drafting: float = 1.0
) -> list[Proposal]:
    """Let a loop with these settings live through random steps; returns what it proposed.

    overlaps: whether steps do. drafting: what a model drafter costs, in parts of what pays.
    """
    rng = np.random.default_rng(seed)
    loop = FastLoop(settings)
    loop.overlaps = overlaps
    if settings.drafter != "none":
        loop.free.drafter = RandomDrafter(rng)
    rows = settings.max_alternatives if settings.num_paths > 1 else 0
    proposals = []
    for position in range(10, 10 + num_steps):
        if rng.random() < 0.1:  # a step that only prefills
            order = loop.order()
            loop.observe(StepObservation(0, 0, 0, 40, 0.05))
            if order is not None:
                loop.receive(_draft(_query(MOST_REQUESTS, position), position + 1, rng, drafting))
            continue
        if settings.model_drafter is not None and rng.random() < 0.05:
            loop.renew_model(
                None if rng.random() < 0.5 else int(rng.integers(0, len(settings.model_drafters)))
            )
        query = _query(int(rng.integers(1, MOST_REQUESTS + 1)), position)
        others = int(rng.integers(0, 20)) if rng.random() < 0.2 else 0
        weight = rng.uniform(0.5, 2.0, len(query.groups)) if loop.is_fair else None
        left = rng.integers(1, 300, len(query.groups)) if rng.random() < 0.8 else None
        made = loop.propose(query, others, rows, weight, left)
        order = loop.order()
        loop.observe(_learn(loop, made, others, rng))
        if order is not None:
            loop.receive(_draft(query, position + 1, rng, drafting))
        proposals.append(made)
    loop.shut_down()
    return proposals


def _query(count: int, position: int) -> DraftQuery:
    return DraftQuery(
        groups=np.zeros(count, np.int64),
        responses=np.arange(count, dtype=np.int64),
        keys=np.arange(count, dtype=np.uint64),
        positions=np.full(count, position, np.int64),
        temperatures=np.ones(count, np.float32),
        max_tokens=np.full(count, WIDTH, np.int32),
    )


def _learn(loop: FastLoop, made: Proposal, others: int, rng: np.random.Generator) -> StepObservation:
    """Random outcomes of a proposal, and the step's observation."""
    lengths, alternatives = made.lengths, made.alternatives
    accepted = rng.integers(0, lengths + 1).astype(np.int32)
    rows = zip(made.batch.tokens.tolist(), accepted.tolist(), strict=True)
    loop.learn(made, lengths, table_of([[*tokens[:count], 9] for tokens, count in rows]))
    more = 0 if alternatives is None else int(alternatives.lengths.sum())
    drafted = int(lengths.sum()) + more
    seconds = (0.01 + 0.0004 * (len(lengths) + drafted + others)) * float(rng.lognormal(0.0, 0.2))
    return StepObservation(
        len(lengths), drafted, int(accepted.sum()), others, seconds, num_context_tokens=10 * len(lengths)
    )


def _draft(query: DraftQuery, position: int, rng: np.random.Generator, drafting: float) -> ModelDrafts:
    """What a model drafter made for the next step."""
    count = MOST_REQUESTS
    drafts = RandomDrafter(rng).draft(
        _query(count, position),
        sharpness=1.0,
        sharpness_grid=GRID,
        calibration=np.ones(1, np.float32),
        floor=0.0,
    )
    growth = DraftGrowth(
        int(rng.integers(1, 5)), int(rng.integers(1, 20)), float(rng.random() * 0.004 * drafting)
    )
    return ModelDrafts(
        np.arange(count, dtype=np.int64), np.full(count, position, np.int64), drafts, growth, growth.seconds
    )

"""Further paths of a model's drafts: each leaves the chain for a runner-up and is drafted on behind it.

Which ones is planning/branching.py's; a small model and a draft head draft them alike, over the keys and values of what
the chain had there. Called by the engine's proposer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.planning.branching import Branches, choose_branches
from paceline.types import (
    DraftGrowth,
    DraftOrder,
    DraftPaths,
    DraftQuery,
    Int32Array,
    Int64Array,
    ModelBatch,
)


class TreeDrafter(Protocol):
    """A model drafter that can leave its chains."""

    def draft_behind(
        self,
        query: DraftQuery,
        drafted: list[Int32Array],
        order: DraftOrder,
    ) -> tuple[ModelBatch, DraftGrowth]:
        """Draft on behind other tokens than those of the last draft, of some of its responses.

        query: positions are those behind `drafted`. drafted: of each request, tokens of its chain and then another one.
        Drafts are `query.max_tokens` long, as far as the drafter reaches. order: its sharpness and calibration count.
        Deeper branches of a chain first.
        """


def draft_branches(
    model: TreeDrafter, query: DraftQuery, chains: ModelBatch, order: DraftOrder
) -> tuple[DraftPaths | None, DraftGrowth]:
    """The chains with the branches that are worth it; None where one path of each request is best.

    chains: what the model has just drafted for `query`. order: with estimates of the runners-up.
    """
    assert order.rivals is not None
    rivals = np.where(chains.rivals >= 0, order.rivals[chains.cells], np.float32(0.0))
    rounds = choose_branches(
        chains.acceptance, chains.num_tokens, rivals, order.num_paths - 1, order.floor, order.level_costs
    )
    if not rounds:
        return None, DraftGrowth()
    paths = _repeat(chains, 1 + len(rounds))
    growth = DraftGrowth()
    for number, branches in enumerate(rounds, 1):
        requests, levels = branches.requests, branches.levels
        paths.num_tokens[requests, number] = levels + 1
        paths.tokens[requests, number, levels] = chains.rivals[requests, levels]
        paths.acceptance[requests, number, levels] = rivals[requests, levels]
        if (branches.lengths > 1).any():
            growth += _draft_on(model, query, paths, number, branches, order)
    return paths, growth


def _draft_on(
    model: TreeDrafter,
    query: DraftQuery,
    paths: DraftPaths,
    number: int,
    branches: Branches,
    order: DraftOrder,
) -> DraftGrowth:
    """Draft on behind the runners-up of one round, which are in `paths` already, and put what comes in there too."""
    longer = branches.lengths > 1
    requests, begins = branches.requests[longer], branches.levels[longer] + 1
    behind = _select(query, requests, begins, branches.lengths[longer] - 1)
    rows = list(zip(requests.tolist(), begins.tolist(), strict=True))
    made, growth = model.draft_behind(
        behind, [paths.tokens[request, number, :begin] for request, begin in rows], order
    )
    for row, (request, begin) in enumerate(rows):
        count = int(made.num_tokens[row])
        tail = slice(begin, begin + count)
        paths.tokens[request, number, tail] = made.tokens[row, :count]
        paths.acceptance[request, number, tail] = made.acceptance[row, :count]
        paths.cells[request, number, tail] = made.cells[row, :count]
        paths.num_tokens[request, number] += count
    return growth


def _repeat(chains: ModelBatch, num_paths: int) -> DraftPaths:
    """The chains as first paths, and the room for others, which begin as these."""
    num_tokens = np.zeros((len(chains.num_tokens), num_paths), np.int32)
    num_tokens[:, 0] = chains.num_tokens
    shape = (1, num_paths, 1)
    return DraftPaths(
        np.tile(chains.tokens[:, None], shape),
        num_tokens,
        np.tile(chains.acceptance[:, None], shape),
        np.tile(chains.cells[:, None], shape),
    )


def _select(query: DraftQuery, requests: Int64Array, shift: Int64Array, max_tokens: Int64Array) -> DraftQuery:
    """Some requests, each behind `shift` further tokens."""
    return DraftQuery(
        groups=query.groups[requests],
        responses=query.responses[requests],
        keys=query.keys[requests],
        positions=query.positions[requests] + shift,
        temperatures=query.temperatures[requests],
        max_tokens=max_tokens.astype(np.int32),
    )

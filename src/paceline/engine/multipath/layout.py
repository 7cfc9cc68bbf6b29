"""The layout of alternative draft paths in a step: which rows, positions, blocks and slots they get.

Plain arrays, without vLLM: the scheduler makes a `PathPlan`, the runner lays it out as an `Expansion`. An alternative
[a1 .. aj] of a request whose last token stands at position p0 is an attention row of its own, [last token, a1 .. aj] at
positions p0 .. p0+j. It reads the request's full blocks and owns private ones for what it writes.
Invariant: an alternative is no longer than its request's own draft, so the request has slots for all it may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.multipath.alternatives import Alternatives
from paceline.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class PathPlan:
    """The alternatives of one step, from the scheduler to the runner."""

    names: tuple[str, ...]
    """Request of each alternative."""
    drafts: tuple[tuple[int, ...], ...]
    """Draft tokens of each."""
    blocks: tuple[tuple[int, ...], ...]
    """Private KV blocks of each: one for every block that its positions touch, in order."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The rows that a plan adds behind the `num_tokens` tokens of a step."""

    num_tokens: int
    owners: Int64Array  # [num_alternatives] index of the request in the batch
    token_ids: Int64Array  # [num_extra_tokens]
    positions: Int64Array  # [num_extra_tokens]
    slots: Int64Array  # [num_extra_tokens] KV slot that each token's keys and values go to
    query_lens: Int32Array  # [num_alternatives] tokens of each row
    seq_lens: Int32Array  # [num_alternatives] context of each row, its own tokens included
    tables: Int32Array  # [num_alternatives, max_blocks] block table of each row
    drafts: Int64Array  # [num_extra_draft_tokens]
    copies: tuple[tuple[tuple[int, int], ...], ...]
    """(own block, private block) pairs of each alternative, in order of their positions."""
    block_size: int

    @property
    def num_extra_tokens(self) -> int:
        """Tokens that the alternatives add to the step."""
        return len(self.token_ids)

    def won(self, alternative: int, accepted: int) -> tuple[tuple[int, int], ...]:
        """(own, private) blocks that hold the first `accepted` draft tokens of an alternative."""
        start = int(self.seq_lens[alternative] - self.query_lens[alternative])
        return self.copies[alternative][: blocks_touched(start, accepted, self.block_size)]


def blocks_touched(start: int, num_drafts: int, block_size: int) -> int:
    """Blocks that the positions start .. start + num_drafts lie in."""
    return (start + num_drafts) // block_size - start // block_size + 1


def plan_paths(
    alternatives: Alternatives,
    names: Sequence[str],
    starts: Sequence[int],
    limits: Sequence[int],
    room: int,
    blocks: Sequence[int],
    block_size: int,
) -> tuple[PathPlan | None, Int32Array]:
    """Take the alternatives in their order, as long as the step has tokens and spare blocks for them.

    Args:
        alternatives: what was chosen.
        names: request of each. [num_alternatives]
        starts: position of that request's last token. [num_alternatives]
        limits: draft tokens that the request has in the step. [num_alternatives]
        room: tokens that the step can still take.
        blocks: ids of the spare blocks.
        block_size: tokens per block.

    Returns the plan and the length of each alternative in it, 0 for one that is left out. [num_alternatives]
    """
    free, lengths = list(blocks), np.zeros_like(alternatives.lengths)
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for i, (name, start, limit) in enumerate(zip(names, starts, limits, strict=True)):
        length = min(int(alternatives.lengths[i]), limit, room - 1)
        count = blocks_touched(start, length, block_size)
        if length > alternatives.covered[i] and count <= len(free):
            lengths[i] = length
            rows.append((name, tuple(alternatives.tokens[i, :length].tolist()), tuple(free[:count])))
            free, room = free[count:], room - length - 1
    return (PathPlan(*zip(*rows, strict=True)) if rows else None), lengths


def lay_out(
    plan: PathPlan,
    owners: Sequence[int],
    starts: Int64Array,
    last_tokens: Int64Array,
    block_table: Int32Array,
    block_size: int,
    num_tokens: int,
) -> Expansion:
    """Lay a plan out behind `num_tokens` tokens.

    Args:
        plan: the alternatives.
        owners: index of each alternative's request in the batch. [num_alternatives]
        starts: position of each alternative's first token, the request's last. [num_alternatives]
        last_tokens: that token. [num_alternatives]
        block_table: of the batch. [num_requests or more, max_blocks]
        block_size: tokens per block.
        num_tokens: tokens of the step without alternatives.
    """
    owned = np.asarray(owners, dtype=np.int64)
    num_drafts = np.fromiter(map(len, plan.drafts), np.int64, len(plan.drafts))
    tables = block_table[owned].copy()
    copies = []
    for row, private in enumerate(plan.blocks):
        first = int(starts[row]) // block_size
        span = slice(first, first + len(private))
        copies.append(tuple(zip(tables[row, span].tolist(), private, strict=True)))
        tables[row, span] = private
    query_lens = num_drafts + 1
    rows = np.repeat(np.arange(len(owned)), query_lens)
    within = np.arange(len(rows)) - (np.cumsum(query_lens) - query_lens)[rows]
    positions = starts[rows] + within
    token_ids = last_tokens[rows]
    drafts = np.fromiter((token for draft in plan.drafts for token in draft), np.int64, int(num_drafts.sum()))
    token_ids[within > 0] = drafts
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Expansion(
        num_tokens=num_tokens,
        owners=owned,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_lens=query_lens.astype(np.int32),
        seq_lens=(starts + query_lens).astype(np.int32),
        tables=tables,
        drafts=drafts,
        copies=tuple(copies),
        block_size=block_size,
    )

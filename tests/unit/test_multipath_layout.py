"""Where alternative paths go in a step: positions, private blocks, slots, and what is copied back for a winner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.engine.multipath.alternatives import Alternatives
from paceline.engine.multipath.layout import Expansion, PathPlan, blocks_touched, lay_out, plan_paths

BLOCK = 16
TABLE = np.array([[1, 2, 3, 0], [4, 5, 6, 7], [8, 0, 0, 0]], dtype=np.int32)


def expansion(starts: list[int], owners: list[int], drafts: list[tuple[int, ...]]) -> Expansion:
    """Alternatives with private blocks 100, 101, ... in order."""
    counts = [blocks_touched(start, len(draft), BLOCK) for start, draft in zip(starts, drafts, strict=True)]
    ends = np.cumsum(counts) + 100
    plan = PathPlan(
        names=tuple(str(owner) for owner in owners),
        drafts=tuple(drafts),
        blocks=tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)),
    )
    return lay_out(plan, owners, np.array(starts), np.array(starts) + 1000, TABLE, BLOCK, num_tokens=9)


def test_rows_follow_the_step() -> None:
    made = expansion([20, 20, 3], [0, 0, 2], [(7, 8), (9,), (5, 5, 5)])
    assert made.num_extra_tokens == 9
    assert made.token_ids.tolist() == [1020, 7, 8, 1020, 9, 1003, 5, 5, 5]
    assert made.positions.tolist() == [20, 21, 22, 20, 21, 3, 4, 5, 6]
    assert made.query_lens.tolist() == [3, 2, 4]
    assert made.seq_lens.tolist() == [23, 22, 7]
    assert made.drafts.tolist() == [7, 8, 9, 5, 5, 5]
    assert made.tables.tolist() == [[1, 100, 3, 0], [1, 101, 3, 0], [102, 0, 0, 0]]
    assert made.slots.tolist() == [1604, 1605, 1606, 1620, 1621, 1635, 1636, 1637, 1638]
    assert made.copies == (((2, 100),), ((2, 101),), ((8, 102),))


def test_a_path_over_a_block_boundary_has_two_private_blocks() -> None:
    made = expansion([30], [1], [(7, 8, 9)])
    assert made.tables.tolist() == [[4, 100, 101, 7]]
    assert made.slots.tolist() == [1614, 1615, 1616, 1617]
    assert made.copies == (((5, 100), (6, 101)),)
    assert made.won(0, accepted=1) == ((5, 100),)
    assert made.won(0, accepted=2) == ((5, 100), (6, 101))


@pytest.mark.parametrize("start", range(2 * BLOCK))
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_no_path_writes_outside_its_private_blocks(start: int, length: int) -> None:
    made = expansion([start, start], [1, 1], [tuple(range(length)), tuple(range(length))])
    own = set(TABLE.ravel().tolist())
    written = (made.slots // BLOCK).reshape(2, -1)
    private = [{private for _, private in pairs} for pairs in made.copies]
    assert [set(blocks) for blocks in written.tolist()] == private
    assert not private[0] & private[1]
    assert not (private[0] | private[1]) & own
    assert len(set(made.slots.tolist())) == made.num_extra_tokens
    assert [pair[0] for pair in made.copies[0]] == TABLE[
        1, start // BLOCK : (start + length) // BLOCK + 1
    ].tolist()
    for accepted in range(1, length + 1):
        reached = {int(slot) // BLOCK for slot in made.slots[: accepted + 1]}
        assert {private for _, private in made.won(0, accepted)} == reached


def plan(lengths: list[int], **limits: Any) -> tuple[PathPlan | None, list[int]]:
    """Alternatives [10 .., 20 .., ..] of requests a, b, .. whose last tokens stand at 14, the end of a block."""
    count = len(lengths)
    rows = np.arange(1, count + 1, dtype=np.int32)[:, None] * 10 + np.arange(4, dtype=np.int32)
    alternatives = Alternatives(
        owners=np.arange(count),
        tokens=rows,
        lengths=np.array(lengths, np.int32),
        path_probability=np.full(rows.shape, 0.5, np.float32),
        covered=np.ones(count, np.int32),
        cells=np.zeros_like(rows),
        is_free=np.ones(count, np.bool_),
    )
    given = {
        "starts": [14] * count,
        "limits": [4] * count,
        "room": 99,
        "blocks": [7, 8, 9],
        "block_size": BLOCK,
    }
    made, sent = plan_paths(alternatives, "abcdef"[:count], **(given | limits))
    return made, sent.tolist()


def test_alternatives_are_taken_in_order_while_blocks_last() -> None:
    made, sent = plan([3, 4, 2, 2])
    assert sent == [3, 0, 0, 0]  # two blocks each; the third spare block is none for a path over two
    assert made == PathPlan(("a",), ((10, 11, 12),), ((7, 8),))
    made, sent = plan([3, 4], starts=[14, 16])
    assert sent == [3, 4]
    assert made == PathPlan(("a", "b"), ((10, 11, 12), (20, 21, 22, 23)), ((7, 8), (9,)))


def test_alternatives_are_cut_to_the_step() -> None:
    made, sent = plan([3, 4], starts=[0, 0], limits=[2, 4], room=6)
    assert sent == [2, 2]  # 2 + 1 tokens of 6, then as many of the 3 that are left
    assert made == PathPlan(("a", "b"), ((10, 11), (20, 21)), ((7,), (8,)))


@pytest.mark.parametrize(
    "limits", [{"limits": [0]}, {"limits": [1]}, {"room": 2}, {"room": 0}, {"blocks": []}]
)
def test_an_alternative_that_would_add_nothing_is_left_out(limits: dict[str, Any]) -> None:
    assert plan([3], **limits) == (None, [0])

"""Blocks that hold NaN are cleared before somebody else reads them, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.engine.kv.nan_blocks import NanBlocks  # noqa: E402
from paceline.engine.multipath.layout import PathPlan  # noqa: E402


def a_step(**fields: Any) -> SimpleNamespace:
    """A scheduler's output that gives nothing to anybody, but for `fields`."""
    nobody = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(**({"scheduled_new_reqs": [], "scheduled_cached_reqs": nobody} | fields))


@pytest.fixture(params=[1, 2])
def cache(request: pytest.FixtureRequest) -> Any:
    """[blocks, keys and values, tokens, head_dim]; a backend may have several smaller blocks in the place of each."""
    return torch.full((8 * request.param, 2, 4, 3), float("nan"))


def by_block(cache: Any) -> Any:
    """[blocks, smaller blocks, keys and values, tokens, head_dim]"""
    return cache.view(8, -1, 2, 4, 3)


def cleared(cache: Any) -> list[int]:
    return [block for block in range(8) if not by_block(cache)[block].isnan().any()]


def test_blocks_are_cleared_when_a_new_request_gets_them_but_for_its_cached_prefix(cache: Any) -> None:
    blocks = NanBlocks([cache], 8, [4])
    blocks.leave([[1, 2, 3]])
    blocks.clear_before(a_step(), None)
    assert cleared(cache) == []
    new = SimpleNamespace(block_ids=([1, 2, 5],), num_computed_tokens=4)
    blocks.clear_before(a_step(scheduled_new_reqs=[new]), None)
    assert cleared(cache) == [2]


def test_blocks_are_cleared_when_a_running_request_grows_into_them(cache: Any) -> None:
    blocks = NanBlocks([cache], 8, [4])
    blocks.leave([[1, 2, 3]])
    grown = SimpleNamespace(
        req_ids=["a", "b"], new_block_ids=[None, ([3],)], num_computed_tokens=[7, 8], resumed_req_ids=set()
    )
    blocks.clear_before(a_step(scheduled_cached_reqs=grown), None)
    assert cleared(cache) == [3]


def test_nan_is_cleared_from_a_position_on_and_nothing_else(cache: Any) -> None:
    cache[:] = 1.0
    blocks = by_block(cache)
    blocks[3, :, :, 1:], blocks[5, 0, 0, 0, 0] = float("nan"), float("inf")
    NanBlocks([cache], 8, [4]).clear_from([[6, 3, 5]], 5)
    assert blocks[3].tolist() == [[[[1.0] * 3, *[[0.0] * 3] * 3]] * 2] * len(blocks[3])
    assert blocks[5, 0, 0, 0].tolist() == [float("inf"), 1.0, 1.0]


def test_each_group_has_blocks_of_its_own_size(cache: Any) -> None:
    NanBlocks([cache], 8, [4, 8]).clear_from([[6, 3, 4], [5, 2]], 8)
    assert cleared(cache) == [2, 4]


def test_a_cache_that_is_not_laid_out_by_blocks_is_left_alone(cache: Any) -> None:
    other = torch.full((3, 8, 4), float("nan"))
    NanBlocks([other, cache], 8, [4]).clear_from([[1]], 0)
    assert other.isnan().all()
    assert cleared(cache) == [1]


def test_blocks_are_cleared_when_an_alternative_path_borrows_them(cache: Any) -> None:
    blocks = NanBlocks([cache], 8, [4])
    blocks.leave([[1, 2, 3]])
    plan = PathPlan(names=("a",), drafts=((7, 8, 9),), blocks=((6, 2),))
    blocks.clear_before(a_step(), plan)
    assert cleared(cache) == [2]
    by_block(cache)[2] = float("nan")
    blocks.clear_before(a_step(), plan)
    assert cleared(cache) == []  # it was given once, clean

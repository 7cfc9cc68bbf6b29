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


@pytest.fixture
def cache() -> Any:
    return torch.full((8, 2, 4, 3), float("nan"))  # [blocks, keys and values, tokens, head_dim]


def cleared(cache: Any) -> list[int]:
    return [block for block in range(len(cache)) if not cache[block].isnan().any()]


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
    cache[3, :, 1:], cache[5, 0, 0, 0] = float("nan"), float("inf")
    NanBlocks([cache], 8, [4]).clear_from([[6, 3, 5]], 5)
    assert cache[3].tolist() == [[[1.0] * 3, *[[0.0] * 3] * 3]] * 2
    assert cache[5, 0, 0].tolist() == [float("inf"), 1.0, 1.0]


def test_blocks_are_cleared_when_an_alternative_path_borrows_them(cache: Any) -> None:
    blocks = NanBlocks([cache], 8, [4])
    blocks.leave([[1, 2, 3]])
    plan = PathPlan(names=("a",), drafts=((7, 8, 9),), blocks=((6, 2),))
    blocks.clear_before(a_step(), plan)
    assert cleared(cache) == [2]
    cache[2] = float("nan")
    blocks.clear_before(a_step(), plan)
    assert cleared(cache) == []  # it was given once, clean

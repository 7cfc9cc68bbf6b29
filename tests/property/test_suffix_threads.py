"""The suffix forest drafts the same with one thread and with several, and on a thread of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.suffix import NUM_CELLS, DraftPaths, SuffixForest
from paceline.types import DraftBatch, DraftQuery

GRID = np.array([1.0, 2.0, np.inf], dtype=np.float32)
CALIBRATION = np.linspace(0.5, 0.99, NUM_CELLS, dtype=np.float32)
NUM_GROUPS = 6


def defined(drafts: DraftBatch | DraftPaths) -> list[bytes]:
    """All but the entries behind the end of a draft."""
    inside = np.arange(drafts.tokens.shape[-1]) < drafts.num_tokens[..., None]
    arrays = (drafts.tokens, drafts.acceptance, drafts.cells)
    return [drafts.num_tokens.tobytes(), *(array[inside].tobytes() for array in arrays)]


def run(num_threads: int, seed: int, num_requests: int, sharpness: float, later: bool = False) -> list[bytes]:
    """A few steps of drafting and appending: responses of several groups, in any order, some of an unknown group.

    later: append, and then draft, while something else is done.
    """
    random = np.random.default_rng(seed)
    forest = SuffixForest(6, shared_depth=3, num_threads=num_threads)
    for group in range(NUM_GROUPS):
        forest.open_group(group, random.integers(0, 5, 8))
    groups = random.integers(0, NUM_GROUPS + 1, num_requests).astype(np.int64)
    responses = np.arange(num_requests, dtype=np.int64)
    found: list[bytes] = []
    nothing = np.empty(0, np.int64)
    growth = nothing, nothing, np.zeros(1, np.int32), np.empty(0, np.int32)
    for step in range(6):
        query = DraftQuery(
            groups=groups,
            responses=responses,
            keys=random.integers(0, 1 << 40, num_requests).astype(np.uint64),
            positions=random.integers(0, 100, num_requests).astype(np.int64),
            temperatures=random.integers(0, 2, num_requests).astype(np.float32),
            max_tokens=random.integers(0, 7, num_requests).astype(np.int32),
        )
        options: dict[str, Any] = {
            "sharpness": sharpness, "sharpness_grid": GRID, "calibration": CALIBRATION, "floor": 0.1
        }  # fmt: skip
        if later:
            wait = forest.draft_later(*growth, query, **options, num_paths=3)
            forest.drop_group(1 << 40)  # waits, or it would be there while the thread looks
            batch, paths = wait()
            assert paths is not None
        else:
            forest.append_batch(*growth)
            batch = forest.draft(query, **options)
            del options["sharpness_grid"]
            paths = forest.draft_paths(query, num_paths=3, **options)
        found += [*defined(batch), batch.probes.tobytes(), *defined(paths)]
        known = NUM_GROUPS - (step < 3)  # of the last group nothing is known at first
        grown = np.flatnonzero(groups < known)
        lengths = random.integers(0, 5, len(grown))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = random.integers(0, 5, int(lengths.sum())).astype(np.int32)
        growth = groups[grown], responses[grown], offsets, tokens
    return [*found, np.array(forest._native.escapes()).tobytes()]


@given(st.integers(0, 1 << 32), st.integers(1, 90), st.sampled_from([1.0, 2.0, math.inf]))
@settings(max_examples=60)
def test_the_number_of_threads_changes_no_bit(seed: int, num_requests: int, sharpness: float) -> None:
    one = run(1, seed, num_requests, sharpness)
    assert run(2, seed, num_requests, sharpness) == one
    assert run(5, seed, num_requests, sharpness) == one


@given(st.integers(0, 1 << 32), st.integers(1, 90), st.sampled_from([1.0, math.inf]), st.integers(1, 2))
@settings(max_examples=40)
def test_drafting_later_changes_no_bit(
    seed: int, num_requests: int, sharpness: float, num_threads: int
) -> None:
    now = run(1, seed, num_requests, sharpness)
    assert run(num_threads, seed, num_requests, sharpness, later=True) == now


def test_many_requests_get_drafts() -> None:
    num_tokens = np.frombuffer(run(2, 0, 64, 1.0)[-10], np.int32)  # of the last step
    assert (num_tokens > 0).sum() > 32

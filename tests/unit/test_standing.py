"""Which tokens of a step stand, and which of its hidden states are theirs, against a count by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._step import standing
from paceline.engine.v1.sampler import Rows

WIDTH = 64


def make_step(seed: int, num_requests: int, num_others: int) -> dict[str, Any]:
    """A step of requests with prompt pieces and drafts, and of alternative paths of any of them."""
    random = np.random.default_rng(seed)
    owners = np.concatenate([np.arange(num_requests), random.integers(0, num_requests, num_others)])
    num_drafts = random.integers(0, 4, len(owners))
    first = Rows.of(num_drafts, np.zeros(num_requests, np.int64), owners).first
    prefill = random.integers(0, 5, num_requests) * (random.random(num_requests) < 0.4)
    winners = np.array([random.choice(np.flatnonzero(owners == r)) for r in range(num_requests)])
    return {
        "scheduled": prefill + 1 + num_drafts[:num_requests],
        "num_drafts": num_drafts,
        "first": first,
        "winners": winners,
        "accepted": random.integers(0, num_drafts[winners] + 1),
        "computed": random.integers(0, 40, num_requests + 2).astype(np.int32),
        "tokens": random.integers(0, 1000, (num_requests + 2, WIDTH)).astype(np.int32),
        "requests": random.permutation(num_requests)[: random.integers(0, num_requests + 1)],
        "stands": np.array([], np.bool_),
    }


@given(st.integers(0, 2**20), st.integers(1, 6), st.integers(0, 5))
def test_what_stands_is_as_by_hand(seed: int, num_requests: int, num_others: int) -> None:
    step = make_step(seed, num_requests, num_others)
    told = step["requests"].tolist()
    step["stands"] = np.random.default_rng(seed).random(len(told)) < 0.8
    counts, starts, places, ids, next_ids = standing(**step)

    # Of every token of the step, in its order: (path, its place in the path); prompt pieces are of the request's path.
    order: list[tuple[int, int]] = []
    for path, drafts in enumerate(step["num_drafts"].tolist()):
        prefill = step["scheduled"][path] - 1 - drafts if path < num_requests else 0
        order += [(path, k - prefill) for k in range(prefill + 1 + drafts)]
    place_of = {name: place for place, name in enumerate(order)}
    at = 0
    for index, request in enumerate(told):
        prefill = int(step["scheduled"][request] - 1 - step["num_drafts"][request])
        accepted, winner = int(step["accepted"][request]), int(step["winners"][request])
        names = [(request, k) for k in range(-prefill, 0)] + [(winner, k) for k in range(accepted + 1)]
        names = names if step["stands"][index] else []
        start = int(step["computed"][request])
        stop = at + len(names)
        assert (counts[index], starts[index]) == (len(names), start)
        assert places[at:stop].tolist() == [place_of[name] for name in names]
        own = step["tokens"][request, start : start + len(names) + 1].tolist()
        assert (ids[at:stop].tolist(), next_ids[at:stop].tolist()) == (own[: len(names)], own[1:])
        at = stop
    assert len(places) == len(ids) == len(next_ids) == at


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("stands", lambda one: one[:-1], "one flag"),
        ("accepted", lambda one: one[:-1], "differ in length"),
        ("computed", lambda one: one + WIDTH, "more tokens"),
        ("requests", lambda one: one + 3, "none of the batch's"),
        ("winners", lambda one: one + 9, "none of this step"),
        ("scheduled", lambda one: one * 0, "fewer tokens than rows"),
        ("tokens", lambda one: one.astype(np.int64), "incompatible"),
    ],
)
@pytest.mark.parametrize("stands", [True, False])
def test_arrays_that_do_not_fit_are_refused(name: str, change: Any, message: str, stands: bool) -> None:
    step = make_step(1, 3, 1) | {"requests": np.arange(3), "stands": np.full(3, stands)}
    step[name] = np.ascontiguousarray(change(step[name]))
    with pytest.raises((ValueError, TypeError), match=message):
        standing(**step)

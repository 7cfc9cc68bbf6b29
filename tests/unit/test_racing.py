"""Algorithm 3, both versions, against their loops written out and against what no assignment may do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, EngineError
from paceline.planning.racing import (
    Racer,
    RacingSnapshot,
    assign_best_of_n,
    assign_fastest_of_n,
    deploy_drafters,
)

Assign = Callable[[RacingSnapshot, int], tuple[Racer, ...]]
BOTH = pytest.mark.parametrize("assign", [assign_best_of_n, assign_fastest_of_n])


def snapshot_of(
    acceptance: list[float], is_drafting: list[list[bool]], workers: list[tuple[int, int]]
) -> RacingSnapshot:
    return RacingSnapshot(
        np.array(acceptance),
        np.array(is_drafting, dtype=np.bool_).reshape(len(acceptance), -1),
        np.array([drafter for drafter, _ in workers], dtype=np.int64),
        np.array([load for _, load in workers], dtype=np.int64),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> RacingSnapshot:
    num_requests, num_drafters = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    row = st.lists(st.booleans(), min_size=num_drafters, max_size=num_drafters)
    workers = st.lists(st.tuples(st.integers(0, num_drafters - 1), st.integers(0, 6)), max_size=6)
    rates = st.sampled_from([0.1, 0.5, 0.5, 0.9])
    return snapshot_of(
        draw(st.lists(rates, min_size=num_requests, max_size=num_requests)),
        draw(st.lists(row, min_size=num_requests, max_size=num_requests)),
        draw(workers),
    )


def by_the_loops_of_v1(snapshot: RacingSnapshot, max_batch: int) -> list[tuple[int, int, int]]:
    loads, found = snapshot.worker_loads.tolist(), []
    for d in range(snapshot.is_drafting.shape[1]):
        left = sorted(range(len(snapshot.acceptance)), key=lambda r: snapshot.acceptance[r])
        left = [r for r in left if not snapshot.is_drafting[r, d]]
        for w, drafter in enumerate(snapshot.worker_drafters):
            while drafter == d and loads[w] < max_batch and left:
                found.append((left.pop(0), d, w))
                loads[w] += 1
    return found


def by_the_loops_of_v2(snapshot: RacingSnapshot, max_batch: int) -> list[tuple[int, int, int]]:
    loads, found = snapshot.worker_loads.tolist(), []
    for r in sorted(range(len(snapshot.acceptance)), key=lambda r: snapshot.acceptance[r]):
        for d in range(snapshot.is_drafting.shape[1]):
            able = [w for w, of in enumerate(snapshot.worker_drafters) if of == d and loads[w] < max_batch]
            if able and not snapshot.is_drafting[r, d]:
                w = min(able, key=lambda w: loads[w])
                found.append((r, d, w))
                loads[w] += 1
    return found


@given(snapshots(), st.integers(0, 8))
@settings(max_examples=60)
def test_the_assignments_are_those_of_the_papers_loops(snapshot: RacingSnapshot, max_batch: int) -> None:
    assert list(assign_best_of_n(snapshot, max_batch)) == by_the_loops_of_v1(snapshot, max_batch)
    assert list(assign_fastest_of_n(snapshot, max_batch)) == by_the_loops_of_v2(snapshot, max_batch)


@BOTH
@given(snapshot=snapshots(), max_batch=st.integers(0, 8))
@settings(max_examples=60)
def test_no_assignment_breaks_a_rule(assign: Assign, snapshot: RacingSnapshot, max_batch: int) -> None:
    racers = assign(snapshot, max_batch)
    added = np.bincount([racer.worker for racer in racers], minlength=len(snapshot.worker_loads))
    assert (snapshot.worker_loads + added <= max_batch)[added > 0].all(), "above b_max"
    taken = [(racer.request, racer.drafter) for racer in racers]
    assert len(set(taken)) == len(taken), "a drafter twice"
    for request, drafter, worker in racers:
        assert not snapshot.is_drafting[request, drafter]
        assert snapshot.worker_drafters[worker] == drafter
    for drafter in range(snapshot.is_drafting.shape[1]):
        rates = [snapshot.acceptance[racer.request] for racer in racers if racer.drafter == drafter]
        assert rates == sorted(rates), "not by ascending acceptance"


@BOTH
@given(snapshot=snapshots(), max_batch=st.integers(0, 8))
@settings(max_examples=60)
def test_no_place_is_left_that_a_request_could_use(
    assign: Assign, snapshot: RacingSnapshot, max_batch: int
) -> None:
    racers = assign(snapshot, max_batch)
    added = np.bincount([racer.worker for racer in racers], minlength=len(snapshot.worker_loads))
    for drafter in range(snapshot.is_drafting.shape[1]):
        mine = snapshot.worker_drafters == drafter
        room = np.maximum(max_batch - snapshot.worker_loads[mine], 0).sum()
        wanted = (~snapshot.is_drafting[:, drafter]).sum()
        assert added[mine].sum() == min(room, wanted)


@given(snapshots(), st.integers(0, 8))
@settings(max_examples=60)
def test_fastest_of_n_serves_the_slowest_first_with_the_best_drafters(
    snapshot: RacingSnapshot, max_batch: int
) -> None:
    racers = assign_fastest_of_n(snapshot, max_batch)
    order = [(snapshot.acceptance[racer.request], racer.request, racer.drafter) for racer in racers]
    assert order == sorted(order)


def test_the_versions_spread_load_differently() -> None:
    """v1 fills worker by worker, v2 spreads."""
    snapshot = snapshot_of([0.9, 0.2, 0.5], [[False]] * 3, [(0, 0), (0, 0)])
    assert assign_best_of_n(snapshot, 2) == (Racer(1, 0, 0), Racer(2, 0, 0), Racer(0, 0, 1))
    assert assign_fastest_of_n(snapshot, 2) == (Racer(1, 0, 0), Racer(2, 0, 1), Racer(0, 0, 0))


def test_free_workers_go_to_the_least_populated_drafter() -> None:
    assert deploy_drafters(5, [2, 0, 1]) == (1, 1, 2, 0, 1)
    assert deploy_drafters(0, [1]) == ()


@given(st.integers(0, 40), st.lists(st.integers(0, 10), min_size=1, max_size=5))
@settings(max_examples=60)
def test_deployment_levels_the_populations(num_free: int, before: list[int]) -> None:
    deployed = deploy_drafters(num_free, before)
    after = np.array(before) + np.bincount(deployed, minlength=len(before)).astype(np.int64)
    grown = after > np.array(before)
    assert len(deployed) == num_free
    assert not grown.any() or after[grown].max() <= after.min() + 1


@BOTH
def test_snapshots_that_do_not_fit_are_refused(assign: Assign) -> None:
    with pytest.raises(EngineError, match="does not fit 2 requests"):
        assign(
            RacingSnapshot(np.zeros(2), np.zeros((3, 1), bool), np.zeros(1, np.int64), np.zeros(1, np.int64)),
            4,
        )
    with pytest.raises(EngineError, match="1 with loads"):
        assign(
            RacingSnapshot(np.zeros(1), np.zeros((1, 1), bool), np.zeros(2, np.int64), np.zeros(1, np.int64)),
            4,
        )
    with pytest.raises(EngineError, match="only 1 drafters"):
        assign(snapshot_of([0.5], [[False]], [(1, 0)]), 4)


def test_deploying_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no drafter"):
        deploy_drafters(3, [])

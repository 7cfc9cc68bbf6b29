"""Racing: which drafters join which requests on workers that have fallen free? (SpecActor 4.2, algorithm 3)

Owns the assignment of racers in both published versions; what a racer does is the workers' business, and it cannot
change a token. Called when workers fall free. Invariants: no worker holds more than `max_batch` requests through an
assignment; a drafter that already drafts for a request is never assigned to it again; requests come in ascending order
of acceptance (ties: the earlier request), drafters in order of ladder rank.

    deploy_drafters     v1, lines 1-3: which drafter does each free worker run?
    assign_best_of_n    v1, lines 4-11: drafter by drafter, worker by worker
    assign_fastest_of_n v2: request by request, all its drafters before the next, on the least loaded worker

In v1 a drafter of many workers serves many requests with one racer each; in v2 the slowest request gets every drafter
first. v2 leaves open how workers come to run drafters; v1's rule serves both.

Differs: v1 does not ask whether the drafter drafts for the request already (the one it began with does); here it does,
as in v2, and the place goes to the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError, EngineError
from paceline.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class RacingSnapshot:
    """Requests and workers at one moment. A drafter is its ladder rank, 0 the best; a worker runs one drafter."""

    acceptance: Float64Array  # [num_requests] acceptance rate of each request
    is_drafting: NDArray[np.bool_]  # [num_requests, num_drafters] whether the drafter drafts for the request
    worker_drafters: Int64Array  # [num_workers] the drafter each worker runs
    worker_loads: Int64Array  # [num_workers] requests each worker verifies


class Racer(NamedTuple):
    """One assignment. A tuple, as there may be tens of thousands."""

    request: int
    drafter: int
    worker: int


def deploy_drafters(num_free_workers: int, num_workers_of: Sequence[int]) -> tuple[int, ...]:
    """The drafter that each free worker shall run: the least populated at its turn, ties by rank (v1, lines 1-3).

    num_workers_of: [num_drafters] workers that run each drafter already. Raises ConfigError without drafters.
    """
    if not num_workers_of:
        raise ConfigError(f"{num_free_workers} free workers and no drafter to run: name at least 1")
    population = [(count, drafter) for drafter, count in enumerate(num_workers_of)]
    heapify(population)
    deployed = []
    for _ in range(num_free_workers):
        count, drafter = population[0]
        heapreplace(population, (count + 1, drafter))
        deployed.append(drafter)
    return tuple(deployed)


def assign_best_of_n(snapshot: RacingSnapshot, max_batch: int) -> tuple[Racer, ...]:
    """Racers by v1 (lines 4-11), in the order assigned: each worker is filled before the next of its drafter.

    max_batch: b_max, most requests a worker may verify. Raises EngineError if the arrays do not fit each other.
    """
    order = _checked_order(snapshot)
    loads, drafter_of = snapshot.worker_loads.tolist(), snapshot.worker_drafters
    racers: list[Racer] = []
    for drafter in range(snapshot.is_drafting.shape[1]):
        waiting = iter(order[~snapshot.is_drafting[order, drafter]].tolist())
        for worker in np.flatnonzero(drafter_of == drafter).tolist():
            room = range(max_batch - loads[worker])
            racers += (Racer(request, drafter, worker) for _, request in zip(room, waiting, strict=False))
    return tuple(racers)


def assign_fastest_of_n(snapshot: RacingSnapshot, max_batch: int) -> tuple[Racer, ...]:
    """Racers by v2, in the order assigned; equally loaded workers: the earlier one.

    max_batch: b_max, most requests a worker may verify. Raises EngineError if the arrays do not fit each other.
    """
    order = _checked_order(snapshot)
    workers = _open_workers(snapshot, max_batch)
    is_drafting = snapshot.is_drafting[order].tolist()
    racers: list[Racer] = []
    for request, busy in zip(order.tolist(), is_drafting, strict=True):
        if not any(workers):
            break
        for drafter, heap in enumerate(workers):
            if heap and not busy[drafter]:
                racers.append(Racer(request, drafter, _take_place(heap, max_batch)))
    return tuple(racers)


def _open_workers(snapshot: RacingSnapshot, max_batch: int) -> list[list[tuple[int, int]]]:
    """Per drafter a heap of (load, worker) of its workers with room."""
    heaps: list[list[tuple[int, int]]] = [[] for _ in range(snapshot.is_drafting.shape[1])]
    places = zip(snapshot.worker_drafters.tolist(), snapshot.worker_loads.tolist(), strict=True)
    for worker, (drafter, load) in enumerate(places):
        if load < max_batch:
            heaps[drafter].append((load, worker))
    for heap in heaps:
        heapify(heap)
    return heaps


def _take_place(heap: list[tuple[int, int]], max_batch: int) -> int:
    """The least loaded worker, which leaves the heap when it is full."""
    load, worker = heap[0]
    if load + 1 < max_batch:
        heapreplace(heap, (load + 1, worker))
    else:
        heappop(heap)
    return worker


def _checked_order(snapshot: RacingSnapshot) -> Int64Array:
    """Requests by ascending acceptance."""
    shape, workers = snapshot.is_drafting.shape, snapshot.worker_drafters
    if snapshot.is_drafting.ndim != 2 or shape[0] != len(snapshot.acceptance):
        raise EngineError(
            f"is_drafting of shape {shape} does not fit {len(snapshot.acceptance)} requests: give a row to each"
        )
    if len(workers) != len(snapshot.worker_loads):
        raise EngineError(
            f"{len(workers)} workers with drafters, {len(snapshot.worker_loads)} with loads: give one of both to each"
        )
    if workers.size and not 0 <= workers.min() <= workers.max() < shape[1]:
        raise EngineError(
            f"worker drafters from {workers.min()} to {workers.max()}, and only {shape[1]} drafters: number them "
            "by ladder rank from 0"
        )
    return np.argsort(snapshot.acceptance, kind="stable")

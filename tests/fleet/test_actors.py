"""Orders to an actor are watched: one that fails is the loss of its worker, one that is done is no news. What all are
told once is told those that come later too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.config import FleetSettings
from paceline.control.events import CancelChunk, WorkerEvent, WorkerLost, WorkerUp
from paceline.fleet.actors import Actors
from paceline.fleet.rollout_worker import EngineSpec, Facts, Pace


def make_worker() -> type:
    """A local class: actors cannot import this module."""

    class Deaf:
        """No engine; fails on any order for chunk 13."""

        def __init__(self, spec: EngineSpec, pace: Pace) -> None:
            self.places: list[int] = []

        def start(self) -> Facts:
            return Facts(10, 16, 4, 64, os.getpid())

        def take(self, orders: Any, params: Any) -> None:
            if orders[0].chunk == 13:
                raise RuntimeError("these parameters cannot be read")

        def report(self, wait_s: float) -> None:
            time.sleep(wait_s)

        def use_drafter(self, place: int) -> None:
            self.places.append(place)

        def told(self, most: int) -> list[int]:
            if len(self.places) > most:
                raise RuntimeError("too many")
            return self.places

    return Deaf


@pytest.fixture
def actors(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    monkeypatch.setattr("paceline.fleet.actors.RolloutWorker", make_worker())
    made = Actors(EngineSpec("no model"), FleetSettings(workers=1, cpus_per_worker=0.1))
    yield made
    for worker in list(made._actors):
        made._kill(worker)


def hear(
    ray: Any, actors: Actors, found: Callable[[WorkerEvent | None], bool], most_s: float = 60.0
) -> WorkerEvent | None:
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        ready, _ = ray.wait(list(actors.calls), num_returns=1, timeout=1.0)
        for ref in ready:
            event = actors.take(ref)
            if found(event):
                return event
    pytest.fail("nothing came")


def test_an_order_that_fails_is_a_loss(ray: Any, actors: Actors) -> None:
    actors.start("w0", 4)
    hear(ray, actors, lambda event: isinstance(event, WorkerUp))
    actors.order("w0", [CancelChunk("w0", 4, 12)], None)
    assert hear(ray, actors, lambda event: event is None) is None
    actors.order("w0", [CancelChunk("w0", 4, 13)], None)
    lost = hear(ray, actors, lambda event: isinstance(event, WorkerLost))
    assert lost == WorkerLost("w0", 4, "these parameters cannot be read")
    assert actors.process("w0") is None, "it has been killed"


def test_who_comes_later_is_told_what_the_others_were(ray: Any, actors: Actors) -> None:
    actors.settle("use_drafter", 1)
    actors.start("w0", 0)
    hear(ray, actors, lambda event: isinstance(event, WorkerUp))
    assert actors.ask("w0", "told", 2, timeout_s=60.0) == [1]
    actors.settle("use_drafter", 0)
    assert actors.ask("w0", "told", 2, timeout_s=60.0) == [1, 0]
    assert actors.ask("w0", "told", 1, timeout_s=60.0) is None, "it failed"

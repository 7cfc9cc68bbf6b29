"""What Ray answers becomes events, also where that is interrupted or late. On a Ray that answers what the test says."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import GetTimeoutError

from paceline.control.events import Report, Reported
from paceline.fleet import actors, reward_pool
from paceline.fleet.actors import Actors
from paceline.fleet.reward_pool import RewardPool

INTERRUPTED = KeyboardInterrupt()


class Ray:
    """Stands where the module is. Everything that is called gives a reference, which is a number."""

    def __init__(self) -> None:
        self.exceptions = actors.ray.exceptions
        self.answers: list[Any] = []
        self.calls: list[str] = []
        self.timeouts: list[float] = []

    def get(self, ref: int, timeout: float = 0.0) -> Any:
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def method(self, name: str) -> Any:
        def remote(*arguments: Any) -> int:
            self.calls.append(name)
            return len(self.calls)

        return SimpleNamespace(remote=remote, options=lambda **options: self.method(name))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(actors, "ray", made)
    monkeypatch.setattr(reward_pool, "ray", made)
    return made


def make_actors(ray: Ray, num_workers: int = 1) -> Actors:
    """Workers that are up, and whose reports are on their way."""
    made = Actors.__new__(Actors)
    handle = SimpleNamespace(report=ray.method("report"), collection_s=ray.method("collection_s"))
    made._actors = {f"w{i}": actors._Actor(handle, 0, process=1) for i in range(num_workers)}
    made._calls = {-i: actors._Call("report", f"w{i}", 0) for i in range(num_workers)}
    made._settings = {}
    return made


def test_a_worker_is_heard_on_after_an_interruption(ray: Ray) -> None:
    made, report = make_actors(ray), Report(3)
    ray.answers = [INTERRUPTED, report]
    with pytest.raises(KeyboardInterrupt):
        made.take(0)
    assert list(made.calls) == [0]
    assert made.take(0) == Reported("w0", 0, report)
    assert (list(made.calls), ray.calls) == ([1], ["report"])


def test_a_reward_is_taken_after_an_interruption(ray: Ray) -> None:
    pool = RewardPool.__new__(RewardPool)
    pool._calls = {0: reward_pool._Call(0, 1, is_start=False)}
    pool._scheduler = SimpleNamespace(returned=lambda *told: [])  # type: ignore[assignment]
    ray.answers = [INTERRUPTED, 0.5]
    with pytest.raises(KeyboardInterrupt):
        pool.take(0)
    assert list(pool.calls) == [0]
    assert pool.take(0) == []
    assert list(pool.calls) == []


def test_all_workers_are_waited_for_together(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    made, now_s = make_actors(ray, 3), iter([100.0, 100.0, 104.0, 109.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    ray.answers = [0.5, GetTimeoutError(), 0.25]
    assert made.ask_all("collection_s", timeout_s=5.0) == [0.5, 0.25]
    assert ray.timeouts == [5.0, 1.0, 0.0]

"""The speed benchmark's log of engine steps, on a scheduler of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from timed_rollouts import BENCHMARKS  # noqa: F401

from steps import watch_steps  # isort: skip


class Scheduler:
    """Plans what it is told to; its loop receives drafts as Paceline's does."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.received: list[Any] = []
        self.loop = SimpleNamespace(receive=self.received.append)
        self.plan: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.new: list[Any] = []

    def schedule(self) -> Any:
        return SimpleNamespace(
            num_scheduled_tokens=self.plan,
            scheduled_spec_decode_tokens=self.drafts,
            scheduled_new_reqs=self.new,
        )


def request(name: str, num_tokens: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_tokens)


def test_steps_are_told_apart_by_what_they_do() -> None:
    scheduler = Scheduler()
    with watch_steps(scheduler) as log:
        scheduler.plan, scheduler.new = {"a": 7, "b": 5}, ["a", "b"]
        scheduler.schedule()
        log.num_gained += 2
        scheduler.running = [request("a", 8), request("b", 6)]
        scheduler.plan, scheduler.drafts, scheduler.new = {"a": 4, "b": 1}, {"a": [1, 2, 3]}, []
        scheduler.schedule()
        log.num_gained += 5
        scheduler.loop.receive(SimpleNamespace(total_s=0.25))
        scheduler.plan = {}
        scheduler.schedule()
    prefill, decode = log.steps
    assert (prefill.num_requests, prefill.num_tokens, prefill.is_decode, prefill.num_gained) == (
        2,
        12,
        False,
        2,
    )
    assert decode[:5] == (2, 5, 14, 5, True)
    assert decode.drafting_s == 0.25
    assert decode.step_s > 0


def test_a_scheduler_is_left_as_it_was() -> None:
    scheduler = Scheduler()
    with watch_steps(scheduler):
        assert "schedule" in vars(scheduler)
    assert "schedule" not in vars(scheduler)
    scheduler.loop.receive("drafts")
    assert scheduler.received == ["drafts"]


def test_a_chunk_of_a_prompt_is_no_decoding() -> None:
    scheduler = Scheduler()
    scheduler.running = [request("a", 40)]
    with watch_steps(scheduler) as log:
        scheduler.plan = {"a": 16}
        scheduler.schedule()
    assert [step.is_decode for step in log.steps] == [False]


def test_plain_vllm_has_no_loop() -> None:
    scheduler = Scheduler()
    del scheduler.loop
    scheduler.running, scheduler.plan = [request("a", 9)], {"a": 1}
    with watch_steps(scheduler) as log:
        scheduler.schedule()
        log.num_gained += 1
    assert log.steps[0][:6] == (1, 1, 9, 1, True, 0.0)

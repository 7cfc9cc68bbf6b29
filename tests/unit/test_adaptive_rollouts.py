"""When a drafter is trained beside a run, what its trainer is told, and when the engine gets it; without engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from paceline.distillation.packing import Sample
from paceline.engine.rollout_engine import TokenEvent
from paceline.planning.drafter_growth import PATIENCE, Growth
from paceline.record import DrafterSession, DrafterStep, Note
from paceline.training import adaptive_rollouts
from paceline.training.adaptive_rollouts import AdaptiveRollouts
from paceline.training.drafter_sessions import TailSessions
from paceline.training.rollouts import WatchedRollouts
from paceline.types import DrafterScore, Response, RolloutRequest

REQUESTS = [RolloutRequest(prompt=(1, 2), max_tokens=5, key=key) for key in range(6)]


@dataclass
class Engine:
    """Finishes one response a step; its drafter is right in half of what it tries, once it has one."""

    policy_version: int = 0
    drafter_version: int = 0
    is_dropped: bool = False
    score: DrafterScore = field(default_factory=DrafterScore)
    alarms: int = 0
    share: float = 0.0
    """Of the responses whose states are kept."""

    def stream(
        self, requests: Sequence[RolloutRequest], params: Any, *, on_failure: str = "raise"
    ) -> Iterator[TokenEvent]:
        for index, request in enumerate(requests):
            if not self.is_dropped:
                self.score += DrafterScore(10, 5, self.alarms)
                self.alarms = 0
            response = Response(request, (7, 8), (-0.5, -0.5), "stop", 0, 0, 0, 0, 0, 2)
            yield TokenEvent(index, (7, 8), (-0.5, -0.5), response)

    def take_observations(self) -> list[Any]:
        return [SimpleNamespace(num_requests=1, num_accepted_tokens=0, step_s=0.0)]

    def push_weights(self, weights: Any, *, version: int | None = None) -> int:
        assert dict(weights) == {"w": 3}
        self.policy_version += 1
        return self.policy_version

    def push_drafter(self, weights: Any) -> int:
        self.is_dropped = False
        self.drafter_version += 1
        return self.drafter_version

    def drop_drafter(self) -> None:
        self.is_dropped = True

    def drafter_score(self) -> DrafterScore:
        return self.score

    def collect_states(self, share: float, max_bytes: int) -> None:
        self.share = share

    def collection_s(self) -> float:
        return 0.25

    def take_samples(self) -> list[Sample]:
        return [Sample(torch.tensor([1, 2, 7]), 2, torch.ones(3, 4))] if self.share else []


@dataclass
class Link:
    """Notes what the trainer is told."""

    calls: list[Any] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    """Agreement of the drafters that it saves."""
    present: float | None = None
    """Of the drafter that the engine has, as the trainer measures it."""
    core_s: float | None = 0.25
    """Processor time of each session; None: the trainer has ended."""
    before: Any = None
    """The drafter that was used before the run was resumed."""

    def stop(self) -> None:
        self.calls.append("stop")

    def resume(self, lender: str, leader: str) -> None:
        assert lender == leader
        self.calls.append("resume")

    def pause(self, lender: str, leader: str | None) -> float | None:
        assert leader is None
        self.calls.append("pause")
        return self.core_s

    def use(self) -> None:
        self.calls.append("use")

    def used(self) -> Any:
        return self.before

    def teach(self, step: int, policy: Any, samples: Any) -> None:
        told = [(tuple(sample.ids.tolist()), sample.num_prompt_tokens) for sample in samples]
        self.calls.append((step, policy, told))

    def take(self) -> Any:
        if not self.saved:
            return None
        return {}, SimpleNamespace(
            agreement=self.saved.pop(0),
            first_agreement=0.1,
            used_agreement=self.present,
            trained_s=4.0,
            trained_tokens=900,
        )


class Run:
    """Rollouts with everything around them made up."""

    def __init__(
        self, max_running: int = 2, is_fresh: bool = True, is_head: bool = False, before: Any = None
    ) -> None:
        self.engine, self.link = Engine(), Link(before=before)
        self.events: list[Any] = []
        self.shown: list[int] = []
        self.clock = iter(range(10**6))
        record: Any = SimpleNamespace(now_s=lambda: next(self.clock), write=self.write, add_step=self.ignore)
        watcher: Any = SimpleNamespace(show_rollout=lambda meter: self.shown.append(meter.num_finished))
        section = SimpleNamespace(states_share=0.5)
        drafter: Any = SimpleNamespace(link=self.link, is_fresh=is_fresh, is_head=is_head, section=section)
        quiet: Any = SimpleNamespace(check=lambda: None)
        engine: Any = self.engine
        link: Any = self.link
        self.sessions = TailSessions(link, max_running, record, watcher)
        self.inner = WatchedRollouts(engine, record, self.sessions, quiet)
        self.rollouts = AdaptiveRollouts(self.inner, engine, drafter, self.sessions)

    def write(self, event: Any) -> None:
        self.events.append((event, len(self.shown)))

    def ignore(self, *args: Any, **fields: Any) -> None:
        pass

    def step(self, number: int | None) -> None:
        params: Any = None
        self.rollouts.push_weights([("w", 3)], None)
        self.rollouts.run(REQUESTS, params, number)
        self.rollouts.settle()

    def of(self, kind: type) -> list[Any]:
        return [event for event, _ in self.events if isinstance(event, kind)]


def test_a_session_is_a_rollouts_tail() -> None:
    run = Run(max_running=2)
    assert run.link.calls == ["stop"], (
        "what loads while the engine starts is stopped before the first rollout"
    )
    run.step(1)
    assert run.link.calls == ["stop", "resume", "pause"]
    [session] = run.of(DrafterSession)
    assert session.step == 1
    assert session.t_end_s > session.t_start_s
    assert session.core_s == 0.25
    assert len(run.shown) == len(REQUESTS)


def test_a_trainer_that_has_ended_has_no_sessions() -> None:
    run = Run(max_running=2)
    run.link.core_s = None
    run.step(1)
    assert run.link.calls == ["stop", "resume", "pause"]
    assert not run.of(DrafterSession)


def test_evaluations_have_no_sessions() -> None:
    run = Run(max_running=99)
    run.step(None)
    assert run.link.calls == ["stop"]
    assert not run.events


def test_an_interrupted_rollout_ends_its_session() -> None:
    run = Run(max_running=99)
    calls = iter([None, None])
    run.inner.interruption = SimpleNamespace(check=lambda: next(calls))  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        run.step(1)
    assert run.link.calls == ["stop", "resume", "pause"]
    assert run.of(DrafterSession)


def test_lessons_are_the_step_before_with_the_newest_policy() -> None:
    run = Run()
    run.step(1)
    run.rollouts.push_weights([("w", 3)], None)
    [lesson] = [call for call in run.link.calls if isinstance(call, tuple)]
    assert lesson == (1, {"w": 3}, [((1, 2, 7, 8), 2)] * len(REQUESTS))
    run.rollouts.push_weights([("w", 3)], None)
    assert [call for call in run.link.calls if isinstance(call, tuple)] == [lesson], "and told once"


@pytest.mark.parametrize(
    ("least", "share"), [(1, 0.5), (len(REQUESTS) - 1, 1 - 1 / len(REQUESTS)), (32, 1.0)]
)
def test_a_head_learns_from_the_engines_states(
    least: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_rollouts, "LEAST_RESPONSES", least)
    run = Run(is_head=True)
    shares = []
    run.sessions._watcher = SimpleNamespace(show_rollout=lambda _: shares.append(run.engine.share))  # type: ignore[assignment]
    run.step(1)
    assert set(shares) == {share}
    assert run.engine.share == 0, "evaluations keep none"
    run.rollouts.push_weights([("w", 3)], None)
    [lesson] = [call for call in run.link.calls if isinstance(call, tuple)]
    assert lesson == (1, {"w": 3}, [((1, 2, 7), 2)])
    [told] = run.of(DrafterStep)
    assert (told.collected_tokens, told.collection_s) == (3, 0.25)
    run.rollouts._growth = Growth(0.8, PATIENCE)
    run.step(2)
    assert run.engine.share == 0
    assert set(shares[-len(REQUESTS) :]) == {0}, "nor does a rollout from which nothing is learned"


def test_states_are_gathered_while_the_learner_works(monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_asked = Run(is_head=True), threading.Event()
    take = run.engine.take_samples
    monkeypatch.setattr(run.engine, "take_samples", lambda: is_asked.wait(10) and take())
    params: Any = None
    run.rollouts.run(REQUESTS, params, 1)
    assert not run.of(DrafterStep)
    is_asked.set()
    run.rollouts.push_weights([("w", 3)], None)
    assert run.of(DrafterStep)[0].collected_tokens == 3
    assert (1, {"w": 3}, [((1, 2, 7), 2)]) in run.link.calls


def test_a_run_that_fails_waits_for_what_is_being_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are closed next."""
    run, is_asked, is_done = Run(is_head=True), threading.Event(), threading.Event()
    monkeypatch.setattr(run.engine, "take_samples", lambda: is_asked.wait(10) and [])
    monkeypatch.setattr(run.engine, "collection_s", lambda: is_done.set() or 0.0)
    params: Any = None
    run.rollouts.run(REQUESTS, params, 1)
    threading.Timer(0.05, is_asked.set).start()
    run.rollouts.close()
    assert is_done.is_set()


def test_the_engine_gets_what_its_trainer_vouches_for() -> None:
    run = Run()
    assert run.engine.is_dropped, "nobody has trained it"
    run.link.saved = [0.2, 0.4]
    for step in (1, 2, 3):
        run.step(step)
    first, second, third = run.of(DrafterStep)
    assert (first.version, first.acceptance, first.agreement) == (0, None, 0.2)
    assert (second.version, second.acceptance, second.agreement) == (1, 0.5, 0.4)
    assert (third.version, third.trained_tokens, third.first_agreement) == (1, 900, 0.1)


def test_a_drafter_that_grew_wrong_is_not_used() -> None:
    run = Run()
    run.link.saved = [float("nan")]
    run.step(1)
    assert run.engine.is_dropped


@pytest.mark.parametrize(("agreement", "version"), [(0.4, 0), (0.69, 0), (0.696, 1), (0.8, 1)])
def test_a_drafter_that_has_got_worse_is_not_used(agreement: float, version: int) -> None:
    run = Run(is_fresh=False)
    run.link.present, run.link.saved = 0.7, [agreement]
    run.step(1)
    assert run.engine.drafter_version == version
    assert ("use" in run.link.calls) == (version == 1)


def test_a_dead_drafter_has_nothing_to_be_better_than() -> None:
    run = Run(is_fresh=False)
    run.link.present, run.engine.alarms = 0.7, 1
    run.step(1)
    run.link.saved = [0.4]
    run.step(2)
    assert run.engine.drafter_version == 1


def test_a_resumed_run_goes_on_with_the_drafter_that_it_used() -> None:
    run = Run(before=({}, None))
    assert not run.engine.is_dropped
    assert run.engine.drafter_version == 1
    run.link.present, run.link.saved = 0.7, [0.4]
    run.step(1)
    assert run.engine.drafter_version == 1


def test_a_drafter_that_was_given_is_used_from_the_start() -> None:
    run = Run(is_fresh=False)
    run.step(1)
    assert run.of(DrafterStep)[0].acceptance == 0.5


def test_training_rests_where_it_brings_nothing_and_goes_on_after_a_fall() -> None:
    run = Run()
    run.link.saved = [0.9] * (PATIENCE + 1)
    for step in range(1, PATIENCE + 2):
        run.step(step)
    assert not run.rollouts._growth.pays
    told = len(run.link.calls)
    run.step(9)
    assert len(run.link.calls) == told
    run.rollouts._growth = Growth(0.8, PATIENCE)  # as if it had been better
    run.step(10)
    run.step(11)
    assert run.link.calls[told:][0][0] == 10


def test_training_rests_where_it_makes_worse_drafters_alone() -> None:
    run = Run(is_fresh=False)
    run.link.present, run.link.saved = 0.7, [0.4] * (PATIENCE + 1)
    for step in range(1, PATIENCE + 2):
        run.step(step)
    assert run.engine.drafter_version == 0
    assert not run.rollouts._growth.pays


def test_an_alarm_is_noted() -> None:
    run = Run(is_fresh=False)
    run.engine.alarms = 1
    run.step(1)
    run.step(2)
    [note] = run.of(Note)
    assert "accepts nothing" in note.text

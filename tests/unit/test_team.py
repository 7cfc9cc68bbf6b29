"""Trainers that come and go: their gradients are averaged by tokens, and nobody waits for one that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from test_spot_trainer import settings as spot_settings
from test_spot_trainer import tell

from paceline.distillation import spot_link, team
from paceline.distillation.spot import SpotSettings
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.team import Changed, Round, Session, Team, read_json, write_json
from paceline.distillation.training_folder import find_newest, read_folder
from paceline.drafting.child_process import ChildProcess
from paceline.errors import EngineError

settings = spot_settings


def call(folder: Path, number: int, *members: int) -> None:
    write_json(folder / team.SESSION, Session(number, members))


def until(done: Callable[[], bool], longest_s: float = 60.0) -> None:
    for _ in range(int(longest_s / 0.01)):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")


class Member:
    """A trainer's place and what it is told."""

    def __init__(self, folder: Path, index: int) -> None:
        self.team = Team(folder, index)
        self.states: list[bytes] = []
        self.num_led = 0
        self.parameters = [torch.zeros(2, 3), torch.zeros(4)]

    def join(self) -> bool:
        return self.team.join(lambda: b"the leader's state", self.states.append, self.lead)

    def lead(self) -> None:
        self.num_led += 1

    def average(self, value: float, num_tokens: int, seconds: float = 0.0) -> tuple[int, float]:
        for at, parameter in enumerate(self.parameters):
            parameter.grad = torch.full_like(parameter, value + at) if num_tokens else None
        return self.team.average(self.parameters, num_tokens, num_tokens, seconds)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def join_all(members: list[Member], size: int) -> None:
    """Each in a thread of its own, as each has a process of its own, until all are in a round of this size."""

    def enter(member: Member) -> None:
        until(lambda: member.join() and member.team.size == size)

    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(enter, members))


def test_a_trainer_without_a_session_is_alone(tmp_path: Path) -> None:
    member = Member(tmp_path, 0)
    assert member.join()
    assert member.team.leads
    assert member.average(3.0, 7, 0.5) == (7, 0.5)
    assert member.gradients()[0].eq(3.0).all()


def test_gradients_are_averaged_by_tokens(tmp_path: Path) -> None:
    call(tmp_path, 1, 1, 0, 2)
    members = [Member(tmp_path, index) for index in range(3)]
    join_all(members, 3)
    assert [member.team.leads for member in members] == [False, True, False]
    assert [member.states[-1:] for member in members] == [
        [b"the leader's state"],
        [],
        [b"the leader's state"],
    ]
    assert members[1].num_led == 1
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(Member.average, members, (1.0, 4.0, 0.0), (10, 30, 0), (0.25, 0.5, 0.125)))
    assert found == [(40, 0.875)] * 3
    for member in members:
        first, second = member.gradients()
        assert first.shape == (2, 3)
        assert torch.allclose(first, torch.full((2, 3), (10 * 1.0 + 30 * 4.0) / 40))
        assert torch.allclose(second, torch.full((4,), (10 * 2.0 + 30 * 5.0) / 40))


def test_a_gradient_counts_by_the_tokens_that_it_is_the_mean_of(tmp_path: Path) -> None:
    """Not by those of the prompts too."""
    call(tmp_path, 1, 0, 1)
    members = [Member(tmp_path, index) for index in range(2)]
    join_all(members, 2)

    def average(member: Member, value: float, num_decided: int, num_tokens: int) -> tuple[int, float]:
        for parameter in member.parameters:
            parameter.grad = torch.full_like(parameter, value)
        return member.team.average(member.parameters, num_decided, num_tokens, 0.5)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(average, members, (1.0, 4.0), (10, 30), (900, 100)))
    assert found == [(1000, 1.0)] * 2
    for member in members:
        for gradient in member.gradients():
            assert torch.allclose(gradient, torch.full_like(gradient, (10 * 1.0 + 30 * 4.0) / 40))


def test_who_is_stopped_inside_a_step_holds_nobody_up(tmp_path: Path) -> None:
    call(tmp_path, 1, 0, 1)
    first, second = members = [Member(tmp_path, index) for index in range(2)]
    join_all(members, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.average, 1.0, 10)  # the other one never comes
        time.sleep(0.1)
        assert not waiting.done()
        call(tmp_path, 2, 0)
        with pytest.raises(Changed):
            waiting.result(timeout=5.0)
    assert first.join()
    assert first.average(1.0, 10) == (10, 0.0)
    assert not second.join()
    call(tmp_path, 3, 0, 1)
    join_all(members, 2)
    assert second.states == [b"the leader's state"] * 2, "it has missed a step"


def test_a_newcomer_is_taken_in_between_two_steps(tmp_path: Path) -> None:
    call(tmp_path, 1, 0, 1)
    first, second = members = [Member(tmp_path, index) for index in range(2)]
    assert first.join()
    assert first.team.size == 1
    assert first.average(2.0, 5) == (5, 0.0)
    join_all(members, 2)
    assert second.states == [b"the leader's state"]


def test_a_leader_to_whom_nobody_comes_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "MEETING_S", 0.2)
    call(tmp_path, 1, 0, 1)
    write_json(tmp_path / team.PRESENT.format(1), team.Present(1, os.getpid()))
    leader = Member(tmp_path, 0)
    assert not leader.join()
    for _ in range(3):
        assert leader.join()
        assert leader.average(1.0, 4) == (4, 0.0)


def test_the_dead_are_not_called(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as done:
        done.wait()
        write_json(tmp_path / team.PRESENT.format(1), team.Present(1, done.pid))
    call(tmp_path, 1, 0, 1)
    leader = Member(tmp_path, 0)
    assert leader.join()
    assert leader.team.size == 1


def test_the_next_one_leads_when_the_leader_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as done:
        done.wait()
        write_json(tmp_path / team.PRESENT.format(0), team.Present(1, done.pid))
    call(tmp_path, 1, 0, 1, 2)
    members = [Member(tmp_path, 1), Member(tmp_path, 2)]
    join_all(members, 2)
    assert [member.team.leads for member in members] == [True, False]
    assert members[1].states == [b"the leader's state"]


@pytest.fixture
def link(settings: SpotSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpotLink]:
    """Of two processes that compute something else."""
    busy = ("timeit", ("-n", "1000000000", "pass"))
    monkeypatch.setattr(spot_link, "ChildProcess", lambda what, *_: ChildProcess(what, *busy))
    made = SpotLink(settings, 2)
    made.stop()
    yield made
    made.close()


def test_the_leader_comes_first_in_a_session(link: SpotLink, settings: SpotSettings) -> None:
    def told() -> Session | None:
        return read_json(Path(settings.folder) / team.SESSION, Session)

    link.resume("w5", "w5")
    assert told() == Session(1, (0,))
    link.resume("w2", "w5")
    assert told() == Session(2, (0, 1))
    link.pause("w5", "w2")
    assert told() == Session(3, (1,))
    link.resume("w7", "w2")
    assert told() == Session(4, (1, 0))
    link.pause("w2", None)
    link.pause("w7", None)
    assert told() == Session(6, ())


def test_one_trainer_more_than_there_are_is_refused(link: SpotLink) -> None:
    link.resume("w0", "w0")
    link.resume("w1", "w0")
    with pytest.raises(EngineError, match="all 2 trainers are at work: w2"):
        link.resume("w2", "w0")


def test_a_session_that_cannot_be_written_ends_no_rollout(
    link: SpotLink, settings: SpotSettings, caplog: pytest.LogCaptureFixture
) -> None:
    (Path(settings.folder) / team.SESSION).unlink()
    (Path(settings.folder) / team.SESSION).mkdir()
    link.resume("w0", "w0")
    assert link.pause("w0", None) is not None
    assert "cannot tell the drafter's trainers who they are" in caplog.text


def trained(settings: SpotSettings) -> int:
    folder = Path(settings.folder)
    found = read_folder(folder, find_newest(folder))
    return 0 if found is None else found[1].trained_tokens


def members_of(settings: SpotSettings) -> tuple[int, ...]:
    found = read_json(Path(settings.folder) / team.ROUND, Round)
    return () if found is None else found.members


@pytest.mark.slow
def test_four_trainers_come_and_go_and_none_is_waited_for(settings: SpotSettings) -> None:
    tell(settings, step=1)
    link = SpotLink(settings, 4)
    try:
        link.stop()
        for name in ("a", "b", "c", "d"):
            link.resume(name, "a")
        until(lambda: set(members_of(settings)) == {0, 1, 2, 3}, 120.0)
        goes_on(settings)

        for name, leader, left in (
            ("c", "a", {0, 1, 3}),
            ("a", "b", {1, 3}),
        ):  # one of them, then their leader
            began_s = time.monotonic()
            core_s = link.pause(name, leader)
            assert time.monotonic() - began_s < 0.2
            assert core_s is not None
            assert core_s > 0.0
            until(lambda left=left: set(members_of(settings)) == left)  # type: ignore[misc]
            goes_on(settings)
        assert members_of(settings)[0] == 1, "another one leads"

        link.resume("c", "b")  # takes the first free one: that of the old leader
        until(lambda: set(members_of(settings)) == {0, 1, 3})
        goes_on(settings)

        os.kill(link.pids[3], signal.SIGKILL)
        until(lambda: set(members_of(settings)) == {0, 1})
        goes_on(settings)
        dead = link.pids[3]
        assert link.pause("d", "b") is None, "it has died"
        link.resume("d", "b")  # takes trainer 2, which has missed much
        until(lambda: set(members_of(settings)) == {0, 1, 2})
        while link.pids[3] == dead:
            link.pause("e", "b")
            link.resume("e", "b")  # a zombie whose threads have not all ended cannot be waited for yet
            time.sleep(0.01)
        until(lambda: set(members_of(settings)) == {0, 1, 2, 3}, 120.0)
        goes_on(settings)

        assert [link.pause(name, None) is not None for name in ("b", "c", "d", "e")] == [True] * 4
        made = link.take()
        assert made is not None
        assert made[1].trained_tokens == trained(settings)
        assert link.take() is None
    finally:
        link.close()


def goes_on(settings: SpotSettings) -> None:
    """What is saved has learned from more tokens."""
    before = trained(settings)
    until(lambda: trained(settings) > before, 120.0)

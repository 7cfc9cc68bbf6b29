"""The engine's end of a draft worker, with a socket in place of the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from paceline.config import EngineSettings
from paceline.drafting import worker_link
from paceline.drafting.tree import DraftTrees
from paceline.drafting.wire import Seal
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import (
    Begin,
    DraftCounts,
    Drafts,
    Open,
    Step,
    WorkerSettings,
    decode_for_worker,
    encode,
    hello,
)
from paceline.errors import ConfigError
from paceline.owned_folder import OwnedFolder

SETTINGS = WorkerSettings("", 0, "model", "auto", 100, 4, 50, 0.05, None)


class NoProcess:
    """Stands in for the child process; `check` starts one that was killed."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.pid, self.is_dead = arguments, 1, False
        self.used_s = 0.0

    def core_s(self) -> float:
        return self.used_s

    def kill(self) -> None:
        self.is_dead = True

    def check(self) -> None:
        self.pid, self.is_dead = self.pid + self.is_dead, False

    @property
    def has_ended(self) -> bool:
        return self.is_dead

    def close(self) -> None:
        self.is_dead = True


@pytest.fixture
def trees() -> DraftTrees:
    return DraftTrees()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, trees: DraftTrees) -> Iterator[WorkerLink]:
    monkeypatch.setattr(worker_link, "ChildProcess", NoProcess)
    monkeypatch.setattr(worker_link, "LOOK_S", 0.0)
    made = WorkerLink(SETTINGS, 6, trees)
    yield made
    made.shut_down()


def test_an_engine_that_starts_waits_for_its_worker(link: WorkerLink) -> None:
    worker = Worker(link)
    began_s = time.monotonic()
    link.await_worker(began_s + 0.2)
    assert time.monotonic() - began_s >= 0.2, "nobody comes"
    assert not link.is_there
    later = threading.Timer(0.1, lambda: worker.steps.send(worker.seal.close(hello(worker.address))))
    later.start()
    link.await_worker(time.monotonic() + 60.0)
    later.join()
    assert link.is_there
    link.await_worker(time.monotonic() + 60.0)


def test_a_worker_that_has_ended_for_good_is_not_there(
    link: WorkerLink, trees: DraftTrees, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It died each time that it drafted, and is not started again."""
    Worker(link).greet(link)
    open_response(link, trees, 7, [1, 2])
    grow(link, trees, {7: [3]})
    link.take()
    assert link.is_there
    assert link.child is not None
    monkeypatch.setattr(link.child, "check", lambda: None)
    monkeypatch.setattr(worker_link, "SILENCE_S", 0.0)
    link.child.kill()
    link.take()
    assert not link.is_there
    link.take()
    assert not caplog.records, "nobody starts it again"


def test_nobody_waits_for_a_worker_that_has_ended(link: WorkerLink) -> None:
    assert link.child is not None
    link.child.kill()
    link.await_worker(time.monotonic() + 60.0)
    assert not link.is_there


class Worker:
    """A worker's sockets."""

    def __init__(self, link: WorkerLink, secret: bytes | None = None) -> None:
        self.seal, self.address = Seal(secret), link.settings.address
        self.steps = self.connect(zmq.DEALER, link.settings.address)

    def connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = zmq.Context.instance().socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.CONFLATE, kind == zmq.PUSH)
        made.connect(address)
        return made

    def greet(self, link: WorkerLink) -> Begin:
        self.steps.send(self.seal.close(hello(self.address)))
        deadline_s = time.monotonic() + 5.0
        while not self.steps.poll(5) and time.monotonic() < deadline_s:
            assert link.take() is None
        begin = self.read()
        assert isinstance(begin, Begin)
        self.begun, self.drafts = begin.begun, self.connect(zmq.PUSH, begin.drafts_to)
        return begin

    def read(self) -> Any:
        packed = self.seal.open(self.steps.recv())
        assert packed is not None
        return decode_for_worker(packed)

    def say(self, **changes: Any) -> None:
        self.drafts.send(self.seal.close(encode(drafts(self.begun, **changes))))

    def hear(self, count: int) -> list[Any]:
        heard = []
        for _ in range(count):
            assert self.steps.poll(5000)
            heard.append(self.read())
        assert not self.steps.poll(20)
        return heard


def drafts(begun: int, trees: bytes = b"", num_drafted: int = 0, num_wasted: int = 0) -> Drafts:
    return Drafts(
        begun=begun,
        number=0,
        trees=trees,
        level_s=0.0005,
        num_levels=2,
        mean_acceptance=0.6,
        counts=DraftCounts(num_drafted, num_wasted, num_branches=2, num_hits=1),
    )


def open_response(link: WorkerLink, trees: DraftTrees, response: int, text: list[int]) -> None:
    trees.open(response, np.array(text, np.int32))
    link.open(response, 11, 0.5, 40)


def grow(link: WorkerLink, trees: DraftTrees, growth: dict[int, list[int]]) -> None:
    lists = list(growth.values())
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    flat = np.array([token for tokens in lists for token in tokens], np.int32)
    names = np.array(list(growth), np.int64)
    trees.advance(names, offsets, flat)
    link.grow(names, offsets, flat, 0.25)


def numbers(data: bytes, kind: type = np.int32) -> list[int]:
    return np.frombuffer(data, kind).tolist()


def test_a_worker_is_told_what_runs_grows_and_ends(link: WorkerLink, trees: DraftTrees) -> None:
    open_response(link, trees, 7, [1, 2])
    open_response(link, trees, 5, [1, 2])  # waits
    grow(link, trees, {7: [3, 4], 8: [9]})  # before there is anyone; 8 was never opened
    worker = Worker(link)
    begin = worker.greet(link)
    assert begin.number == 0
    assert begin.opened == (Open(7, 11, 0.5, 40, 6, np.array([1, 2, 3, 4], np.int32).tobytes()),)
    open_response(link, trees, 9, [6])
    grow(link, trees, {7: [5], 9: [6, 6]})
    for response in (7, 5, 8):
        link.close(response)
    grow(link, trees, {9: [7]})
    link.forget()
    first, second, last = worker.hear(3)
    assert all(isinstance(step, Step) for step in (first, second, last))
    assert [step.number for step in (first, second, last)] == [1, 2, 3]
    assert numbers(first.responses, np.int64) == [7, 9]
    assert first.step_s == 0.25
    assert (numbers(first.offsets), numbers(first.tokens)) == ([0, 1, 3], [5, 6, 6])
    [opened] = first.opened
    assert (opened.response, numbers(opened.tokens)) == (9, [6, 6, 6])
    assert numbers(second.ended, np.int64) == [7]
    assert numbers(last.ended, np.int64) == [9]
    assert not last.responses


def test_the_last_of_what_it_drafts_is_taken_without_waiting(link: WorkerLink) -> None:
    worker = Worker(link)
    worker.greet(link)
    assert link.take() is None
    for text in (b"1", b"2", b"3"):
        worker.say(trees=text)
    time.sleep(0.05)
    arrived = link.take()
    assert arrived is not None
    assert arrived.trees == b"3"
    assert link.take() is None
    worker.say(trees=b"4")
    arrived = link.take(5.0)
    assert arrived is not None
    assert arrived.trees == b"4"


def test_a_wait_below_a_millisecond_lasts_as_long_as_it_says(link: WorkerLink) -> None:
    worker = Worker(link)
    worker.greet(link)
    lasted_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        assert link.take(3e-4) is None
        lasted_s.append(time.perf_counter() - began_s)
    assert min(lasted_s) >= 3e-4
    assert min(lasted_s) < 8e-4
    worker.say(trees=b"1")
    time.sleep(0.05)
    assert link.take(3e-4) is not None


def test_a_new_worker_is_told_everything_and_its_counts_go_on(link: WorkerLink, trees: DraftTrees) -> None:
    open_response(link, trees, 7, [1, 2])
    grow(link, trees, {7: [3]})
    first, second = Worker(link), Worker(link)
    first.greet(link)
    first.say(num_drafted=10, num_wasted=4)
    assert link.take(5.0) is not None
    assert len(second.greet(link).opened) == 1
    first.say(num_drafted=99)  # of one that is gone
    time.sleep(0.05)
    assert link.take() is None
    second.say(num_drafted=3, num_wasted=1)
    assert link.take(5.0) is not None
    assert link.counts == DraftCounts(13, 5, 4, 2)


def test_a_new_worker_hears_how_far_it_may_draft_ahead(link: WorkerLink, trees: DraftTrees) -> None:
    for response in (7, 8):
        open_response(link, trees, response, [1, 2])
    grow(link, trees, {7: [3], 8: [3]})
    link.allow([8, 9], [2, 5])
    worker = Worker(link)
    assert {one.response: one.most_ahead for one in worker.greet(link).opened} == {7: 6, 8: 2}
    link.allow([7], [1])
    grow(link, trees, {7: [3]})
    [step] = worker.hear(1)
    assert (numbers(step.allowed, np.int64), numbers(step.most_ahead)) == ([7], [1])
    grow(link, trees, {7: [3]})
    assert not worker.hear(1)[0].allowed


def test_a_silent_worker_is_replaced_while_responses_run(
    link: WorkerLink, trees: DraftTrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(link)
    worker.greet(link)
    monkeypatch.setattr(worker_link, "SILENCE_S", 0.05)
    time.sleep(0.1)
    link.take()
    assert link.child.pid == 1, "nothing runs, so it has nothing to say"
    open_response(link, trees, 7, [1, 2])
    link.take()
    assert link.child.pid == 1
    time.sleep(0.1)
    worker.say()
    time.sleep(0.05)
    link.take()
    assert link.child.pid == 1, "it has said something, if late"
    time.sleep(0.1)
    link.take()
    assert link.child.pid == 2
    link.take()
    assert link.child.pid == 2, "the new one has time to start"


def test_a_silent_worker_that_reads_is_left_alone(
    link: WorkerLink, trees: DraftTrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long contexts take a small core longer than the patience; killed, it would begin to read anew."""
    now_s = time.monotonic()
    monkeypatch.setattr(worker_link, "time", SimpleNamespace(monotonic=lambda: now_s))
    Worker(link).greet(link)
    open_response(link, trees, 7, [1, 2])
    pids = []
    for worked_s in (15.0, 15.0, 1.0):
        now_s += 1.1 * worker_link.SILENCE_S
        link.child.used_s += worked_s
        link.take()
        pids.append(link.child.pid)
    assert pids == [1, 1, 2]


def test_silence_counts_over_short_rollouts_and_not_between_them(
    link: WorkerLink, trees: DraftTrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts shorter than the patience would never replace a hung worker if each began to count anew."""
    now_s = time.monotonic()
    monkeypatch.setattr(worker_link, "time", SimpleNamespace(monotonic=lambda: now_s))
    Worker(link).greet(link)
    pids = []
    for response in range(6):
        open_response(link, trees, response, [1, 2])
        link.take()
        now_s += 0.3 * worker_link.SILENCE_S
        link.take()
        pids.append(link.child.pid)
        trees.close(response)
        link.close(response)
        now_s += 10 * worker_link.SILENCE_S
        link.close(response)  # nothing by that name runs any more
    assert pids == [1, 1, 1, 2, 2, 2]


def test_a_silent_helper_is_counted_on_again_when_it_speaks(
    monkeypatch: pytest.MonkeyPatch, trees: DraftTrees
) -> None:
    monkeypatch.setattr(worker_link, "LOOK_S", 0.0)
    monkeypatch.setattr(worker_link, "HELPER_SILENCE_S", 0.05)
    link = WorkerLink(SETTINGS, 6, trees, has_child=False)
    try:
        worker = Worker(link)
        worker.greet(link)
        assert not link.is_there, "it reads"
        worker.say()
        assert link.take(5.0) is not None
        assert link.is_there
        open_response(link, trees, 7, [1, 2])
        time.sleep(0.1)
        assert link.take() is None
        assert not link.is_there
        worker.say(trees=b"1")
        assert link.take(5.0) is not None
        assert link.is_there
        link.let_go()
        worker.say(trees=b"2")
        assert link.take(0.1) is None
        assert not link.is_there
    finally:
        link.shut_down()


def test_without_a_place_for_a_socket_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "make_socket_folder", lambda _: None)
    with pytest.raises(ConfigError, match="TMPDIR"):
        WorkerLink(SETTINGS, 6, DraftTrees())


def test_over_a_network_only_who_has_the_secret_is_told_and_heard(
    monkeypatch: pytest.MonkeyPatch, trees: DraftTrees, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_link, "LOOK_S", 0.0)
    secret, file = b"sixteen bytes or", tmp_path / "secret"
    file.write_bytes(secret)
    link = WorkerLink(replace(SETTINGS, interface="lo", secret_file=str(file)), 6, trees, has_child=False)
    try:
        assert link.settings.address.startswith("tcp://127.0.0.1:")
        open_response(link, trees, 7, [1, 2])
        grow(link, trees, {7: [3]})
        address = link.settings.address
        for guess, said in (
            (None, hello(address)),
            (b"another secret of", hello(address)),
            (secret, hello("tcp://127.0.0.1:5757")),  # one that was said to another engine
            (secret, hello(address) * 10),
        ):
            stranger = Worker(link, guess)
            stranger.steps.send(stranger.seal.close(said))
            until_s = time.monotonic() + 0.2
            while time.monotonic() < until_s:
                link.take()
            assert not stranger.steps.poll(0)
            assert not link.is_there
        worker = Worker(link, secret)
        begin = worker.greet(link)
        assert begin.drafts_to.startswith("tcp://127.0.0.1:")
        assert [numbers(opened.tokens) for opened in begin.opened] == [[1, 2, 3]]
        right, worker.seal = worker.seal, Seal(None)
        worker.say(num_drafted=1)
        assert link.take(0.2) is None
        worker.seal = right
        worker.say(num_drafted=2)
        heard = link.take(5.0)
        assert heard is not None
        assert heard.counts.num_drafted == 2
        grow(link, trees, {7: [4]})
        assert numbers(worker.hear(1)[0].tokens) == [4]
    finally:
        link.shut_down()


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="draft_interface 'nowhere0'"):
        WorkerLink(replace(SETTINGS, interface="nowhere0"), 6, DraftTrees(), has_child=False)
    with pytest.raises(ValueError, match=r"'0\.0\.0\.0' is no address that others can reach"):
        EngineSettings(model_drafter="m", draft_interface="0.0.0.0", draft_secret_file="secret")
    with pytest.raises(ValueError, match="give a draft_secret_file"):
        EngineSettings(model_drafter="m", draft_interface="eth0")


def test_a_link_that_cannot_be_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[OwnedFolder] = []

    def make(name: str) -> OwnedFolder:
        made.append(OwnedFolder(tmp_path, f"{name}-"))
        return made[-1]

    monkeypatch.setattr(worker_link, "make_socket_folder", make)
    for broken in (
        replace(SETTINGS, interface="nowhere0"),
        replace(SETTINGS, secret_file=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError):
            WorkerLink(broken, 6, DraftTrees(), has_child=False)
    assert len(made) == 1
    assert not made[0].path.exists()


def test_responses_that_begin_later_have_the_window_of_then(link: WorkerLink, trees: DraftTrees) -> None:
    worker = Worker(link)
    worker.greet(link)
    for response in (7, 8):
        open_response(link, trees, response, [1, 2])
    grow(link, trees, {7: [3]})
    link.begin_with(9)
    assert link.most_ahead([7, 8]).tolist() == [6, 9]
    grow(link, trees, {7: [4], 8: [3]})
    assert [[one.most_ahead for one in step.opened] for step in worker.hear(2)] == [[6], [9]]


def test_a_worker_that_rests_drafts_for_nobody_until_all_is_forgotten(
    link: WorkerLink, trees: DraftTrees
) -> None:
    worker = Worker(link)
    worker.greet(link)
    open_response(link, trees, 7, [1, 2])
    grow(link, trees, {7: [3]})
    link.rest()
    open_response(link, trees, 8, [1, 2])
    grow(link, trees, {7: [4], 8: [3]})
    begun, later = worker.hear(2)
    assert [opened.most_ahead for opened in begun.opened] == [6]
    assert [opened.most_ahead for opened in later.opened] == [0]
    assert numbers(later.allowed, np.int64) == [7]
    assert numbers(later.most_ahead) == [0]
    link.forget()
    open_response(link, trees, 9, [1, 2])
    grow(link, trees, {9: [3]})
    assert [opened.most_ahead for opened in worker.hear(2)[-1].opened] == [6]

"""The engine's end of a draft worker, with a socket in place of the process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from paceline.drafting import worker_link
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import (
    Allow,
    Begin,
    Close,
    Drafts,
    Grow,
    Hello,
    Open,
    WorkerSettings,
    decode_for_worker,
    encode,
)
from paceline.errors import ConfigError

SETTINGS = WorkerSettings("", 0, "model", "auto", 100, 4, 50, 0.05, None)


class NoProcess:
    """Stands in for the child process; `check` starts one that was killed."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.pid, self.is_dead = arguments, 1, False

    def kill(self) -> None:
        self.is_dead = True

    def check(self) -> None:
        self.pid, self.is_dead = self.pid + self.is_dead, False

    def close(self) -> None:
        self.is_dead = True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLink]:
    monkeypatch.setattr(worker_link, "ChildProcess", NoProcess)
    made = WorkerLink(SETTINGS, window=3)
    yield made
    made.shut_down()


class Worker:
    """A worker's socket."""

    def __init__(self, link: WorkerLink) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{link._folder / 'worker'}")

    def say(self, message: Hello | Drafts) -> None:
        self.socket.send(encode(message))

    def hear(self, count: int) -> list[Any]:
        heard = []
        for _ in range(count):
            assert self.socket.poll(5000)
            heard.append(decode_for_worker(self.socket.recv()))
        assert not self.socket.poll(20)
        return heard


def drafts(tokens: list[int], num_drafted: int = 0, num_wasted: int = 0) -> Drafts:
    row = np.array([tokens], np.int32)
    return Drafts(
        number=0,
        width=len(tokens),
        responses=np.array([7] if tokens else [], np.int64).tobytes(),
        starts=np.array([5] if tokens else [], np.int64).tobytes(),
        counts=np.array([len(tokens)] if tokens else [], np.int32).tobytes(),
        tokens=row.tobytes(),
        acceptance=np.full(row.shape, 0.5, np.float32).tobytes(),
        call_s=0.001,
        num_levels=2,
        mean_acceptance=0.6,
        num_drafted=num_drafted,
        num_wasted=num_wasted,
    )


def greet(link: WorkerLink) -> Worker:
    worker = Worker(link)
    worker.say(Hello())
    assert link.take(5.0) == []
    return worker


def grow(link: WorkerLink, growth: dict[int, list[int]]) -> None:
    lists = list(growth.values())
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    flat = np.array([token for tokens in lists for token in tokens], np.int32)
    link.grow(np.array(list(growth), np.int64), offsets, flat)


def tokens_of(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def test_a_worker_is_told_what_runs_grows_and_ends(link: WorkerLink) -> None:
    link.open(7, 11, 0.5, 40, [1, 2])
    link.open(5, 11, 0.5, 40, [1, 2])  # waits
    grow(link, {7: [3, 4], 8: [9]})  # before there is anyone; 8 was never opened
    worker = greet(link)
    begin, opened = worker.hear(2)
    assert begin == Begin(3, 1)
    assert (opened.response, opened.key, opened.temperature, opened.limit) == (7, 11, 0.5, 40)
    assert tokens_of(opened.tokens) == [1, 2, 3, 4]
    link.open(9, 12, 1.0, 40, [6])
    grow(link, {7: [5], 9: [6]})
    for response in (7, 5, 8):
        link.close(response)
    other, grown, closed = worker.hear(3)
    assert isinstance(grown, Grow)
    assert tokens_of(other.tokens) == [6, 6]
    assert (grown.number, tokens_of(grown.tokens), tokens_of(grown.counts)) == (2, [5], [1])
    assert np.frombuffer(grown.starts, np.int64).tolist() == [4]
    assert isinstance(other, Open)
    assert closed == Close(7)
    link.forget()
    assert worker.hear(1) == [Close(9)]


def test_what_it_drafts_is_taken_without_waiting(link: WorkerLink) -> None:
    worker = greet(link)
    assert link.take() == []
    worker.say(drafts([8, 9]))
    worker.say(drafts([]))
    time.sleep(0.05)
    [arrived] = link.take()
    assert arrived.responses_array().tolist() == [7]
    assert arrived.starts_array().tolist() == [5]
    chains = arrived.chains()
    assert chains.tokens.tolist() == [[8, 9]]
    assert chains.num_tokens.tolist() == [2]
    assert chains.acceptance.tolist() == [[0.5, 0.5]]


def test_a_new_worker_is_told_everything_and_its_counts_go_on(link: WorkerLink) -> None:
    link.open(7, 11, 0.5, 40, [1, 2])
    grow(link, {7: [3]})
    first = greet(link)
    first.say(drafts([8], num_drafted=10, num_wasted=4))
    assert len(link.take(5.0)) == 1
    second = greet(link)
    assert [type(message) for message in second.hear(2)] == [Begin, Open]
    first.say(drafts([8], num_drafted=99))  # of one that is gone
    second.say(drafts([8], num_drafted=3, num_wasted=1))
    time.sleep(0.05)
    assert len(link.take()) == 1
    assert (link.num_drafted, link.num_wasted) == (13, 5)


def test_a_new_worker_hears_how_far_it_may_draft_ahead(link: WorkerLink) -> None:
    link.open(7, 11, 0.5, 40, [1, 2])
    link.open(8, 11, 0.5, 40, [1, 2])
    grow(link, {7: [3], 8: [3]})
    link.allow([8, 9], [2, 5])
    assert link.most_ahead([7, 8, 9]) == [6, 2, 6]
    worker = greet(link)
    allowed = worker.hear(4)[3]
    assert isinstance(allowed, Allow)
    assert np.frombuffer(allowed.responses, np.int64).tolist() == [8]
    assert tokens_of(allowed.most_ahead) == [2]
    link.allow([7], [1])
    assert tokens_of(worker.hear(1)[0].most_ahead) == [1]


def test_a_silent_worker_is_replaced_while_responses_run(
    link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = greet(link)
    monkeypatch.setattr(worker_link, "SILENCE_S", 0.05)
    time.sleep(0.1)
    link.take()
    assert link.child.pid == 1, "nothing runs, so it has nothing to say"
    link.open(7, 11, 0.5, 40, [1, 2])
    link.take()
    assert link.child.pid == 1
    time.sleep(0.1)
    worker.say(drafts([]))
    time.sleep(0.05)
    link.take()
    assert link.child.pid == 1, "it has said something, if late"
    time.sleep(0.1)
    link.take()
    assert link.child.pid == 2
    link.take()
    assert link.child.pid == 2, "the new one has time to start"


def test_without_a_place_for_a_socket_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "make_socket_folder", lambda _: None)
    with pytest.raises(ConfigError, match="TMPDIR"):
        WorkerLink(SETTINGS, 3)

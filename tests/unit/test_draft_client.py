"""Draft clients and a server in a process of its own: sharing, loss, a killed server, garbage, signatures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from paceline.config import EngineSettings
from paceline.drafting.client import DraftClient
from paceline.drafting.suffix import SuffixForest
from paceline.drafting.wire import MAX_TEXT_BYTES
from paceline.engine.fast_loop import FastLoop
from paceline.types import DraftQuery

PATIENCE_S = 20.0
GROUP, HERE, THERE = 7, 11, 12


class Server:
    """`paceline draft-server` in a process of its own, which can be killed and started again at its address."""

    def __init__(self, *options: str) -> None:
        self.options, self.address = options, "tcp://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli", "draft-server", self.address, *self.options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"tcp://\S+", self.process.stdout.readline())
        assert found is not None
        self.address = found.group()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.kill()


@pytest.fixture
def join(server: Server) -> Iterator[Callable[..., DraftClient]]:
    """Makes clients of the server, closed in the end."""
    made: list[DraftClient] = []

    def make(**options: object) -> DraftClient:
        made.append(DraftClient([server.address], **{"interval_ms": 2.0, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.close()


def completed_s(client: DraftClient, count: int, num_tokens: int) -> list[float]:
    """Seconds until each of `count` responses has been heard of with all its tokens, each once and in order."""
    began_s, found, done_s = time.monotonic(), dict.fromkeys(range(count), 0), {}
    while len(done_s) < count:
        now_s = time.monotonic() - began_s
        assert now_s < PATIENCE_S, f"{len(done_s)} of {count} responses are complete"
        for growth in client.take(1000):
            assert growth.start == found[growth.group] == growth.tokens[0]
            found[growth.group] += len(growth.tokens)
            if found[growth.group] == num_tokens:
                done_s[growth.group] = now_s
        time.sleep(0.002)
    return list(done_s.values())


def hear(client: DraftClient, wanted: dict[int, list[int]]) -> None:
    """Wait until the client has heard exactly these tokens, by key, each once and in order."""
    found: dict[int, list[int]] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while found != wanted:
        assert time.monotonic() < deadline_s, f"heard {found}, wanted {wanted}"
        for growth in client.take(1000):
            found.setdefault(growth.key, []).extend(growth.tokens.tolist())
        time.sleep(0.002)


def test_workers_hear_of_each_others_responses_and_not_of_their_own(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, HERE)
    other.watch(GROUP, THERE)
    for start in range(0, 30, 3):
        one.report(GROUP, HERE, start, range(start, start + 3))
        other.report(GROUP, THERE, start, range(100 + start, 103 + start))
        time.sleep(0.003)
    hear(one, {THERE: list(range(100, 130))})
    hear(other, {HERE: list(range(30))})


def test_other_groups_are_not_heard_of(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, HERE)
    one.watch(GROUP + 1, THERE)
    other.watch(GROUP, 99)
    one.report(GROUP + 1, THERE, 0, [1, 2, 3])
    one.report(GROUP, HERE, 0, [4])
    hear(other, {HERE: [4]})
    time.sleep(0.05)
    assert other.take(10) == []


def test_who_comes_late_hears_all(join: Callable[..., DraftClient]) -> None:
    one = join()
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, range(50))
    time.sleep(0.05)
    one.unwatch(GROUP)
    late = join()
    late.watch(GROUP, THERE)
    hear(late, {HERE: list(range(50))})


def test_what_was_reported_last_is_still_sent(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    other.watch(GROUP, THERE)
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, [1, 2, 3])
    one.unwatch(GROUP)
    hear(other, {HERE: [1, 2, 3]})


def test_a_killed_server_is_told_everything_again(server: Server, join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, HERE)
    other.watch(GROUP, THERE)
    one.report(GROUP, HERE, 0, range(10))
    hear(other, {HERE: list(range(10))})
    server.kill()
    one.report(GROUP, HERE, 10, range(10, 20))
    time.sleep(0.05)
    server.start()
    hear(other, {HERE: list(range(10, 20))})
    late = join()
    late.watch(GROUP, 99)
    hear(late, {HERE: list(range(20))})


def test_long_responses_come_in_parts(join: Callable[..., DraftClient]) -> None:
    count = MAX_TEXT_BYTES // 2  # twice what one message carries
    one, other = join(), join()
    one.watch(GROUP, HERE)
    other.watch(GROUP, THERE)
    one.report(GROUP, HERE, 0, range(count))
    hear(other, {HERE: list(range(count))})


def test_garbage_does_not_harm_the_server(server: Server, join: Callable[..., DraftClient]) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(server.address)
    for frames in (
        [b""],
        [b"x" * 100],
        [b"a", b"b", b"c"],
        [bytes(16) + b"\x93\xa6append"],
        [bytes(16) + b"\x93\xa2\xff\xff\x01\x90"],
        [bytes(1 << 20)],
    ):
        socket.send_multipart(frames)
    one, other = join(), join()
    one.watch(GROUP, HERE)
    other.watch(GROUP, THERE)
    one.report(GROUP, HERE, 0, [1, 2])
    hear(other, {HERE: [1, 2]})
    socket.close(linger=0)


def test_without_the_secret_nothing_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes...!")
    server = Server("--secret-file", str(path))
    clients = [
        DraftClient([server.address], secret=secret, interval_ms=2.0)
        for secret in (b"sixteen bytes...!", b"sixteen bytes...!", b"another secret..", None)
    ]
    try:
        for key, client in enumerate(clients):
            client.watch(GROUP, key)
            client.report(GROUP, key, 0, [key])
        hear(clients[0], {1: [1]})
        hear(clients[1], {0: [0]})
        time.sleep(0.05)
        assert [client.take(10) for client in clients] == [[], [], [], []]
    finally:
        for client in clients:
            client.close()
        server.kill()


def test_without_a_server_nothing_waits() -> None:
    client = DraftClient(["tcp://127.0.0.1:1"], interval_ms=2.0)
    client.watch(GROUP, HERE)
    started_s = time.monotonic()
    for token in range(10_000):
        client.report(GROUP, HERE, token, [token])
    assert client.take(10) == []
    assert time.monotonic() - started_s < 5.0
    client.close()


def test_groups_are_spread_over_servers(server: Server) -> None:
    second = Server()
    addresses = [server.address, second.address]
    one, other = (DraftClient(addresses, interval_ms=2.0) for _ in range(2))
    try:
        for group in (4, 5):
            one.watch(group, HERE + group)
            other.watch(group, THERE + 10 * group)
            one.report(group, HERE + group, 0, [group])
        hear(other, {HERE + 4: [4], HERE + 5: [5]})
        second.kill()
        one.report(4, HERE + 4, 1, [44])
        hear(other, {HERE + 4: [44]})
    finally:
        one.close()
        other.close()
        second.kill()


def test_two_fast_loops_draft_from_each_other(server: Server) -> None:
    settings = EngineSettings(
        draft_servers=(server.address,),
        draft_floor=0.0,
        budget={"policy": "fixed", "fixed_tokens": 4},  # type: ignore[arg-type]
    )
    one, other = FastLoop(settings), FastLoop(settings)
    query = DraftQuery(
        groups=np.array([GROUP]),
        responses=np.array([0]),
        keys=np.array([THERE], np.uint64),
        positions=np.array([5]),
        temperatures=np.zeros(1, np.float32),
        max_tokens=np.full(1, 4, np.int32),
    )
    try:
        one.open(GROUP, 0, [1, 2, 3], [], HERE)
        other.open(GROUP, 0, [1, 2, 3], [], THERE)
        other.append([(GROUP, 0, [5, 6])])
        one.append([(GROUP, 0, [5, 6, 7, 8, 9])])
        deadline_s = time.monotonic() + PATIENCE_S
        while (made := other.propose(query, 0).batch).tokens[0, :3].tolist() != [7, 8, 9]:
            assert time.monotonic() < deadline_s, made
            time.sleep(0.01)
        one.forget_tokens()
        other.forget_tokens()
        assert other.propose(query, 0).lengths.tolist() == [0]
    finally:
        one.shut_down()
        other.shut_down()


def test_the_server_ends_by_itself_when_asked(server: Server) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        running = Server()
        try:
            os.kill(running.process.pid, number)
            out, _ = running.process.communicate(timeout=PATIENCE_S)
        finally:
            running.kill()
        assert "ended" in out
        assert running.process.returncode == 0


def test_a_resumed_response_is_told_once(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    other.watch(GROUP, THERE)
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, [1, 2])
    one.unwatch(GROUP)
    hear(other, {HERE: [1, 2]})
    one.watch(GROUP, HERE, [1, 2])
    one.report(GROUP, HERE, 2, [3])
    hear(other, {HERE: [3]})


def test_a_group_that_comes_back_is_heard_of_once(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, [1, 2])
    other.watch(GROUP, THERE)
    hear(other, {HERE: [1, 2]})
    other.unwatch(GROUP)
    other.watch(GROUP, THERE + 1)
    one.report(GROUP, HERE, 2, [3])
    hear(other, {HERE: [3]})


def test_tokens_that_the_target_lacks_are_dropped(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join(vocab_size=100)
    other.watch(GROUP, THERE)
    for key, token in ((1, 100), (2, -1), (3, 99)):
        one.watch(GROUP, key)
        one.report(GROUP, key, 0, [token])
    hear(other, {3: [99]})
    time.sleep(0.05)
    assert other.take(10) == []


def test_a_response_that_moved_away_is_heard_of(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, THERE)
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, [1, 2])
    one.leave(GROUP, HERE, 2)
    other.watch(GROUP, HERE, [1, 2])
    other.report(GROUP, HERE, 2, [3, 4])
    hear(one, {HERE: [3, 4]})
    other.leave(GROUP, HERE, 4)
    one.watch(GROUP, HERE, [1, 2, 3, 4])
    one.report(GROUP, HERE, 4, [5])
    other.watch(GROUP, THERE + 1)
    hear(other, {HERE: [5]})


def test_what_others_told_of_a_response_while_it_was_here_is_heard_once_it_leaves(
    join: Callable[..., DraftClient],
) -> None:
    """A worker that was given up went on for a while: its tokens are in the log, beyond the next worker's."""
    lost, one = join(), join()
    one.watch(GROUP, THERE)
    one.watch(GROUP, HERE, [1, 2])
    lost.watch(GROUP, HERE)
    lost.report(GROUP, HERE, 0, [1, 2, 3, 4, 5])
    time.sleep(0.1)
    one.report(GROUP, HERE, 2, [3])
    assert one.take(10) == []
    one.leave(GROUP, HERE, 3)
    hear(one, {HERE: [4, 5]})


def test_counts_are_those_of_one_worker_when_responses_move(server: Server) -> None:
    """Two fast loops, six responses in chunks that go back and forth: both forests have each token once."""
    settings = EngineSettings(draft_servers=(server.address,))
    loops = FastLoop(settings), FastLoop(settings)
    prompt, chunk = [1, 2, 3], 7
    texts = {1 << 63 | key: np.random.default_rng(key).integers(1, 5, 40).tolist() for key in range(6)}
    whole = SuffixForest(settings.suffix_depth)
    whole.open_group(GROUP, prompt)
    for key, text in texts.items():
        whole.append(GROUP, key & 7, text)
    numbers = iter(range(1000))
    nothing = DraftQuery(*(np.zeros(0, dtype) for dtype in ("i8", "i8", "u8", "i8", "f4", "i4")))
    try:
        for loop in loops:  # a response of its own that says nothing, so that the group is never without one
            loop.open(GROUP, next(numbers), prompt, [], 99 + loops.index(loop))
        for start in range(0, 40, chunk):
            for key, text in texts.items():
                loop, number = loops[(key + start) % 2], next(numbers)
                loop.open(GROUP, number, prompt, text[:start], key)
                for token in text[start : start + chunk]:
                    loop.append([(GROUP, number, [token])])
                loop.close(GROUP, number)
            loops[start % 2].propose(nothing, 0)
            time.sleep(0.01)
        deadline_s = time.monotonic() + PATIENCE_S
        while any(forest(loop).num_tokens != whole.num_tokens for loop in loops):
            assert time.monotonic() < deadline_s, [forest(loop).num_tokens for loop in loops]
            for loop in loops:
                loop.propose(nothing, 0)
            time.sleep(0.01)
        for text in texts.values():
            known = prompt + text
            for end in range(1, len(known) + 1):
                for size in range(1, min(end, 6) + 1):
                    context = known[end - size : end]
                    assert [forest(loop).count(GROUP, context) for loop in loops] == [
                        whole.count(GROUP, context)
                    ] * 2
    finally:
        for loop in loops:
            loop.shut_down()


def forest(loop: FastLoop) -> SuffixForest:
    assert isinstance(loop.free.drafter, SuffixForest)
    return loop.free.drafter


@pytest.mark.parametrize("count", [130, 1000])
def test_however_many_groups_none_starves(join: Callable[..., DraftClient], count: int) -> None:
    one, other = join(), join()
    for group in range(count):
        one.watch(group, HERE)
        other.watch(group, THERE)
    for start in range(0, 40, 2):
        for group in range(count):
            one.report(group, HERE, start, range(start, start + 2))
        time.sleep(0.005)
    done_s = completed_s(other, count, 40)
    assert max(done_s) < 5.0
    assert max(done_s) < min(done_s) + 2.0
    counts = one.counters()
    assert counts.told_tokens >= 40 * count
    assert (counts.lost_tokens, counts.dropped_tokens) == (0, 0)
    assert other.counters().heard_tokens == 40 * count


def test_what_a_busy_server_does_not_take_waits_and_none_starves(
    server: Server, join: Callable[..., DraftClient]
) -> None:
    """The server stands still for a second, in which 12 MB are reported; then all groups are complete at once."""
    count, num_tokens = 150, 20_000
    one, other = join(), join()
    for group in range(count):
        one.watch(group, HERE)
        other.watch(group, THERE)
    time.sleep(0.05)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for start in range(0, num_tokens, 200):
            for group in range(count):
                one.report(group, HERE, start, range(start, start + 200))
            time.sleep(0.01)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert one.counters().held_messages > 0
    assert max(completed_s(other, count, num_tokens)) < 10.0
    counts = one.counters()
    assert (counts.lost_tokens, counts.dropped_tokens) == (0, 0)


def test_after_a_response_of_more_than_a_message_the_others_come_in_turn(
    join: Callable[..., DraftClient],
) -> None:
    one, other = (
        join(interval_ms=100.0),
        join(),
    )  # the first message has hardly gone when the other response grows
    for group in range(3):
        other.watch(group, THERE)
        one.watch(group, HERE)
    one.report(0, HERE, 0, range(3 * MAX_TEXT_BYTES // 4))  # three messages
    one.report(1, HERE, 0, [1])
    wanted_s = time.monotonic() + PATIENCE_S
    num_before = 0  # tokens of the long one that come before the short one
    while (growths := other.take(1)) == [] or growths[0].group == 0:
        assert time.monotonic() < wanted_s
        num_before += sum(len(growth.tokens) for growth in growths)
        if not growths:
            time.sleep(0.001)
    assert growths[0].group == 1
    assert num_before < 3 * MAX_TEXT_BYTES // 4  # the short one did not wait for all of the long one


def test_counters_tell_what_was_told_again(server: Server, join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    one.watch(GROUP, HERE)
    other.watch(GROUP, THERE)
    one.report(GROUP, HERE, 0, range(10))
    hear(other, {HERE: list(range(10))})
    other.report(GROUP, THERE, 0, [1])
    hear(one, {THERE: [1]})  # it knows the server's log, and that another one is another
    server.kill()
    server.start()
    one.report(GROUP, HERE, 10, [10])
    hear(other, {HERE: [10]})
    assert one.counters().lost_tokens >= 10
    assert other.counters().heard_tokens == 11


def held_bytes(client: DraftClient) -> int:
    """Text that the client keeps."""
    groups = [*client._groups.values(), *client._dormant.values()]
    return sum(len(own.tokens) for group in groups for own in group.own.values())


def test_the_text_of_a_group_that_has_ended_goes_once_it_is_sent(join: Callable[..., DraftClient]) -> None:
    one, other = join(), join()
    for group in range(50):
        other.watch(group, THERE)
        for key in range(4):
            one.watch(group, key)
            one.report(group, key, 0, range(1000))
            one.leave(group, key, 1000)
        one.unwatch(group)
    deadline_s = time.monotonic() + PATIENCE_S
    while held_bytes(one):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not one._links[0].unsent
    one.watch(7, 9)  # what is remembered suffices: nothing of its own is heard, and nothing twice
    other.report(7, THERE, 0, [5])
    hear(one, {THERE: [5]})
    one.unwatch(7)
    one.forget()
    assert not one._groups
    assert not one._dormant


def test_without_a_server_the_text_of_ended_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafting.client.MOST_UNSENT_BYTES", 40_000)
    client = DraftClient(["tcp://127.0.0.1:1"], interval_ms=2.0)
    try:
        for group in range(2000):
            client.watch(group, HERE)
            client.report(group, HERE, 0, range(1000))
            client.leave(group, HERE, 1000)
            client.unwatch(group)
            assert held_bytes(client) <= 40_000
            assert len(client._dormant) <= 1024
            assert len(client._links[0].unsent) <= 10
            time.sleep(0.0005)
        counts = client.counters()
        assert counts.told_tokens + counts.dropped_tokens + held_bytes(client) // 4 == 2_000_000
        assert counts.dropped_tokens > 1_500_000
    finally:
        client.close()


def live_through(client: DraftClient, key: int) -> None:
    """A response of 1000 tokens in a group where another one stays."""
    client.watch(GROUP, key)
    client.report(GROUP, key, 0, range(1000))
    client.leave(GROUP, key, 1000)


def test_the_text_of_ended_responses_in_a_group_that_lives_on_is_bounded(
    server: Server, join: Callable[..., DraftClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest ones are kept: a server that was started anew is told them, and what still runs."""
    monkeypatch.setattr("paceline.drafting.client.MOST_ENDED_BYTES", 10 * 4300)
    monkeypatch.setattr("paceline.drafting.client.MOST_HEARD", 20)
    one, keys = join(), range(100, 150)
    one.watch(GROUP, HERE)
    one.report(GROUP, HERE, 0, [1, 2, 3])
    for key in keys:
        live_through(one, key)
        assert held_bytes(one) <= 10 * 4000 + 12
        deadline_s = time.monotonic() + PATIENCE_S
        while one._links[0].unsent:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
    assert len(one._groups[GROUP].heard) <= 20
    assert one.counters().dropped_tokens == 0
    other = join()
    other.watch(GROUP, THERE)
    hear(other, {HERE: [1, 2, 3], **{key: list(range(1000)) for key in keys}})
    server.kill()
    server.start()
    late = join()
    late.watch(GROUP, THERE)
    hear(late, {HERE: [1, 2, 3], **{key: list(range(1000)) for key in keys[-10:]}})


def test_without_a_server_the_text_of_ended_responses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafting.client.MOST_ENDED_BYTES", 10 * 4300)
    client = DraftClient(["tcp://127.0.0.1:1"], interval_ms=2.0)
    try:
        client.watch(GROUP, HERE)
        for key in range(100, 1100):
            live_through(client, key)
            assert held_bytes(client) <= 10 * 4000
            assert len(client._links[0].unsent) <= 10
        client.watch(GROUP, 1099, range(1000))  # the last one goes on here
        for key in range(2000, 2020):
            live_through(client, key)
        assert held_bytes(client) == 11 * 4000
        client.leave(GROUP, HERE, 0)
        client.leave(GROUP, 1099, 1000)
        client.unwatch(GROUP)
        assert (client._ended, client._ended_bytes) == ({}, 0)
    finally:
        client.close()


def test_what_a_fast_loop_knows_of_shared_groups_goes_with_them(server: Server) -> None:
    loop = FastLoop(EngineSettings(draft_servers=(server.address,)))
    sharing = loop.free._sharing
    assert sharing is not None
    try:
        for epoch in range(3):
            for number in range(200):
                group = number + 1000 * epoch
                loop.open(group, number, [1, 2, 3], [], number)
                loop.append([(group, number, [4, 5])])
                loop.close(group, number)
            assert not any(value for value in vars(sharing).values() if isinstance(value, dict))
            loop.forget_tokens()
        assert not loop.free._numbers
        assert not loop.free._running
    finally:
        loop.shut_down()

"""Workers that pass responses on to each other in chunks count as one worker does that has seen each token once.

Three fast loops with draft clients of their own and the server's log between them, without network or threads: the
test says when each exchanges messages, when a worker is given up while it goes on, and when the server is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineSettings
from paceline.drafting.client import DraftClient, _Link
from paceline.drafting.server import DraftLog
from paceline.drafting.suffix import SuffixForest
from paceline.drafting.wire import Append, News, Seal
from paceline.engine.fast_loop import FastLoop
from paceline.engine.sharing import SharedDrafts
from paceline.types import DraftQuery

GROUP, PROMPT, DEPTH, NUM_WORKERS = 5, [1, 2, 3], 4, 3
NOTHING = DraftQuery(*(np.zeros(0, dtype) for dtype in ("i8", "i8", "u8", "i8", "f4", "i4")))

keys = st.integers(0, 1)
workers = st.integers(0, NUM_WORKERS - 1)
events = st.one_of(
    st.tuples(st.just("run"), keys, workers),
    st.tuples(st.just("grow"), keys, st.integers(1, 4)),
    st.tuples(st.just("grow_lost"), keys, st.integers(1, 4)),
    st.tuples(st.just("lose"), keys, st.integers(0, 3)),
    st.tuples(st.just("exchange"), workers, st.integers(1, 3)),
    st.tuples(st.just("draft"), workers, st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


class Wire(_Link):
    """A connection to a log in this process; answers come with the next exchange."""

    def __init__(self, link: _Link, logs: list[DraftLog]) -> None:
        vars(self).update(vars(link))
        self._logs, self._answers, self._seal = logs, deque[bytes](), Seal(None)

    def send(self, frame: bytes) -> bool:
        request = self._seal.open_request(frame)
        assert request is not None
        if isinstance(request, Append):
            for one in request.groups:
                self._logs[-1].append(one.group, one.pieces, 0.0)
        else:
            news = News(request.number, self._logs[-1].fetch(request.wants, 0.0))
            self._answers.append(self._seal.pack(news))
        return True

    def receive(self) -> list[bytes]:
        frames = list(self._answers)
        self._answers.clear()
        return frames


class Worker:
    """A fast loop whose client moves when it is told to."""

    def __init__(self, name: int, client: DraftClient, logs: list[DraftLog]) -> None:
        self.loop = FastLoop(EngineSettings(suffix_depth=DEPTH))
        self.client, self.wire = client, Wire(client._links[0], logs)
        client.forget()
        self.loop.free._sharing = SharedDrafts(client)
        self.numbers = iter(range(1 << 20))
        self.begin(100 + name, [])  # says nothing; keeps the group awake

    def begin(self, key: int, generated: list[int]) -> int:
        number = next(self.numbers)
        self.loop.open(GROUP, number, PROMPT, generated, key)
        return number

    def exchange(self) -> None:
        self.client._exchange(0, self.wire)

    @property
    def forest(self) -> SuffixForest:
        assert isinstance(self.loop.free.drafter, SuffixForest)
        return self.loop.free.drafter


class Fleet:
    """What a controller does with the responses: each runs at one worker, and perhaps at one that was given up."""

    def __init__(self, clients: list[DraftClient], texts: list[list[int]]) -> None:
        self.logs = [DraftLog(1 << 30, 1e9)]
        self.workers = [Worker(name, client, self.logs) for name, client in enumerate(clients)]
        self.texts = texts
        self.known = [0] * len(texts)
        self.most = [0] * len(texts)
        self.places: dict[int, tuple[int, int]] = {}  # worker and response number, by key
        self.lost: dict[int, tuple[int, int, int]] = {}  # the same and its tokens

    def run(self, key: int, at: int) -> None:
        """The response goes on at this worker, wherever it was before."""
        if key in self.lost and self.lost[key][0] == at:
            return
        if key in self.places:
            worker, number = self.places[key]
            self.workers[worker].loop.close(GROUP, number)
        self.places[key] = at, self.workers[at].begin(key, self.texts[key][: self.known[key]])

    def grow(self, key: int, count: int) -> None:
        if key in self.places:
            self.known[key] = self._append(key, *self.places[key], self.known[key], count)

    def lose(self, key: int, num_unknown: int) -> None:
        """Its worker is given up with its last tokens untold, and does not know."""
        if key in self.places and key not in self.lost:
            self.lost[key] = (*self.places.pop(key), self.known[key])
            self.known[key] = max(self.known[key] - num_unknown, 0)

    def grow_lost(self, key: int, count: int) -> None:
        if key in self.lost:
            worker, number, known = self.lost[key]
            self.lost[key] = worker, number, self._append(key, worker, number, known, count)

    def _append(self, key: int, worker: int, number: int, start: int, count: int) -> int:
        new = self.texts[key][start : start + count]
        if new:
            self.workers[worker].loop.append([(GROUP, number, new)])
        self.most[key] = max(self.most[key], start + len(new))
        return start + len(new)

    def settle(self) -> None:
        """End everything, and let everyone hear everything."""
        for worker, number in [*self.places.values(), *(place[:2] for place in self.lost.values())]:
            self.workers[worker].loop.close(GROUP, number)
        for _ in range(8):
            for worker in self.workers:
                worker.exchange()
                worker.loop.propose(NOTHING, 0)


@pytest.fixture(scope="module")
def clients() -> Iterator[list[DraftClient]]:
    """Their threads sleep: the test does the work."""
    made = [DraftClient(["tcp://127.0.0.1:1"], interval_ms=1e9) for _ in range(NUM_WORKERS)]
    yield made
    for client in made:
        client.close()


def play(fleet: Fleet, event: tuple[str, int, int]) -> None:
    name, what, number = event
    match name:
        case "exchange":
            for _ in range(number):
                fleet.workers[what].exchange()
        case "draft":
            fleet.workers[what].loop.propose(NOTHING, 0)
        case "restart":
            fleet.logs.append(DraftLog(1 << 30, 1e9))
        case _:
            getattr(fleet, name)(what, number)


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=6, max_size=16), min_size=2, max_size=2),
    st.lists(events, min_size=20, max_size=60),
)
@settings(max_examples=100)
def test_every_worker_counts_as_one_that_saw_every_token_once(
    clients: list[DraftClient], texts: list[list[int]], story: list[tuple[str, int, int]]
) -> None:
    fleet = Fleet(clients, texts)
    for event in story:
        play(fleet, event)
    fleet.settle()
    whole = SuffixForest(DEPTH)
    whole.open_group(GROUP, PROMPT)
    for key, text in enumerate(texts):
        whole.append(GROUP, key, text[: fleet.most[key]])
    for worker in fleet.workers:
        assert worker.forest.num_tokens == whole.num_tokens
    for key, text in enumerate(texts):
        known = PROMPT + text[: fleet.most[key]]
        for end in range(1, len(known) + 1):
            for size in range(1, min(end, DEPTH + 1) + 1):
                context = known[end - size : end]
                counts = [worker.forest.count(GROUP, context) for worker in fleet.workers]
                assert counts == [whole.count(GROUP, context)] * NUM_WORKERS, context

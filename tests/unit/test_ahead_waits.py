"""The fast loop's end of a draft worker: what it makes of arrivals, and when it waits for more."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_link import WorkerLink
from paceline.drafting.worker_wire import DraftCounts, Drafts, WorkerSettings, pack_draft
from paceline.engine.draft_ahead import DraftAhead
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.wait import WaitSnapshot
from paceline.types import DraftChains, DraftQuery

WINDOW = 4


@dataclass
class Link:
    """Gives what is written for it, each time that it is asked the next."""

    script: list[Drafts | None] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    number: int = 0
    is_there: bool = True
    is_resting: bool = False

    def rest(self) -> None:
        self.is_resting = True

    def forget(self) -> None:
        self.is_resting = False

    def take(self, timeout_s: float) -> Drafts | None:
        self.timeouts_s.append(timeout_s)
        return self.script.pop(0) if self.script else None

    def grow(self, *_: Any) -> None:
        self.number += 1


def drafts(tokens: list[int], *, number: int = 1, call_s: float = 0.001) -> Drafts:
    count = len(tokens)
    chain = (
        np.array(tokens, np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.full(count, 0.8, np.float32),
    )
    return Drafts(
        begun=1,
        number=number,
        trees=pack_draft(0, 10, *chain),
        level_s=call_s,
        num_levels=1,
        mean_acceptance=0.8,
        counts=DraftCounts(),
    )


def query(room: int = 16) -> DraftQuery:
    one = np.zeros(1, np.int64)
    return DraftQuery(
        one, one, one.astype(np.uint64), one + 10, np.ones(1, np.float32), np.full(1, room, np.int32)
    )


class Ahead:
    """One response at position 10, and steps of 20 s."""

    def __init__(self, *script: Drafts | None, further: Link | None = None, by_turns: bool = False) -> None:
        self.link, self.trees, self.snapshots = Link(list(script)), DraftTrees(most_ahead=2 * WINDOW), []
        links = [self.link] if further is None else [self.link, further]
        self.trees.open(0, np.arange(10, dtype=np.int32))
        log: Any = SimpleNamespace(write_wait=lambda snapshot, *_: self.snapshots.append(snapshot))
        folders = ("first", "second")
        self.ahead = DraftAhead(links, self.trees, log, by_turns=by_turns, folders=folders)  # type: ignore[arg-type]
        self.snapshots: list[WaitSnapshot]
        self.step_time = StepTimeModel.initial()
        for size in (1, 2, 4, 8, 16):
            for _ in range(2):
                self.step_time = update_measured_time(self.step_time, size, 20.0)
        nothing = np.zeros(1, np.int32)
        self.ahead.grow(np.zeros(1, np.int64), nothing, nothing)

    def best(self, room: int = 16, may_wait: bool = True) -> list[int]:
        self.ahead.listen()
        made = self.ahead.best(query(room), self.step_time, 0, may_wait)
        return made.tokens[0, : made.num_tokens[0]].tolist()


def test_link_and_trees_agree_on_how_far_is_drafted_ahead() -> None:
    """Of a response that was opened before a plan and begins after it, and when the worker has left."""
    trees = DraftTrees(most_ahead=6)
    link = WorkerLink(
        WorkerSettings("", 0, "model", "auto", 100, 4, 50, 0.05, None), 6, trees, has_child=False
    )
    log: Any = SimpleNamespace()
    ahead = DraftAhead([link], trees, log, every=16, max_window=8)
    one, nothing = np.zeros(1, np.int64), np.zeros(2, np.int32)
    try:
        trees.open(0, np.arange(10, dtype=np.int32))
        ahead.open(0, 1, 1.0, 100)
        link.begin_with(2)
        ahead.grow(one, nothing, nothing[:0])
        assert link.most_ahead([0]).tolist() == [2]
        chain = DraftChains(
            np.arange(2, dtype=np.int32)[None], np.full(1, 2, np.int32), np.full((1, 2), 0.9, np.float32)
        )
        trees.add(Source.MODEL, one, one + 10, chain)
        limits = np.full(1, 16, np.int32)
        assert trees.best(one, one + 10, limits).num_open == 0, "the window is full"
        ahead._workers[0].windows._planned_batch = 1
        ahead.plan(one, StepTimeModel.initial())
        assert link.most_ahead([0]).tolist() == [6]
        assert trees.best(one, one + 10, limits).num_open == 1
    finally:
        link.shut_down()


@pytest.mark.parametrize("child", [None, object()])
def test_while_a_helper_finds_nothing_worth_drafting_the_engine_drafts_by_itself(child: object) -> None:
    """A worker of its own has a core that its drafter inside would lack."""
    link: Any = SimpleNamespace(is_there=True, child=child, begin_anew=lambda: None)
    ahead = DraftAhead([link], DraftTrees(most_ahead=6), SimpleNamespace(), every=16, max_window=8)  # type: ignore[arg-type]
    windows = ahead._workers[0].windows
    assert windows is not None
    assert ahead.has(0)
    windows._num_idle = 1
    assert ahead.has(0) == (child is not None)
    assert ahead.is_there, "what it says is heard"
    windows.leave()
    assert ahead.has(0)


def test_what_has_arrived_is_offered_and_more_is_waited_for_while_it_pays() -> None:
    made = Ahead(*(drafts(list(range(1, length + 1))) for length in range(1, 2 * WINDOW + 1)))
    assert made.best() == list(range(1, 2 * WINDOW + 1))
    assert made.link.timeouts_s[0] == 0.0
    assert all(timeout_s > 0.0 for timeout_s in made.link.timeouts_s[1:])
    probabilities = [snapshot.open_probability for snapshot in made.snapshots]
    assert probabilities[:2] == pytest.approx([0.8, 0.64], rel=1e-3)
    assert made.ahead.step_wait_s > 0.0


def test_a_full_window_or_a_responses_end_is_not_waited_for() -> None:
    full = Ahead(drafts(list(range(1, 2 * WINDOW + 1))))
    assert len(full.best()) == 2 * WINDOW
    ends = Ahead(drafts([1, 2]))
    assert ends.best(room=2) == [1, 2]
    assert full.link.timeouts_s == ends.link.timeouts_s == [0.0]


def test_a_response_that_may_be_drafted_less_far_ahead_is_waited_for_no_further() -> None:
    made = Ahead(*(drafts(list(range(1, length + 1))) for length in range(1, 2 * WINDOW + 1)))
    made.trees.allow(np.zeros(1, np.int64), np.full(1, 2, np.int32))
    assert made.best() == [1, 2]


def test_before_the_worker_has_drafted_nothing_is_waited_for() -> None:
    made = Ahead()
    assert made.best() == []
    assert made.link.timeouts_s == [0.0]
    made = Ahead(drafts([1]))
    assert made.best(may_wait=False) == [1]
    assert made.link.timeouts_s == [0.0]


def test_a_wait_in_vain_is_the_last_until_the_worker_is_heard() -> None:
    made = Ahead(drafts([1]), None)
    made.best()
    assert len(made.link.timeouts_s) == 2
    made.best()
    assert made.link.timeouts_s[2:] == [0.0]
    made.link.script = [drafts([1, 2]), None]
    made.best()
    assert made.link.timeouts_s[3] == 0.0
    assert made.link.timeouts_s[4] > 0.0


def test_one_that_has_not_heard_of_the_step_needs_longer() -> None:
    heard, unheard = Ahead(drafts([1], call_s=10.0)), Ahead(drafts([1], number=0, call_s=10.0))
    for made in (heard, unheard):
        made.ahead._workers[0].since_s = time.perf_counter()
        made.best()
    assert unheard.snapshots[0].arrival_s > heard.snapshots[0].arrival_s + 1.0


def test_drafts_of_several_workers_meet_and_the_first_to_come_are_waited_for() -> None:
    further = Link([drafts([1, 2, 3], call_s=5.0), *[None] * 9])
    made = Ahead(drafts([1, 9], call_s=0.001), None, further=further)
    made.ahead.listen()
    found = made.ahead.best(query(), made.step_time, 0, may_wait=True)
    assert found.tokens[0, :2].tolist() == [1, 9]
    assert found.sources[0, :2].tolist() == [Source.MODEL, Source.MODEL], (
        "both propose 1: the first is believed"
    )
    assert made.link.timeouts_s[1] > 0.0
    assert all(timeout_s == 0.0 for timeout_s in further.timeouts_s[:1])
    assert made.snapshots[0].arrival_s < 0.1
    assert [one.number for one in (made.link, further)] == [1, 1], "all are told of what has grown"
    further.script = [drafts([7, 8], call_s=0.001), None]
    made.link.script = [None]
    made.ahead.listen()
    made.ahead.best(query(), made.step_time, 0, may_wait=True)
    assert made.link.timeouts_s[2:] == [0.0], "it was waited for in vain"
    assert further.timeouts_s[-1] > 0.0


def test_a_worker_that_is_gone_is_not_waited_for_and_the_other_is() -> None:
    further = Link([drafts([1, 2]), None])
    made = Ahead(drafts([1]), further=further)
    made.link.is_there = False
    assert made.ahead.is_there
    assert made.best() == [1, 2]
    assert made.link.timeouts_s == [0.0]
    assert [timeout_s > 0.0 for timeout_s in further.timeouts_s] == [False, True]


def test_by_turns_whole_windows_are_waited_for_whatever_it_takes() -> None:
    slow = [drafts(list(range(1, length + 1)), call_s=0.01) for length in range(1, 2 * WINDOW + 1)]
    made = Ahead(*slow, by_turns=True)
    made.step_time = StepTimeModel.initial()  # steps that take next to nothing
    assert made.best() == list(range(1, 2 * WINDOW + 1))
    assert made.snapshots == [], "that is no decision"
    ends = Ahead(drafts([1]), by_turns=True)
    assert ends.best(room=1) == [1]
    assert ends.link.timeouts_s == [0.0], "a response's end is no reason to wait"
    died = Ahead(drafts([1]), None, by_turns=True)
    assert [died.best(), died.best()] == [[1], [1]]
    assert [timeout_s > 0.0 for timeout_s in died.link.timeouts_s] == [False, True, False]


def test_a_workers_drafter_of_which_nothing_is_accepted_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Its drafts are heard no more, and nothing waits for it; what others have drafted does not count against it."""
    made = Ahead(drafts([1, 2]), further=Link([drafts([7, 8])]))
    one, decided = np.zeros(1, np.int64), np.array([[7]], np.int32)
    for _ in range(60):
        made.ahead.learn(one, decided)
    assert made.ahead.num_alarms == 0, "it has proposed nothing"
    made.best()
    for _ in range(60):
        made.ahead.learn(one, decided)
    assert made.ahead.num_alarms == 1
    assert not made.ahead.has(0)
    assert made.link.is_resting, "nobody would hear what it drafts"
    assert made.ahead.has(1)
    assert (
        sum("accepts nothing from the model drafter first" in line.getMessage() for line in caplog.records)
        == 1
    )
    made.link.script = [drafts([4, 5])]
    assert made.best() == [1, 2], "it is heard no more"
    made.ahead.forget()
    assert not made.link.is_resting
    assert made.ahead.has(0), "the policy has other weights: its drafts may be right again"

"""Copies of stragglers, and stragglers that are taken over, event by event; at random: test_controller_events.py."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from reports import make_ending, make_growths

from paceline.config import FleetSettings
from paceline.control import helping
from paceline.control.controller import HELP_S, Controller
from paceline.control.events import (
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    Disagree,
    Event,
    Opened,
    Report,
    Reported,
    RunChunk,
    StartWorker,
    Submitted,
    Tick,
    WorkerLost,
    WorkerUp,
)
from paceline.errors import EngineError
from paceline.fleet.controller_log import describe
from paceline.fleet.help_log import HelpLog
from paceline.planning.help import Help, HelpChoice
from paceline.types import RolloutRequest, StepCosts

STEPS = StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.0, 0.0)
FAST = StepCosts(0.01, 0.00005, 0.0, 1.0, 1.0, 0.0, 0.0)
TOKENS = tuple(range(100, 140))


class Tail:
    """Two workers of which the second, `w1`, has fallen free; the first has the other responses, with 2 tokens each."""

    def __init__(
        self, *lengths: int, costs: StepCosts = STEPS, own: StepCosts = STEPS, **fields: object
    ) -> None:
        made = FleetSettings.model_validate({"workers": 2, "help": "auto", "variant": "sticky", **fields})
        self.controller, self.log, self.now_s = Controller(made), HelpLog(), 0.0
        self.tell(Opened())
        self.up("w0", 0)
        requests = tuple(RolloutRequest((1,), n, key=i, group=i) for i, n in enumerate((*lengths, 50)))
        self.chunks = {
            one.index: one for one in self.tell(Submitted(requests[:-1])) if isinstance(one, RunChunk)
        }
        self.up("w1", 0)
        for index in range(len(lengths)):
            self.grow(self.chunks[index], 0, 2)
        self.report("w0", costs)
        self.report("w1", own)

    def tell(self, event: Event) -> list[Action]:
        actions = self.controller.decide(event)
        self.now_s += 0.01
        self.log.note(event, actions, self.now_s)
        return actions

    def up(self, worker: str, life: int) -> None:
        self.tell(WorkerUp(worker, life, 0, 4000, 4, 16))

    def report(self, worker: str, costs: StepCosts) -> None:
        self.tell(Reported(worker, 0, Report(1, costs=costs)))

    def grow(self, order: RunChunk, start: int, end: int, tokens: tuple[int, ...] = TOKENS) -> list[Action]:
        growths = make_growths(order.chunk, start, tokens[start:end])
        return self.tell(Reported(order.worker, order.life, Report(2, growths)))

    def end(self, order: RunChunk, end: int, num_told: int = 0) -> list[Action]:
        start = len(order.request.generated)
        ending = make_ending(order.chunk, start, TOKENS[start:end], "stop", num_told=num_told)
        return self.tell(Reported(order.worker, order.life, Report(3, endings=(ending,))))

    def tick(self) -> list[Action]:
        self.now_s += HELP_S
        return self.tell(Tick(self.now_s))

    def orders(self) -> list[RunChunk]:
        return [one for one in self.tick() if isinstance(one, RunChunk)]


def race(**fields: object) -> tuple[Tail, RunChunk, RunChunk]:
    """A lone straggler and its copy on a worker twice as fast."""
    tail = Tail(5000, own=FAST, **fields)
    [copy] = tail.orders()
    return tail, tail.chunks[0], copy


def delivered(actions: list[Action]) -> list[tuple[int, ...]]:
    return [one.response.tokens for one in actions if isinstance(one, Deliver)]


def test_a_lone_straggler_is_copied_by_a_faster_worker_alone() -> None:
    tail, _, copy = race()
    assert (copy.worker, copy.help, copy.helped) == ("w1", Help.COPY, "w0")
    assert (copy.request.generated, copy.request.max_tokens) == (TOKENS[:2], 5000)
    assert tail.controller.state_of("w1") == "racing"
    assert "a copy of w0's" in describe(copy)
    assert not tail.orders(), "once"
    assert not Tail(5000).orders(), "an equally fast one would end no sooner"
    assert not Tail(5000, own=StepCosts(0.018, 0.0001, 0.0, 1.0, 1.0, 0.0, 0.0)).orders(), "measured, hardly"
    least = StepCosts(0.0157, 0.00008, 0.0, 1.0, 1.0, 0.0, 0.0)
    assert not Tail(5000, own=least).orders(), "what of its lead is sure is not worth it"
    drafts = StepCosts(0.02, 0.0001, 0.005, 2.5, 5.0, 0.0005, 0.95)
    assert not Tail(5000, costs=drafts, own=drafts).orders(), "that has the same drafter"
    assert not Tail(5000, own=FAST, help="take").orders()
    assert not Tail(5000, own=FAST, variant="group").orders()


@pytest.mark.parametrize("winner", ["copy", "owner"])
def test_the_first_to_end_wins_and_the_other_is_cancelled(winner: str) -> None:
    tail, owner, copy = race()
    tail.grow(copy, 2, 6)
    tail.grow(owner, 2, 4)
    first, second = (copy, owner) if winner == "copy" else (owner, copy)
    actions = tail.end(first, 10, num_told=4 if winner == "copy" else 0)
    assert delivered(actions) == [TOKENS[:10]]
    assert CancelChunk(second.worker, 0, second.chunk) in actions
    assert tail.end(second, 10) == [], "it is late"
    assert tail.controller.state_of("w1") == "up"
    [span] = tail.log.take()
    assert (span.kind, span.worker, span.helped) == (Help.COPY, "w1", "w0")
    assert span.outcome == ("won" if winner == "copy" else "lost")


def test_each_racer_hears_what_the_other_was_the_first_to_tell() -> None:
    tail, owner, copy = race()

    def heard(actions: list[Action]) -> list[tuple[str, int, int, tuple[int, ...]]]:
        adopts = [one for one in actions if isinstance(one, Adopt)]
        return [(one.worker, one.chunk, one.start, tuple(array("i", one.tokens))) for one in adopts]

    assert heard(tail.grow(copy, 2, 6)) == [("w0", owner.chunk, 2, TOKENS[2:6])]
    assert heard(tail.grow(owner, 2, 4)) == [], "nothing new"
    actions = tail.grow(owner, 4, 8)
    assert heard(actions) == [("w1", copy.chunk, 6, TOKENS[6:8])]
    assert describe(actions[0]) == f"w1 (life 0) hears of chunk {copy.chunk} 2 tokens from 6 on"
    tail.grow(owner, 8, 9)
    tail.grow(copy, 6, 12)
    tail.end(owner, 13, num_told=9)
    [span] = tail.log.take()
    assert (span.outcome, span.leader, span.num_leads) == ("lost", "w1", 3)
    alone = Tail(5000)
    assert heard(alone.grow(alone.chunks[0], 2, 6)) == []


def test_a_chunk_that_ends_before_its_response_ends_both_and_is_given_out_again() -> None:
    tail, _, copy = race(chunk_tokens=16)
    start, end = len(copy.request.generated), copy.request.max_tokens
    ending = make_ending(copy.chunk, start, TOKENS[start:end], "length")
    actions = tail.tell(Reported("w1", 0, Report(3, endings=(ending,))))
    assert CancelChunk("w0", 0, tail.chunks[0].chunk, keep_kv=True) in actions
    [again] = [one for one in actions if isinstance(one, RunChunk)]
    assert again.request.generated == TOKENS[:end]
    assert again.help is None


@pytest.mark.parametrize("lost", ["w0", "w1"])
def test_where_one_of_the_two_is_lost_the_other_goes_on(lost: str) -> None:
    tail, owner, copy = race()
    tail.grow(copy, 2, 6)
    actions = tail.tell(WorkerLost(lost, 0, "killed"))
    assert [type(one) for one in actions] == [StartWorker], "nothing else has to be done"
    rest = copy if lost == "w0" else owner
    assert delivered(tail.end(rest, 9)) == [TOKENS[:9]]
    [span] = tail.log.take()
    assert span.outcome == ("won" if lost == "w0" else "stopped")


def test_a_copy_that_is_cancelled_while_another_response_ends_has_lost_no_race() -> None:
    tail, _, copy = race()
    ending = make_ending(copy.chunk + 1, 0, TOKENS[:2], "length")
    cancel = CancelChunk(copy.worker, 0, copy.chunk)
    tail.log.note(Reported("w0", 0, Report(3, endings=(ending,))), [cancel], 1.0)
    [span] = tail.log.take()
    assert (span.outcome, span.index) == ("stopped", copy.index)


def test_where_both_are_lost_the_response_goes_on_from_what_either_told() -> None:
    tail, _, copy = race()
    tail.grow(copy, 2, 6)
    tail.tell(WorkerLost("w0", 0, "killed"))
    tail.tell(WorkerLost("w1", 0, "killed"))
    actions = tail.controller.decide(WorkerUp("w0", 1, 0, 4000, 4, 16))
    [again] = [one for one in actions if isinstance(one, RunChunk)]
    assert again.request.generated == TOKENS[:6]


@pytest.mark.parametrize("wrong", ["copy", "owner"])
def test_who_tells_another_token_than_is_known_stops(wrong: str) -> None:
    tail, owner, copy = race()
    right, other = (owner, copy) if wrong == "copy" else (copy, owner)
    tail.grow(right, 2, 6)
    actions = tail.grow(other, 2, 5, (*TOKENS[:4], 7))
    assert actions[1:] == [CancelChunk(other.worker, 0, other.chunk)]
    [disagree] = actions[:1]
    assert isinstance(disagree, Disagree)
    assert (disagree.worker, disagree.index) == (other.worker, 0)
    assert f"token 4 was {TOKENS[4]} and is now 7" in disagree.message
    assert delivered(tail.end(right, 9, num_told=4)) == [TOKENS[:9]]


def test_a_racer_that_ends_with_another_checksum_stops_and_leaves_nothing_behind() -> None:
    tail, owner, copy = race()
    ending = make_ending(copy.chunk, 2, (7, *TOKENS[3:9]), "stop", num_told=4)
    tail.grow(owner, 2, 6)
    actions = tail.tell(Reported("w1", 0, Report(3, endings=(ending,))))
    assert isinstance(actions[0], Disagree)
    assert delivered(tail.end(owner, 9, num_told=4)) == [TOKENS[:9]]


def test_log_probabilities_of_two_engines_may_differ() -> None:
    tail, owner, copy = race()
    tail.grow(copy, 2, 6)
    ending = make_ending(owner.chunk, 0, TOKENS[:9], "stop", num_told=2, logprob=-2.0)
    assert delivered(tail.tell(Reported("w0", 0, Report(3, endings=(ending,))))) == [TOKENS[:9]]


def test_outside_of_a_race_another_token_is_an_error() -> None:
    tail = Tail(5000)
    with pytest.raises(EngineError, match="token 1 was"):
        tail.grow(tail.chunks[0], 0, 3, (100, 7, 102))


def test_a_copy_that_is_rejected_or_fails_leaves_its_original_alone() -> None:
    for report in ("rejected", "failed"):
        tail, owner, copy = race()
        if report == "rejected":
            told = Report(3, rejected=((copy.chunk, "no room"),))
        else:
            ending = make_ending(copy.chunk, 2, TOKENS[2:4], "error")
            told = Report(3, endings=(replace(ending, failure="NaN"),))
        assert tail.tell(Reported("w1", 0, told)) == []
        assert tail.orders() == [], "it is not tried again"
        assert delivered(tail.end(owner, 9)) == [TOKENS[:9]]


def test_a_worker_that_gets_a_chunk_runs_copies_no_more() -> None:
    tail = Tail(5000, 4000, own=FAST, workers=3)
    tail.up("w2", 0)
    assert {order.worker for order in tail.chunks.values()} == {"w0"}
    [copy] = tail.orders()
    lost = tail.controller.decide(WorkerLost("w0", 0, "killed"))
    [order] = [one for one in lost if isinstance(one, RunChunk)]
    assert (order.index, order.worker) == (1, "w2"), "the other response finds a place"
    assert delivered(tail.end(copy, 9)) == [TOKENS[:9]]


def test_the_longest_are_taken_over() -> None:
    busy = StepCosts(0.001, 0.01, 0.0, 1.0, 1.0, 0.0, 0.0)
    tail = Tail(4000, 5000, 3000, costs=busy)
    actions = tail.tick()
    cancels = [one for one in actions if isinstance(one, CancelChunk)]
    orders = [one for one in actions if isinstance(one, RunChunk)]
    assert [one.index for one in orders] == [1]
    [order] = orders
    assert (order.worker, order.help, order.helped) == ("w1", Help.TAKE, "w0")
    assert order.request.generated == TOKENS[:2]
    assert cancels == [CancelChunk("w0", 0, tail.chunks[1].chunk, keep_kv=True)]
    assert tail.grow(tail.chunks[1], 2, 5) == [], "it is late"
    assert delivered(tail.end(order, 9)) == [TOKENS[:9]]
    assert tail.controller.state_of("w1") == "up"
    [span] = tail.log.take()
    assert (span.kind, span.outcome, span.end_s) == (Help.TAKE, "", span.start_s)


def test_as_many_are_copied_or_taken_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(1200, 1200, 1200)
    tail.tell(WorkerLost("w1", 0, "killed"))
    tail.tell(WorkerUp("w1", 1, 0, 301, 4, 16))
    monkeypatch.setattr(helping, "decide_help", lambda *_: HelpChoice(Help.TAKE, 0.0, num_taken=2))
    assert [one.index for one in tail.orders()] == [0]
    tail = Tail(1200)
    tail.tell(WorkerLost("w1", 0, "killed"))
    tail.tell(WorkerUp("w1", 1, 0, 300, 4, 16))
    monkeypatch.setattr(helping, "decide_help", lambda *_: HelpChoice(Help.COPY, 0.0))
    assert tail.orders() == []

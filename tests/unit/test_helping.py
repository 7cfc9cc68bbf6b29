"""Who drafts for whom in a rollout's tail, as the controller decides it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import make_ending, make_growths

from paceline.config import FleetSettings
from paceline.control.controller import HELP_S, Controller
from paceline.control.events import (
    Abandoned,
    Action,
    CancelChunk,
    DraftFor,
    Keep,
    LoseDrafter,
    Opened,
    Report,
    Reported,
    Rest,
    RunChunk,
    StartWorker,
    StopWorker,
    Submitted,
    Tick,
    WorkerLost,
    WorkerUp,
)
from paceline.planning.help import EARLY_S, TRIAL_S, Drafting, Helper, Load, decide_help, judge_help
from paceline.planning.length import expected_rest
from paceline.types import Progress, RolloutRequest, StepCosts

SLOW = StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.001, 0.8)
"""Plain decoding, with a drafter of a twentieth of its time."""


FAST = StepCosts(0.01, 0.0001, 0.0, 1.0, 1.0, 0.001, 0.8)
"""Of a worker whose steps take half as long."""


class Fleet:
    """A controller of workers that are all up, and the time."""

    def __init__(self, workers: int, **fields: object) -> None:
        self.controller = Controller(
            FleetSettings.model_validate({"workers": workers, "variant": "sticky", "help": "draft", **fields})
        )
        self.controller.decide(Opened())
        self.now_s = 0.0
        self.chunks: dict[int, RunChunk] = {}
        self.orders: list[RunChunk] = []
        self.num_grown = 0
        self.progress: dict[tuple[str, int], Progress] = {}  # by worker and life
        for number in range(workers):
            self.up(f"w{number}", 0)

    def tell(self, event: object) -> list[Action]:
        actions = self.controller.decide(event)  # type: ignore[arg-type]
        for action in actions:
            if isinstance(action, RunChunk):
                self.orders.append(action)
                self.chunks[action.index] = action
            elif isinstance(action, CancelChunk):
                self.chunks = {at: one for at, one in self.chunks.items() if one.chunk != action.chunk}
        return actions

    def up(self, worker: str, life: int) -> None:
        doors = (f"ipc://{worker}/{life}", f"ipc://{worker}/{life}/further")
        self.tell(WorkerUp(worker, life, 0, 10_000, 4, 16, doors))

    def submit(self, *lengths: int, drafter: int = 0, others: tuple[Drafting, ...] = ()) -> None:
        requests = tuple(RolloutRequest((1, 2), n, key=i, group=i) for i, n in enumerate(lengths))
        self.tell(Submitted(requests, drafter=drafter, others=others))

    def report(self, worker: str, costs: StepCosts | None = SLOW, life: int = 0) -> list[Action]:
        return self.tell(Reported(worker, life, Report(1, costs=costs)))

    def run(
        self,
        worker: str,
        rate: float,
        seconds: float = HELP_S,
        batch: int = 1,
        step_s: float = 0.01,
        life: int = 0,
    ) -> list[Action]:
        """The worker has generated so many tokens a second, of each response."""
        response_s = batch * seconds
        more = Progress(round(rate * response_s), seconds, response_s, round(seconds / step_s))
        progress = self.progress[worker, life] = self.progress.get((worker, life), Progress()) + more
        return self.tell(Reported(worker, life, Report(1, costs=SLOW, progress=progress)))

    def grow(self, worker: str, count: int) -> None:
        """The worker tells so many further tokens of response 0."""
        chunk = min(order.chunk for order in self.orders if order.worker == worker)
        start = self.num_grown
        self.num_grown += count
        self.tell(
            Reported(worker, 0, Report(1, make_growths(chunk, start, tuple(range(start, start + count)))))
        )

    def end(self, index: int, num_tokens: int) -> list[Action]:
        order = self.chunks.pop(index)
        ending = make_ending(order.chunk, 0, range(num_tokens), "stop")
        return self.tell(Reported(order.worker, order.life, Report(2, endings=(ending,))))

    def lose(self, worker: str, life: int) -> list[Action]:
        self.chunks = {at: one for at, one in self.chunks.items() if one.worker != worker}
        return self.tell(WorkerLost(worker, life, "killed"))

    def tick(self) -> list[Action]:
        self.now_s += HELP_S
        return self.tell(Tick(self.now_s))


def tail(
    workers: int = 2, drafter: int = 0, others: tuple[Drafting, ...] = (), **fields: object
) -> tuple[Fleet, str, str]:
    """A fleet in which one worker still generates; gives it and the free one."""
    fleet = Fleet(workers, **fields)
    fleet.submit(5000, *[100] * (workers - 1), drafter=drafter, others=others)
    busy = fleet.chunks[0].worker
    [free] = [order.worker for index, order in fleet.chunks.items() if index == 1]
    assert busy != free
    for name in fleet.controller.workers:
        fleet.report(name)
    for index in range(1, workers):
        fleet.end(index, 50)
    return fleet, busy, free


def test_a_free_worker_drafts_for_the_straggler() -> None:
    fleet, busy, free = tail()
    assert fleet.tick() == [DraftFor(free, 0, (busy,), (f"ipc://{busy}/0",))]
    assert fleet.controller.state_of(free) == "drafting"
    assert fleet.tick() == [], "it does already"
    *_, rest = fleet.end(0, 70)
    assert rest == Rest(free, 0)
    assert fleet.controller.state_of(free) == "up"


@pytest.mark.parametrize(
    ("drafter", "other", "chosen"),
    [
        (0, Drafting(0.001, 0.95, 1), 1),  # as cheap as the workers' own, and more often right
        (0, Drafting(0.001, 0.3, 1), 0),
        (0, Drafting(0.05, 0.99, 1), 0),  # dearer than the target
        (1, Drafting(0.001, 0.3, 0), 1),  # the workers' own
        (1, Drafting(0.001, 0.95, 0), 0),
    ],
)
def test_a_free_worker_drafts_with_the_drafter_after_which_the_rollout_ends_first(
    drafter: int, other: Drafting, chosen: int
) -> None:
    fleet, busy, free = tail(drafter=drafter, others=(other,))
    door = f"ipc://{busy}/0" + "/further" * chosen
    assert fleet.tick() == [DraftFor(free, 0, (busy,), (door,), chosen)]


def helped_tail() -> tuple[Fleet, str, str]:
    """One in which it is known that the straggler had 100 tokens a second alone, and the free one helps it."""
    fleet, busy, free = tail()
    fleet.run(busy, 70.0)  # the other one was busy then
    assert fleet.tick() == [], "how fast is it alone?"
    fleet.run(busy, 100.0)
    assert fleet.tick() == [DraftFor(free, 0, (busy,), (f"ipc://{busy}/0",))]
    return fleet, busy, free


@pytest.mark.parametrize(("rate", "seconds"), [(95.0, TRIAL_S), (60.0, EARLY_S)])
def test_help_that_makes_the_straggler_slower_is_ended_and_not_offered_again(
    rate: float, seconds: float
) -> None:
    fleet, busy, free = helped_tail()
    assert fleet.run(busy, rate, 0.9 * seconds) == []
    assert fleet.run(busy, rate, 0.2 * seconds) == [LoseDrafter(busy, 0), Rest(free, 0)]
    assert fleet.controller.state_of(free) == "up"
    for _ in range(4):
        assert fleet.run(busy, 100.0) == fleet.tick() == []
    fleet.end(0, 50)
    fleet.submit(5000)
    fleet.run(busy, 100.0)
    assert fleet.tick() == []
    fleet.run(busy, 100.0)
    assert [type(one) for one in fleet.tick()] == [DraftFor], "another rollout, another trial"


def test_help_that_makes_it_faster_stays() -> None:
    fleet, busy, _ = helped_tail()
    assert fleet.run(busy, 110.0, 1.1 * TRIAL_S) == []
    assert fleet.run(busy, 50.0, 9.0) == [], "the trial is over: contexts grow"


def copied_tail() -> tuple[Fleet, str, RunChunk]:
    """A straggler with 100 tokens a second alone, and its copy on a worker that is taken for faster."""
    fleet, busy, free = tail(help="copy")
    fleet.report(free, FAST)
    fleet.grow(busy, 2)
    fleet.run(busy, 100.0)
    assert [type(one) for one in fleet.tick()] == [Keep]
    fleet.run(busy, 100.0)
    [copy] = fleet.tick()
    assert isinstance(copy, RunChunk)
    assert copy.worker == free
    return fleet, busy, copy


@pytest.mark.parametrize(("gained", "pays"), [(105, False), (115, True)])
def test_a_copy_is_cancelled_where_its_response_grows_no_faster(gained: int, pays: bool) -> None:
    """From when it has caught up: while it reads its context, nothing can come of it."""
    fleet, busy, copy = copied_tail()
    for generated in (0.0, 0.0, 50.0):
        fleet.grow(busy, 25)
        assert fleet.run(busy, 50.0, TRIAL_S) == fleet.run(copy.worker, generated) == []
    fleet.run(copy.worker, 200.0)
    fleet.grow(busy, gained)
    told = fleet.run(busy, 10.0, 1.1 * TRIAL_S)
    assert told == ([] if pays else [CancelChunk(copy.worker, copy.life, copy.chunk)])
    for _ in range(4):
        fleet.run(busy, 100.0)
        assert not any(isinstance(one, RunChunk) for one in fleet.tick()), "none is made again"
    assert fleet.controller.state_of(copy.worker) == ("racing" if pays else "up")


def test_a_copy_that_never_catches_up_is_judged_too() -> None:
    fleet, busy, copy = copied_tail()
    fleet.grow(busy, 100)
    assert fleet.run(busy, 100.0) == fleet.run(copy.worker, 10.0) == []
    fleet.grow(busy, 100)
    assert fleet.run(busy, 90.0, 1.1 * TRIAL_S) == fleet.run(copy.worker, 10.0) == []
    fleet.grow(busy, 100)
    assert fleet.run(busy, 90.0, 1.1 * TRIAL_S) == [CancelChunk(copy.worker, copy.life, copy.chunk)]


def test_a_trial_ends_with_its_helper() -> None:
    fleet, busy, free = helped_tail()
    assert LoseDrafter(busy, 0) in fleet.lose(free, 0)
    assert fleet.run(busy, 10.0, 2.0 * TRIAL_S) == [], "there is nobody whom that could be put down to"


def test_who_has_just_fallen_free_waits_until_the_straggler_was_measured_without_it() -> None:
    fleet = Fleet(3)
    fleet.submit(5000, 100, 100)
    busy, first, second = (fleet.chunks[at].worker for at in range(3))
    fleet.end(1, 50)
    fleet.run(busy, 100.0)
    assert fleet.tick() == []
    fleet.lose(first, 0)
    fleet.end(2, 50)
    fleet.run(busy, 100.0)
    assert fleet.tick() == [], "it is measured, but the second one was busy"
    fleet.run(busy, 100.0)
    assert fleet.tick() == [DraftFor(second, 0, (busy,), (f"ipc://{busy}/0",))]


def test_speeds_are_compared_at_equal_numbers_of_responses() -> None:
    before = Progress(100, 1.0, 2.0, 50)
    assert judge_help(before, Progress(49, TRIAL_S, TRIAL_S, 50)) is None
    assert judge_help(before, Progress(98, TRIAL_S, 2 * TRIAL_S, 50)) is False
    assert judge_help(before, Progress(100, TRIAL_S, 2 * TRIAL_S, 50)) is True
    assert judge_help(Progress(0, 1.0, 2.0, 50), Progress(0, TRIAL_S, 2 * TRIAL_S, 50)) is False, (
        "nothing comes of it"
    )
    assert judge_help(Progress(1, 0.01, 0.02, 50), Progress(0, TRIAL_S, 2 * TRIAL_S, 50)) is None


def test_of_a_few_long_steps_nothing_is_said() -> None:
    """One brings a token and the next one thirty: it would be chance that ends help."""
    fleet, busy, free = tail()
    fleet.run(busy, 70.0, step_s=0.25)
    assert fleet.tick() == []
    fleet.run(busy, 100.0, step_s=0.25)
    assert [type(one) for one in fleet.tick()] == [DraftFor]
    assert fleet.run(busy, 20.0, TRIAL_S, step_s=0.25) == fleet.run(busy, 20.0, 4.0, step_s=0.25) == []
    assert fleet.controller.state_of(free) == "drafting"


@pytest.mark.parametrize(("steps", "helps"), [(20.0, False), (1000.0, True)])
def test_a_tail_that_is_over_soon_is_left_alone(steps: float, helps: bool) -> None:
    load = Load(np.array([steps]), np.array([9.0]), 1.0, 1.0, 0.02, 0.0001)
    choice = decide_help(load, Helper(ahead=(Drafting(0.001, 0.8),), switch_s=0.1))
    assert bool(choice.window) == helps


def test_one_helper_is_enough_and_the_next_straggler_gets_the_next() -> None:
    fleet = Fleet(4)
    fleet.submit(5000, 5000, 100, 100)
    for name in fleet.controller.workers:
        fleet.report(name)
    fleet.end(2, 50)
    fleet.end(3, 50)
    found = fleet.tick()
    assert {action.helped for action in found if isinstance(action, DraftFor)} == {
        (fleet.chunks[0].worker,),
        (fleet.chunks[1].worker,),
    }
    assert len({action.worker for action in found if isinstance(action, DraftFor)}) == 2


@pytest.mark.parametrize(
    "costs",
    [
        None,
        StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.0, 0.8),  # never drafted
        StepCosts(0.02, 0.0001, 0.0, 1.0, 1.0, 0.05, 0.8),  # dearer than the target
        StepCosts(0.02, 0.0001, 0.0, 3.0, 5.0, 0.01, 0.1),  # never right, and others draft well
    ],
)
def test_nobody_drafts_where_it_would_not_help(costs: StepCosts | None) -> None:
    fleet = Fleet(2)
    fleet.submit(5000, 100)
    for name in fleet.controller.workers:
        fleet.report(name, costs)
    fleet.end(1, 50)
    assert fleet.tick() == []


def test_nobody_helps_while_something_waits_or_if_nobody_shall() -> None:
    fleet = Fleet(2, help="none")
    fleet.submit(5000, 100)
    for name in fleet.controller.workers:
        fleet.report(name)
    fleet.end(1, 50)
    assert fleet.tick() == []


def test_a_lost_helper_is_told_of_and_the_next_life_helps() -> None:
    fleet, busy, free = tail()
    fleet.tick()
    actions = fleet.tell(WorkerLost(free, 0, "killed"))
    assert LoseDrafter(busy, 0) in actions
    fleet.up(free, 1)
    assert fleet.tick() == [DraftFor(free, 1, (busy,), (f"ipc://{busy}/0",))]


@pytest.mark.parametrize(
    ("workers", "fields"), [(3, {}), (4, {"roles": "2 verifiers + 2 drafters", "help": "none"})]
)
def test_a_helper_whose_drafting_fails_is_replaced_until_the_next_rollout(
    workers: int, fields: dict[str, str]
) -> None:
    """It is up all the while, and says so; the other one would never have been asked."""
    fleet = Fleet(workers, **fields)
    fleet.submit(5000)
    fleet.report("w0")
    [order] = fleet.tick()
    assert isinstance(order, DraftFor)
    failed = order.worker
    told = fleet.tell(Reported(failed, 0, Report(7, has_failed_drafting=True)))
    assert told == [LoseDrafter("w0", 0), Rest(failed, 0)]
    assert fleet.controller.state_of(failed) == "up"
    [instead] = fleet.tick()
    assert isinstance(instead, DraftFor)
    assert instead.worker not in ("w0", failed)
    fleet.tell(Reported(failed, 0, Report(7)))
    fleet.tell(Reported(instead.worker, 0, Report(7, has_failed_drafting=True)))
    assert fleet.tick() == [], "the engine drafts with what it has"
    fleet.end(0, 50)
    fleet.submit(5000)
    assert fleet.tick() == [order]


def test_a_helper_that_stands_still_is_lost_and_another_one_helps() -> None:
    fleet, busy, _ = tail(workers=3, silence_s=5.0)
    [order] = fleet.tick()
    assert isinstance(order, DraftFor)
    for step in range(20):  # nothing is said of the busy one, which has its limit too
        fleet.tell(Reported(order.worker, 0, Report(10 + step)))
        fleet.tell(Reported(busy, 0, Report(10 + step)))
        assert not fleet.tick()
    found: list[Action] = []
    for step in range(20):
        fleet.tell(Reported(order.worker, 0, Report(29)))  # its process answers, its engine's thread hangs
        fleet.tell(Reported(busy, 0, Report(30 + step)))
        found += fleet.tick()
    assert found[:3] == [StopWorker(order.worker, 0), StartWorker(order.worker, 1), LoseDrafter(busy, 0)]
    assert isinstance(found[3], DraftFor)
    assert found[3].worker not in (order.worker, busy)
    assert len(found) == 4


def test_a_helper_of_a_lost_worker_takes_over_its_responses() -> None:
    fleet, busy, free = tail()
    fleet.tick()
    actions = fleet.tell(WorkerLost(busy, 0, "killed"))
    assert [action.worker for action in actions if isinstance(action, RunChunk)] == [free]
    assert not any(isinstance(action, Rest | LoseDrafter) for action in actions), "its chunk ends the help"
    assert fleet.controller.state_of(free) == "up"


def test_a_helped_worker_that_has_ended_counts_on_no_drafts() -> None:
    """Else the next responses there would wait for a drafter that rests."""
    fleet, busy, free = tail()
    fleet.tick()
    actions = fleet.end(0, 70)
    assert [one for one in actions if isinstance(one, LoseDrafter | Rest)] == [
        LoseDrafter(busy, 0),
        Rest(free, 0),
    ]


def test_helpers_of_a_rollout_that_is_given_up_rest() -> None:
    fleet, _, free = tail()
    fleet.tick()
    assert Rest(free, 0) in fleet.tell(Abandoned())


def test_what_is_left_of_a_response() -> None:
    assert expected_rest(100, 30, 500) == 70
    assert expected_rest(100, 100, 500) == 25
    assert expected_rest(100, 490, 500) == 10
    assert expected_rest(500, 499, 500) == 1
    assert expected_rest(0, 1, 500) == 1


@given(st.integers(0, 2**32 - 1))
def test_pairs_are_of_an_idle_and_a_busy_worker_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(4)
    fleet.submit(*(rng.choice([50, 400, 4000]) for _ in range(rng.randint(1, 9))))
    lives = dict.fromkeys(fleet.controller.workers, 0)
    for _ in range(60):
        name = rng.choice(fleet.controller.workers)
        kind = rng.random()
        if kind < 0.2:
            fleet.report(name, life=lives[name])
        elif kind < 0.4:
            fleet.run(name, rng.choice([50.0, 100.0]), life=lives[name])
        elif kind < 0.6:
            fleet.tick()
        elif kind < 0.75 and fleet.chunks:
            index = rng.choice(list(fleet.chunks))
            fleet.end(index, rng.randint(1, 40))
        elif kind < 0.8:
            fleet.lose(name, lives[name])
            lives[name] += 1
            fleet.up(name, lives[name])
        helping = fleet.controller._helping
        assert helping is not None
        busy = {order.worker for order in fleet.chunks.values()}
        pairs = [pair for pairs in helping._pairs.values() for pair in pairs]
        helpers = {pair.helper.worker for pair in pairs}
        helped = [pair.helped.worker for pair in pairs]
        assert helpers.isdisjoint(busy)
        assert set(helped) <= busy
        assert sorted(helped) == sorted(helping._helped)
        assert len(helped) == len(set(helped)) == len(helpers), "only who is there to draft helps several"
        assert all(
            place.life == lives[place.worker] for pair in pairs for place in (pair.helper, pair.helped)
        )


def test_workers_whose_role_is_to_draft_do_so_from_the_start_and_verify_nothing() -> None:
    fleet = Fleet(3, roles="2 verifiers + 1 drafter", help="none")
    fleet.submit(5000, 4000, 100, 100)
    assert {order.worker for order in fleet.chunks.values()} == {"w0", "w1"}
    for name in ("w0", "w1"):
        fleet.report(name)
    [both] = fleet.tick()
    assert isinstance(both, DraftFor)
    assert (both.worker, set(both.helped)) == ("w2", {"w0", "w1"})
    assert both.addresses == tuple(f"ipc://{name}/0" for name in both.helped)
    for index in [at for at, order in fleet.chunks.items() if order.worker == "w0"]:
        actions = fleet.end(index, 50)
    assert actions[-1] == DraftFor("w2", 0, ("w1",), ("ipc://w1/0",)), "the other one still runs"
    assert fleet.tick() == [], "a free verifier rests: help is none"
    for index in list(fleet.chunks):
        actions = fleet.end(index, 50)
    assert actions[-1] == Rest("w2", 0)


def test_verifiers_are_shared_out_evenly_among_drafters() -> None:
    fleet = Fleet(5, roles="3 verifiers + 2 drafters", help="none")
    fleet.submit(5000, 4000, 3000)
    for name in ("w0", "w1", "w2"):
        fleet.report(name)
    orders = fleet.tick()
    assert {len(order.helped) for order in orders if isinstance(order, DraftFor)} == {1, 2}
    assert sum(len(order.helped) for order in orders if isinstance(order, DraftFor)) == 3
    longest = fleet.chunks[0].worker
    [alone] = [order for order in orders if isinstance(order, DraftFor) and len(order.helped) == 1]
    assert alone.helped != (longest,), "the third to be helped came to the first one's drafter"


def test_drafters_verify_where_no_verifier_is_left() -> None:
    fleet = Fleet(3, roles="2 verifiers + 1 drafter", max_failed_starts=1)
    fleet.submit(500, 400)
    for name in ("w0", "w1"):
        assert "w2" not in {order.worker for order in fleet.chunks.values()}
        fleet.lose(name, 0)
    while fleet.chunks:
        assert {order.worker for order in fleet.chunks.values()} == {"w2"}
        fleet.end(min(fleet.chunks), 50)
    assert fleet.controller.num_unfinished == 0


@pytest.mark.parametrize("roles", ["3 + 1", "4 verifiers + 1 drafter", "1 verifiers + 3 drafters", ""])
def test_roles_that_cannot_be_are_refused(roles: str) -> None:
    with pytest.raises(ValueError, match="roles"):
        FleetSettings(workers=4, roles=roles)
    assert FleetSettings(workers=4, roles="3 verifiers + 1 drafter").num_drafters == 1
    assert FleetSettings(workers=4).num_drafters == 0


def test_a_lost_drafter_takes_nothing_along_and_drafts_again() -> None:
    fleet = Fleet(2, roles="1 verifier + 1 drafter")
    fleet.submit(5000, 400)
    fleet.report("w0")
    assert fleet.tick() == [DraftFor("w1", 0, ("w0",), ("ipc://w0/0",))]
    assert LoseDrafter("w0", 0) in fleet.lose("w1", 0)
    fleet.up("w1", 1)
    assert fleet.tick() == [DraftFor("w1", 1, ("w0",), ("ipc://w0/0",))]
    assert {order.worker for order in fleet.chunks.values()} == {"w0"}

"""Free workers lend their time to the drafter's trainer, event by event; at random: test_controller_events.py."""

from __future__ import annotations

import pytest
from reports import make_ending, make_growths

from paceline.config import FleetSettings
from paceline.control.controller import HELP_S, Controller
from paceline.control.events import (
    Abandoned,
    Action,
    Deliver,
    EndTraining,
    Event,
    Keep,
    Opened,
    Report,
    Reported,
    RunChunk,
    Submitted,
    Tick,
    TrainDrafter,
    WorkerLost,
    WorkerUp,
)
from paceline.fleet.controller_log import describe
from paceline.fleet.help_log import HelpLog
from paceline.types import RolloutRequest, StepCosts

COSTS = StepCosts(0.001, 0.01, 0.0, 1.0, 1.0, 0.0, 0.0)
"""A step takes as long as its batch is large."""
TOKENS = tuple(range(100, 140))


class World:
    """A rollout of which each of the first workers has a response, or the first all of them."""

    core_s: float | None = 0.5
    """Processor time that the trainer uses in each session; None: it does not run."""

    def __init__(
        self, num_workers: int = 3, num_responses: int = 1, trainers: int = 1, help: str = "none"
    ) -> None:
        settings = FleetSettings.model_validate({"workers": num_workers, "help": help, "variant": "sticky"})
        self.controller, self.log, self.now_s = Controller(settings), HelpLog(), 0.0
        self.tell(Opened())
        names = [f"w{number}" for number in range(num_workers)]
        first = names[:1] if help != "none" else names
        for name in first:
            self.tell(WorkerUp(name, 0, 0, 4000, 4, 16))
        requests = tuple(RolloutRequest((1,), 5000, key=i, group=i) for i in range(num_responses))
        actions = self.tell(Submitted(requests, trainers=trainers))
        self.chunks = {one.worker: one for one in actions if isinstance(one, RunChunk)}
        for name in names[len(first) :]:
            self.tell(WorkerUp(name, 0, 0, 4000, 4, 16))
        for one in actions:
            if isinstance(one, RunChunk):
                growths = make_growths(one.chunk, 0, TOKENS[:2])
                self.tell(Reported(one.worker, 0, Report(2, growths, costs=COSTS)))

    def tell(self, event: Event) -> list[Action]:
        actions = self.controller.decide(event)
        self.now_s += 0.01
        self.log.note(event, actions, self.now_s)
        for one in actions:
            if isinstance(one, EndTraining):
                self.log.end_training(one.worker, self.core_s, self.now_s)
        return actions

    def tick(self, passed_s: float = HELP_S) -> list[Action]:
        """What happens then, but for what is kept."""
        self.now_s += passed_s
        return [one for one in self.tell(Tick(self.now_s)) if not isinstance(one, Keep)]

    def end(self, worker: str) -> list[Action]:
        ending = make_ending(self.chunks[worker].chunk, 0, TOKENS[:4], "stop", num_told=2)
        return self.tell(Reported(worker, 0, Report(3, endings=(ending,))))


def test_one_free_worker_trains_at_a_time() -> None:
    world = World()
    assert list(world.chunks) == ["w0"]
    assert world.tick() == [TrainDrafter("w1", 0, "w1")]
    assert [world.controller.state_of(name) for name in ("w0", "w1", "w2")] == ["up", "training", "up"]
    assert world.tick() == []
    assert world.tell(WorkerLost("w1", 0, "killed"))[:2] == [
        EndTraining("w1", 0),
        TrainDrafter("w2", 0, "w2"),
    ]


def test_the_trainer_stops_before_its_worker_gets_a_chunk() -> None:
    world = World(num_workers=2)
    assert world.tick() == [TrainDrafter("w1", 0, "w1")]
    actions = world.tell(WorkerLost("w0", 0, "killed"))
    assert actions[0] == EndTraining("w1", 0)
    assert [one.worker for one in actions if isinstance(one, RunChunk)] == ["w1"]
    assert not any(isinstance(one, TrainDrafter) for one in actions)


def test_the_rollouts_end_is_the_trainings() -> None:
    world = World()
    world.tick()
    first, *others = world.end("w0")
    assert first == EndTraining("w1", 0)
    assert any(isinstance(one, Deliver) for one in others)
    assert world.tick() == []
    assert world.log.take() == []
    [span] = world.log.take_training()
    assert span.worker == "w1"
    assert span.end_s > span.start_s
    assert span.core_s == 0.5
    assert world.log.take_training() == []


def test_time_of_a_worker_that_no_trainer_used_is_not_harvested() -> None:
    world = World()
    world.core_s = None
    world.tick()
    world.end("w0")
    assert world.log.take_training() == []


def test_an_abandoned_rollout_trains_nobody() -> None:
    world = World()
    world.tick()
    assert world.tell(Abandoned())[0] == EndTraining("w1", 0)
    assert world.tick() == []


def test_nobody_trains_where_that_is_not_wanted() -> None:
    assert World(trainers=0).tick() == []


def test_a_worker_that_falls_free_waits_for_its_turn() -> None:
    world = World(num_responses=2)
    assert world.tick() == [TrainDrafter("w2", 0, "w2")]
    assert not any(isinstance(one, TrainDrafter | EndTraining) for one in world.end("w1"))
    assert world.tick() == []
    assert world.tell(WorkerLost("w2", 0, "killed"))[:2] == [
        EndTraining("w2", 0),
        TrainDrafter("w1", 0, "w1"),
    ]


@pytest.mark.parametrize(("num_responses", "num_helps"), [(2, 1), (1, 0)])
def test_help_comes_first(num_responses: int, num_helps: int) -> None:
    """Two responses are better shared; of one there is nothing to take."""
    actions = World(num_workers=2, num_responses=num_responses, help="take").tick()
    assert sum(isinstance(one, RunChunk) for one in actions) == num_helps
    assert sum(isinstance(one, TrainDrafter) for one in actions) == 1 - num_helps


def test_between_two_looks_for_help_no_session_begins() -> None:
    world = World(num_workers=2, help="take")
    world.tick()
    world.tell(WorkerLost("w1", 0, "killed"))
    world.tell(WorkerUp("w1", 1, 0, 4000, 4, 16))
    assert world.tick(HELP_S / 4) == []
    assert world.tick() == [TrainDrafter("w1", 1, "w1")]


def test_sessions_are_told_in_the_log() -> None:
    assert describe(TrainDrafter("w1", 0, "w2")) == "w1 (life 0) trains the drafter, w2 leads"
    assert describe(EndTraining("w1", 0)) == "w1 (life 0) trains no more"
    assert describe(EndTraining("w1", 0, "w2")) == "w1 (life 0) trains no more, w2 leads the others"


def test_as_many_train_as_there_are_trainers_and_the_first_to_fall_free_leads() -> None:
    world = World(num_workers=4, trainers=2)
    assert world.tick() == [TrainDrafter("w1", 0, "w1"), TrainDrafter("w2", 0, "w1")]
    assert [world.controller.state_of(f"w{at}") for at in range(4)] == ["up", "training", "training", "up"]


def test_a_place_that_falls_free_is_taken_and_the_others_go_on() -> None:
    world = World(num_workers=4, trainers=2)
    world.tick()
    actions = world.tell(WorkerLost("w2", 0, "killed"))
    assert actions[:2] == [EndTraining("w2", 0, "w1"), TrainDrafter("w3", 0, "w1")]


def test_another_one_leads_when_the_leader_is_gone() -> None:
    world = World(num_workers=4, trainers=2)
    world.tick()
    actions = world.tell(WorkerLost("w1", 0, "killed"))
    changes = [one for one in actions if isinstance(one, TrainDrafter | EndTraining)]
    leader = changes[-1].leader
    assert changes[0] == EndTraining("w1", 0, "w2")
    assert leader in {"w2", "w3"}
    assert changes[1:] == [TrainDrafter("w3", 0, leader)]

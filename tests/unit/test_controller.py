"""The controller's answers to single events; random orders of them are tests/property/test_controller_events.py."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from reports import make_ending, make_growths, pack

from paceline.config import FleetSettings
from paceline.control.controller import MOST_FAILURES, Controller
from paceline.control.events import (
    Abandoned,
    Action,
    CancelChunk,
    Deliver,
    Event,
    Fail,
    Growth,
    Growths,
    Keep,
    Kept,
    LoadWeights,
    Opened,
    Report,
    Reported,
    RunChunk,
    StartWorker,
    StopWorker,
    Submitted,
    Tick,
    WeightsChanged,
    WeightsLoaded,
    WorkerLost,
    WorkerUp,
)
from paceline.control.live_response import LiveResponse
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.types import Response, RolloutRequest


def request(key: int, max_tokens: int = 20, generated: tuple[int, ...] = ()) -> RolloutRequest:
    return RolloutRequest(
        (1, 2, 3, 4), max_tokens, key=key, group=key // 10, sample=key % 10, generated=generated
    )


def controller(workers: int = 1, **fields: object) -> Controller:
    made = Controller(FleetSettings.model_validate({"workers": workers, "chunk_tokens": 8, **fields}))
    made.decide(Opened())
    return made


def up(worker: str = "w0", life: int = 0, blocks: int = 100) -> WorkerUp:
    return WorkerUp(worker, life, 0, blocks, 4, 10)


def grown(chunk: int, start: int, *tokens: int) -> Report:
    return Report(1, make_growths(chunk, start, tokens))


def ended(chunk: int, start: int, *tokens: int, reason: str = "stop", num_told: int = 0) -> Report:
    return Report(2, endings=(make_ending(chunk, start, tokens, reason, num_told=num_told),))


def run_of(actions: list[Action]) -> list[RunChunk]:
    return [action for action in actions if isinstance(action, RunChunk)]


def failure_of(actions: list[Action], kind: type[PacelineError]) -> str:
    [failure] = (action for action in actions if isinstance(action, Fail))
    assert failure.error is kind
    return failure.message


def listen(fleet: Controller, first_s: int, last_s: int) -> list[Action]:
    return [action for now_s in range(first_s, last_s + 1) for action in fleet.decide(Tick(float(now_s)))]


def test_every_worker_is_started() -> None:
    actions = Controller(FleetSettings(workers=3)).decide(Opened())
    assert actions == [StartWorker("w0", 0), StartWorker("w1", 0), StartWorker("w2", 0)]


def test_a_response_runs_in_chunks_until_it_stops() -> None:
    fleet = controller()
    fleet.decide(up())
    [first] = fleet.decide(Submitted((request(1),)))
    assert first == RunChunk("w0", 0, 0, request(1, max_tokens=8), 0, 0)
    [second] = fleet.decide(Reported("w0", 0, ended(0, 0, *range(8), reason="length")))
    assert isinstance(second, RunChunk)
    assert second.request == request(1, max_tokens=16, generated=tuple(range(8)))
    kept, done = fleet.decide(Reported("w0", 0, ended(1, 8, 8, 9)))
    assert kept == Keep(0, 0, pack(range(10)), 4, 10, "stop")
    assert isinstance(done, Deliver)
    assert done.response.tokens == tuple(range(10))
    assert (done.response.num_steps, done.response.num_draft_tokens) == (4, 10)
    assert done.response.num_accepted_tokens == 6
    assert fleet.num_unfinished == 0


def test_an_ending_tells_what_growths_have_not() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, grown(0, 0, 7, 8)))
    _, done = fleet.decide(Reported("w0", 0, ended(0, 0, 7, 8, 9, num_told=2)))
    assert isinstance(done, Deliver)
    assert done.response.tokens == (7, 8, 9)
    assert done.response.logprobs == (-1.0,) * 3


def test_a_report_that_was_lost_costs_what_it_told() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, grown(0, 0, 7)))
    fleet.decide(Reported("w0", 0, grown(0, 3, 5)))
    [again] = fleet.decide(Reported("w0", 0, ended(0, 0, 7, 8, 9, 5, 2, num_told=4)))
    assert isinstance(again, RunChunk)
    assert again.request.generated == (7,)
    _, done = fleet.decide(Reported("w0", 0, ended(again.chunk, 1, 8, 9, 5, 2)))
    assert isinstance(done, Deliver)
    assert done.response.tokens == (7, 8, 9, 5, 2)


@pytest.mark.parametrize("wrong", [(7, 4, 9), (7, 8, 4)])
def test_what_a_worker_generated_and_what_came_are_compared(wrong: tuple[int, ...]) -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, grown(0, 0, *wrong)))
    with pytest.raises(EngineError, match="tokens 0 to 4 are not those that their worker generated"):
        fleet.decide(Reported("w0", 0, ended(0, 0, 7, 8, 9, 2, num_told=3)))


def test_log_probabilities_are_compared_too() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, grown(0, 0, 7, 8)))
    ending = make_ending(0, 0, (7, 8, 9), "stop", num_told=2, logprob=-1.0000001)
    with pytest.raises(EngineError, match="tokens 0 to 3 are not those that their worker generated"):
        fleet.decide(Reported("w0", 0, Report(2, endings=(ending,))))


def test_what_has_grown_is_kept_once_a_second() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Tick(0.0))
    fleet.decide(Submitted((request(1), request(2))))
    fleet.decide(Reported("w0", 0, grown(0, 0, 4)))
    fleet.decide(Reported("w0", 0, grown(0, 1, 5)))
    assert fleet.decide(Tick(0.5)) == []
    assert fleet.decide(Tick(1.0)) == [Keep(0, 0, pack((4, 5)), 1, 0, None)]
    assert fleet.decide(Tick(2.0)) == []
    fleet.decide(Reported("w0", 0, grown(0, 2, 6)))
    assert fleet.decide(Abandoned())[0] == Keep(0, 2, pack((6,)), 1, 0, None), "whatever ends a rollout"


def test_a_rollout_waits_for_the_first_worker() -> None:
    fleet = controller(2)
    assert fleet.decide(Submitted((request(1), request(2)))) == []
    assert len(run_of(fleet.decide(up("w1")))) == 2


def test_a_lost_worker_costs_what_was_not_told() -> None:
    fleet = controller(2)
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, grown(0, 0, 5, 6, 7)))
    assert fleet.decide(WorkerLost("w0", 0, "killed")) == [StartWorker("w0", 1)]
    [again] = fleet.decide(up("w1"))
    assert isinstance(again, RunChunk)
    assert again.request.generated == (5, 6, 7)
    assert again.worker == "w1"
    late = Reported("w0", 0, ended(0, 0, 5, 6, 7, 8))
    assert fleet.decide(late) == []
    assert fleet.decide(WorkerLost("w0", 0, "killed")) == []


def test_only_the_worker_of_a_chunk_may_tell_of_it() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    fleet.decide(up("w1"))
    [run] = run_of(fleet.decide(Submitted((request(1),))))
    other = "w1" if run.worker == "w0" else "w0"
    assert fleet.decide(Reported(other, 0, ended(run.chunk, 0, 4))) == []
    assert fleet.num_unfinished == 1


def test_new_weights_reach_a_worker_before_any_chunk() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    assert fleet.decide(WeightsChanged(1)) == [LoadWeights("w0", 0, 1)]
    assert fleet.decide(up("w1")) == [LoadWeights("w1", 0, 1)]
    assert fleet.decide(Submitted((request(1),))) == []
    [run] = fleet.decide(WeightsLoaded("w1", 0, 1))
    assert isinstance(run, RunChunk)
    assert (run.worker, run.version) == ("w1", 1)
    fleet.decide(Reported("w1", 0, ended(0, 0, 4)))
    assert fleet.decide(WeightsChanged(2)) == [LoadWeights("w1", 0, 2)], "w0 still loads the version before"
    assert fleet.decide(WeightsLoaded("w0", 0, 1)) == [LoadWeights("w0", 0, 2)]


def test_a_worker_that_came_up_late_joins_the_next_rollout_once() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    fleet.decide(WeightsChanged(1))
    fleet.decide(WeightsLoaded("w0", 0, 1))
    fleet.decide(Submitted((request(1),)))
    loads = fleet.decide(up("w1"))
    fleet.decide(Reported("w0", 0, ended(0, 0, 4)))
    loads += fleet.decide(WeightsChanged(2))
    fleet.decide(WeightsLoaded("w0", 0, 2))
    runs: list[RunChunk] = []
    requests = tuple(request(key) for key in range(20, 30))
    while loads:  # whatever w1 was given is answered, in order
        load = loads.pop(0)
        if isinstance(load, LoadWeights) and load.worker == "w1":
            loads += fleet.decide(WeightsLoaded("w1", load.life, load.version))
        if fleet.state_of("w1") == "up" and not runs:
            runs = run_of(fleet.decide(Submitted(requests)))
    assert {run.worker for run in runs} == {"w0", "w1"}


def test_a_worker_that_refuses_a_chunk_gets_the_weights_it_missed() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(WeightsChanged(1))
    fleet.decide(WeightsLoaded("w0", 0, 1))
    fleet.decide(Submitted((request(1),)))
    actions = fleet.decide(Reported("w0", 0, Report(0, refused=(0,))))
    assert actions == [CancelChunk("w0", 0, 0), LoadWeights("w0", 0, 1)]
    assert len(run_of(fleet.decide(WeightsLoaded("w0", 0, 1)))) == 1


def test_a_worker_that_has_not_even_the_models_own_weights_is_replaced() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    fleet.decide(up("w1"))
    fleet.decide(Submitted((request(1),)))
    stop, start, run = fleet.decide(Reported("w0", 0, Report(0, refused=(0,))))
    assert (stop, start) == (StopWorker("w0", 0), StartWorker("w0", 1))
    assert isinstance(run, RunChunk)
    assert run.worker == "w1"


def test_weights_have_to_wait_for_the_rollout() -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    with pytest.raises(EngineError, match="1 responses are running"):
        fleet.decide(WeightsChanged(1))
    with pytest.raises(RequestError, match="1 responses are still running"):
        fleet.decide(Submitted((request(2),)))
    assert fleet.decide(Abandoned()) == [CancelChunk("w0", 0, 0)]
    assert fleet.decide(WeightsChanged(1)) == [LoadWeights("w0", 0, 1)]


def test_what_an_earlier_run_finished_is_delivered_and_the_rest_goes_on() -> None:
    fleet = controller()
    fleet.decide(up())
    kept = {0: Kept(pack((4, 5)), 2, 1, "stop"), 1: Kept(pack((6,), -2.0), 1)}
    delivered, run = fleet.decide(Submitted((request(1), request(2)), kept))
    assert isinstance(delivered, Deliver)
    assert delivered.response.tokens == (4, 5)
    assert isinstance(run, RunChunk)
    assert run.request.generated == (6,)
    _, done = fleet.decide(Reported("w0", 0, ended(0, 1, 7)))
    assert isinstance(done, Deliver)
    assert done.response.tokens == (6, 7)
    assert done.response.logprobs == (-2.0, -1.0)
    assert done.response.num_steps == 3


def test_a_silent_worker_is_replaced() -> None:
    fleet = controller(silence_s=10.0, start_timeout_s=50.0)
    fleet.decide(up())
    assert listen(fleet, 0, 100) == [], "nothing is expected of an idle worker"
    fleet.decide(Submitted((request(1),)))
    assert listen(fleet, 101, 111) == []
    fleet.decide(Reported("w0", 0, grown(0, 0, 4)))
    [kept, *later] = listen(fleet, 112, 122)
    assert isinstance(kept, Keep)
    assert later == []
    assert listen(fleet, 123, 123) == [StopWorker("w0", 0), StartWorker("w0", 1)]
    assert listen(fleet, 124, 174) == []
    assert listen(fleet, 175, 175) == [StopWorker("w0", 1), StartWorker("w0", 2)], (
        "it does not come up either"
    )


def test_a_driver_that_was_busy_has_heard_nobody() -> None:
    fleet = controller(2, silence_s=10.0, start_timeout_s=50.0)
    fleet.decide(up("w0"))
    fleet.decide(Submitted((request(1),)))
    assert listen(fleet, 0, 5) == []
    assert fleet.decide(Tick(10_000.0)) == []
    assert listen(fleet, 10_001, 10_004) == []
    assert listen(fleet, 10_005, 10_005) == [StopWorker("w0", 0), StartWorker("w0", 1)], (
        "w0 was silent for 11 s"
    )


def test_a_worker_that_never_generates_is_given_up() -> None:
    fleet = controller(2, max_failed_starts=2)
    fleet.decide(WorkerLost("w0", 0, "no memory"))
    assert fleet.decide(WorkerLost("w0", 1, "no memory")) == []
    assert fleet.state_of("w0") == "given up"
    fleet.decide(WorkerLost("w1", 0, "no memory"))
    failure = failure_of(fleet.decide(WorkerLost("w1", 1, "no disk")), EngineError)
    assert "lost 2 times in a row before it generated anything, w1 last: no disk" in failure
    with pytest.raises(EngineError, match="no worker is left, all have been given up: start another fleet"):
        fleet.decide(Submitted((request(1),)))
    assert fleet.num_unfinished == 0


def test_a_worker_that_waits_for_room_is_waited_for_while_another_is_up() -> None:
    fleet = controller(2, max_failed_starts=2, start_timeout_s=3.0)
    fleet.decide(up())
    listen(fleet, 0, 50)
    assert (fleet.state_of("w0"), fleet.state_of("w1")) == ("up", "starting")
    life = fleet._workers["w1"].life
    assert life > 2
    for _ in range(2):  # one that fails to start is another matter
        fleet.decide(WorkerLost("w1", life, "killed"))
        life += 1
    assert fleet.state_of("w1") == "given up"


def test_a_verifier_that_never_starts_is_given_up_where_drafters_alone_are_up() -> None:
    """Then the drafters verify."""
    fleet = controller(
        2, roles="1 verifiers + 1 drafters", help="draft", max_failed_starts=2, start_timeout_s=3.0
    )
    fleet.decide(up("w1"))
    fleet.decide(Submitted((request(1),)))
    [run] = run_of(listen(fleet, 0, 50))
    assert run.worker == "w1"


def test_workers_that_never_start_are_given_up_where_none_is_up() -> None:
    fleet = controller(2, max_failed_starts=2, start_timeout_s=3.0)
    assert "no worker is left" in failure_of(listen(fleet, 0, 50), EngineError)


def test_the_last_workers_end_names_what_they_ran() -> None:
    fleet = controller(max_failed_starts=1)
    fleet.decide(up())
    fleet.decide(Submitted((request(1), request(2))))
    failure = failure_of(fleet.decide(WorkerLost("w0", 0, "killed")), EngineError)
    assert "w0 last while it ran responses 0, 1: killed" in failure


def test_a_worker_that_has_generated_begins_anew() -> None:
    fleet = controller(max_failed_starts=2)
    for life in range(5):
        fleet.decide(up(life=life))
        if fleet.num_unfinished == 0:
            fleet.decide(Submitted((request(1, max_tokens=90),)))
        fleet.decide(Reported("w0", life, grown(life, life, 40 + life)))
        assert fleet.decide(WorkerLost("w0", life, "killed")) == [StartWorker("w0", life + 1)]


def test_a_worker_that_has_generated_may_be_lost_while_loading() -> None:
    fleet = controller(max_failed_starts=1)
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    fleet.decide(Reported("w0", 0, ended(0, 0, 4, 5)))
    assert fleet.decide(WeightsChanged(1)) == [LoadWeights("w0", 0, 1)]
    assert fleet.decide(WorkerLost("w0", 0, "killed")) == [StartWorker("w0", 1)]


@pytest.mark.parametrize("on_failure", ["deliver", "raise"])
def test_a_response_that_ends_its_workers_is_named(on_failure: str) -> None:
    fleet = controller(4, max_crashes=2, on_failure=on_failure)
    for name in fleet.workers:
        fleet.decide(up(name))
    runs = run_of(fleet.decide(Submitted(tuple(request(key, max_tokens=90) for key in range(8)))))
    placed = {run.request.key: (run.worker, run.chunk) for run in runs}
    for key in range(1, 8):
        worker, chunk = placed[key]
        fleet.decide(Reported(worker, 0, grown(chunk, 0, 4)))
    for _ in range(2):
        worker, _ = placed[0]
        actions = fleet.decide(WorkerLost(worker, 0, "killed"))
        placed |= {run.request.key: (run.worker, run.chunk) for run in run_of(actions)}
    worker, _ = placed[0]
    actions = fleet.decide(WorkerLost(worker, 0, "bad memory access"))
    assert actions[0] == StartWorker(worker, 1), "the fleet is whole for the next rollout"
    why = (
        "got no token from 3 workers in a row that were lost when nothing else had just begun there, the last one "
        "thus: bad memory access"
    )
    if on_failure == "raise":
        assert not run_of(actions)
        failure = failure_of(actions, EngineError)
        assert failure.startswith(f"response 0 {why}; leave it out, or raise max_crashes (2)")
        return
    assert {run.index for run in run_of(actions)} <= set(range(1, 8)), "the others of that worker go on"
    delivered = actions[1]
    assert isinstance(delivered, Deliver)
    assert (delivered.index, delivered.response.finish_reason) == (0, "error")
    assert delivered.response.failure is not None
    assert delivered.response.failure.startswith(why)
    assert fleet.num_unfinished == 7


@dataclass
class Engines:
    """A fleet of two workers that runs eight responses."""

    fleet: Controller
    running: dict[str, dict[int, RunChunk]] = field(default_factory=lambda: {"w0": {}, "w1": {}})
    failed: list[int] = field(default_factory=list)
    num_told: Counter[int] = field(default_factory=Counter)  # tokens, by chunk

    def tell(self, event: Event) -> None:
        for action in self.fleet.decide(event):
            match action:
                case RunChunk(worker, _, chunk):
                    self.running[worker][chunk] = action
                case Deliver(index, response) if response.failure is not None:
                    self.failed.append(index)

    def grow(self, worker: str, life: int, chunks: Iterable[int]) -> None:
        """These chunks tell a token each."""
        told = []
        for chunk in chunks:
            order, place = self.running[worker][chunk], self.num_told[chunk]
            self.num_told[chunk] += 1
            told.append(Growth(chunk, len(order.request.generated) + place, pack([4]), place + 1))
        self.tell(Reported(worker, life, Report(1, Growths.pack(told))))

    def lose(self, worker: str, life: int) -> None:
        self.running[worker].clear()
        self.tell(WorkerLost(worker, life, "killed"))
        self.tell(up(worker, life + 1))


@pytest.fixture
def engines() -> Engines:
    made = Engines(controller(2))
    made.tell(up("w0"))
    made.tell(up("w1"))
    made.tell(Submitted(tuple(request(key, max_tokens=90) for key in range(8))))
    return made


def test_workers_that_are_killed_again_and_again_cost_no_response(engines: Engines) -> None:
    """At random, by whatever frees memory on their machine; prompts are computed one after another."""
    rng = random.Random(4)
    for life in range(20):
        for worker, running in engines.running.items():
            for _ in range(rng.randint(1, 6)):
                new = [chunk for chunk in running if not engines.num_told[chunk]]
                engines.grow(worker, life, new[:1])
            engines.lose(worker, life)
    assert engines.failed == []
    assert engines.fleet.num_unfinished == 8


def test_what_ends_its_workers_is_found_among_others_that_began_with_it(engines: Engines) -> None:
    lives = Counter({"w0": 0, "w1": 0})
    for _ in range(40):
        for worker, running in engines.running.items():
            healthy = [chunk for chunk, order in running.items() if order.index != 3]
            engines.grow(worker, lives[worker], [chunk for chunk in healthy if not engines.num_told[chunk]])
            if len(healthy) < len(running):
                engines.lose(worker, lives[worker])
                lives[worker] += 1
    assert engines.failed == [3]
    assert lives.total() == 4, "at first it alone had no token"


def test_a_suspect_begins_alone(engines: Engines) -> None:
    running = engines.running["w1"]
    for worker in ("w0", "w1"):
        engines.grow(worker, 0, list(engines.running[worker])[:1])
    engines.lose("w0", 0)
    assert len(running) == 4, "others have no token yet"
    engines.grow("w1", 0, list(running)[1:])
    for number in (5, 6, 7, 8):
        assert len(running) == number
        engines.grow("w1", 0, list(running)[-1:])
    assert list(running.values())[-1].index == 0, "what had a token on w0 is no suspect"


def test_a_worker_that_never_worked_is_not_held_against_a_response() -> None:
    fleet = controller(max_failed_starts=3, max_crashes=0)
    fleet.decide(Submitted((request(1),)))
    for life in range(2):
        fleet.decide(up(life=life))
        assert fleet.decide(WorkerLost("w0", life, "killed")) == [StartWorker("w0", life + 1)]


class Poison:
    """One worker, which some responses end before they have a token; all others end well."""

    def __init__(self, poison: set[int], groups: Sequence[int], **settings: object) -> None:
        self.fleet = controller(**{"max_failed_starts": 3, "max_crashes": 2, **settings})
        self.poison, self.num_lives = poison, 0
        self.delivered: dict[int, Response] = {}
        self.running: list[RunChunk] = []
        self.fleet.decide(up())
        requests = [
            replace(request(key), prompt=(1, 2, group), group=group) for key, group in enumerate(groups, 1)
        ]
        self.hear(self.fleet.decide(Submitted(tuple(requests))))

    def hear(self, actions: list[Action]) -> None:
        self.running += run_of(actions)
        self.delivered |= {one.index: one.response for one in actions if isinstance(one, Deliver)}

    def roll_out(self) -> None:
        """Until the rollout has ended, or the fleet's last worker. Who ends workers is the last to be generated."""
        while self.fleet.num_unfinished:
            run = min(self.running, key=lambda one: one.index in self.poison)
            if run.index not in self.poison:
                self.running.remove(run)
                self.hear(self.fleet.decide(Reported("w0", self.num_lives, ended(run.chunk, 0, 4, 5))))
                continue
            self.running.clear()
            self.hear(self.fleet.decide(WorkerLost("w0", self.num_lives, "killed")))
            self.num_lives += 1
            if self.fleet.state_of("w0") == "given up":
                break
            self.hear(self.fleet.decide(up(life=self.num_lives)))


@pytest.mark.parametrize("max_crashes", [0, 2, 7])
def test_what_ends_the_only_worker_is_found_although_nothing_else_is_left(max_crashes: int) -> None:
    world = Poison({0}, range(4), max_crashes=max_crashes)
    world.roll_out()
    assert world.num_lives == max_crashes + 1
    assert [index for index, one in world.delivered.items() if one.failure] == [0]
    assert len(world.delivered) == 4


def test_a_prompt_that_ends_workers_costs_each_further_response_one() -> None:
    world = Poison({0, 1, 2, 3}, [7, 7, 7, 7, 8])
    world.roll_out()
    assert world.num_lives - 1 <= (2 + 1) + 3, "at the first loss all of them had just begun"
    failures = [world.delivered[index].failure or "" for index in range(5)]
    assert sum("from 3 workers in a row" in failure for failure in failures) == 1
    assert sum("as 3 were with another response to its prompt" in failure for failure in failures) == 3
    assert not failures[4]


def test_one_response_is_blamed_until_the_worker_has_generated_again() -> None:
    """Else one that breaks for another reason would end all that is left."""
    world = Poison({0, 1}, [7, 8, 9])
    world.roll_out()
    assert [index for index, one in world.delivered.items() if one.failure] in ([0], [1])
    assert world.fleet.state_of("w0") == "given up"


def test_a_prompt_is_acquitted_by_a_token() -> None:
    world = Poison({0}, [7, 7, 8])
    world.roll_out()
    assert [index for index, one in world.delivered.items() if one.failure] == [0]


def test_a_delivered_response_is_forgotten() -> None:
    def count() -> int:
        gc.collect()
        return sum(isinstance(one, LiveResponse) for one in gc.get_objects())

    before = count()
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1), request(2))))
    assert count() == before + 2
    fleet.decide(Reported("w0", 0, ended(0, 0, 4, 5)))
    assert count() == before + 1


def test_a_rollout_is_not_stuck_while_a_larger_worker_is_starting() -> None:
    fleet = controller(2)
    fleet.decide(up("w1", blocks=30))
    fleet.decide(Submitted((request(1, max_tokens=100, generated=(4,) * 20), request(2, max_tokens=4))))
    fleet.decide(WorkerLost("w1", 0, "killed"))
    [run] = run_of(fleet.decide(up("w0", blocks=3)))
    assert run.request.key == 2
    kept, delivered = fleet.decide(Reported("w0", 0, ended(run.chunk, 0, 4)))
    assert isinstance(kept, Keep)
    assert isinstance(delivered, Deliver)
    assert len(run_of(fleet.decide(up("w1", life=1, blocks=30)))) == 1


def test_a_rollout_that_is_stuck_keeps_what_it_has() -> None:
    fleet = controller(2, max_failed_starts=1)
    fleet.decide(up("w1", blocks=30))
    fleet.decide(Submitted((request(1, max_tokens=100, generated=(4,) * 20), request(2, max_tokens=4))))
    fleet.decide(WorkerLost("w1", 0, "killed"))
    [run] = run_of(fleet.decide(up("w0", blocks=3)))
    actions = fleet.decide(Reported("w0", 0, ended(run.chunk, 0, 4)))
    assert [type(action) for action in actions] == [Keep, Deliver, Fail]
    assert "may need 26 KV blocks of 4 tokens" in failure_of(actions, RequestError)


def test_requests_that_cannot_run_are_refused() -> None:
    fleet = controller()
    fleet.decide(up(blocks=3))
    with pytest.raises(RequestError, match="may need 6 KV blocks of 4 tokens"):
        fleet.decide(Submitted((request(1),)))
    fleet.decide(Abandoned())
    with pytest.raises(RequestError, match="max_tokens=2 is already reached"):
        fleet.decide(Submitted((request(1, max_tokens=2, generated=(4, 5)),)))


def test_a_failed_response_is_delivered_as_far_as_it_came_and_the_others_go_on() -> None:
    fleet = controller()
    fleet.decide(up())
    first, second = run_of(fleet.decide(Submitted((request(1), request(2)))))
    fleet.decide(Reported("w0", 0, grown(first.chunk, 0, 4)))
    failed = make_ending(first.chunk, 0, (4, 5), "error", num_told=1)
    [delivered] = fleet.decide(Reported("w0", 0, Report(2, endings=(replace(failed, failure="NaN"),))))
    assert isinstance(delivered, Deliver)
    response = delivered.response
    assert (response.tokens, response.finish_reason) == ((4, 5), "error")
    assert response.failure == "failed on worker w0: NaN"
    assert fleet.num_unfinished == 1
    [rejected] = fleet.decide(Reported("w0", 0, Report(3, rejected=((second.chunk, "bad"),))))
    assert isinstance(rejected, Deliver)
    assert rejected.response.failure == "cannot run on worker w0: bad"
    assert fleet.num_unfinished == fleet.num_running == 0
    assert len(run_of(fleet.decide(Submitted((request(3),))))) == 1


def failed(chunk: int, start: int, *tokens: int) -> Report:
    return Report(2, endings=(replace(make_ending(chunk, start, tokens, "error"), failure="NaN"),))


@pytest.mark.parametrize("told", [failed(0, 0, 4), Report(2, rejected=((0, "NaN"),))])
def test_a_response_that_fails_is_given_up_once_a_second_worker_has_failed_it(told: Report) -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    [first] = run_of(fleet.decide(Submitted((request(1),))))
    fleet.decide(up("w1"))
    [again] = run_of(fleet.decide(Reported("w0", 0, told)))
    assert (first.worker, again.worker) == ("w0", "w1")
    start = len(again.request.generated)
    [delivered] = fleet.decide(Reported("w1", 0, failed(again.chunk, start)))
    assert isinstance(delivered, Deliver)
    assert delivered.response.failure == "failed on worker w1, as on w0 before: NaN"
    assert fleet.state_of("w0") == "up"


def test_a_worker_that_fails_what_another_one_generates_is_replaced() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    runs = run_of(fleet.decide(Submitted((request(1), request(2)))))
    fleet.decide(up("w1"))
    [again] = run_of(fleet.decide(Reported("w0", 0, failed(runs[0].chunk, 0, 4, 5))))
    assert (again.worker, again.request.generated) == ("w1", (4, 5))
    actions = fleet.decide(Reported("w1", 0, grown(again.chunk, 2, 6)))
    assert actions[:2] == [StopWorker("w0", 0), StartWorker("w0", 1)]
    assert [(run.worker, run.index) for run in run_of(actions)] == [("w1", 1)]


def test_what_had_just_begun_on_a_worker_that_is_replaced_is_no_suspect() -> None:
    fleet = controller(2, max_crashes=0)
    fleet.decide(up("w0"))
    runs = run_of(fleet.decide(Submitted(tuple(map(request, range(1, 6))))))
    fleet.decide(Reported("w0", 0, grown(runs[0].chunk, 0, 4)))
    fleet.decide(up("w1"))
    [again] = run_of(fleet.decide(Reported("w0", 0, failed(runs[0].chunk, 0, 4, 5))))
    actions = fleet.decide(Reported("w1", 0, grown(again.chunk, 2, 6)))
    assert sorted(run.index for run in run_of(actions)) == [1, 2, 3, 4], "all at once"


def test_a_response_that_fails_now_here_now_there_is_given_up() -> None:
    """Each engine brings a token, which refutes the other one, and fails then: else it would cost an engine a token."""
    fleet = controller(2)
    fleet.decide(up("w0"))
    [run] = run_of(fleet.decide(Submitted((request(1),))))
    fleet.decide(up("w1"))
    num_starts = 0
    for token in range(20):
        begun = [
            action
            for action in fleet.decide(Reported(run.worker, run.life, grown(run.chunk, token, token)))
            if isinstance(action, StartWorker)
        ]
        for start in begun:
            fleet.decide(up(start.worker, start.life))
        num_starts += len(begun)
        first = len(run.request.generated)
        told = failed(run.chunk, first, *range(first, token + 1))
        actions = fleet.decide(Reported(run.worker, run.life, told))
        if any(isinstance(action, Deliver) for action in actions):
            break
        [run] = run_of(actions)
    assert fleet.num_unfinished == 0
    assert num_starts == MOST_FAILURES - 1


def test_nothing_else_is_given_out_while_a_failed_response_waits_for_another_worker() -> None:
    fleet = controller(2)
    fleet.decide(up("w0"))
    fleet.decide(WorkerUp("w1", 0, 0, 100, 4, 1))
    runs = run_of(fleet.decide(Submitted(tuple(request(10 * key) for key in range(12)))))
    assert fleet.num_waiting == 1
    mine = next(run for run in runs if run.worker == "w0")
    assert fleet.decide(Reported("w0", 0, failed(mine.chunk, 0))) == []
    assert [one.key for one in fleet.next_waiting(2)] == [mine.request.key, 110]
    theirs = next(run for run in runs if run.worker == "w1")
    given = run_of(fleet.decide(Reported("w1", 0, ended(theirs.chunk, 0, 7))))
    assert [(run.worker, run.request.key) for run in given] == [("w1", mine.request.key), ("w0", 110)]


def test_what_fails_everywhere_is_delivered_and_the_fleet_goes_on() -> None:
    fleet = controller(3)
    for name in fleet.workers:
        fleet.decide(up(name))
    orders = run_of(fleet.decide(Submitted(tuple(map(request, range(50))))))
    failures: list[str | None] = []
    while orders:
        run = orders.pop(0)
        actions = fleet.decide(Reported(run.worker, run.life, failed(run.chunk, 0)))
        failures += [one.response.failure for one in actions if isinstance(one, Deliver)]
        orders += run_of(actions)
    assert len(failures) == 50
    assert all("before: NaN" in str(failure) for failure in failures)
    assert {fleet.state_of(name) for name in fleet.workers} == {"up"}


def test_the_length_of_a_failed_response_tells_nothing_about_its_group() -> None:
    """It would make the group look short, and its other responses run last."""
    fleet = controller(variant="context", guard_interval=0)
    fleet.decide(up(blocks=1000))
    requests = tuple(request(key) for key in (10, 11, 20, 21))
    fleet.decide(WorkerLost("w0", 0, "killed"))
    fleet.decide(WorkerUp("w0", 1, 0, 1000, 4, 2))
    first, second = run_of(fleet.decide(Submitted(requests)))
    assert [first.request.key, second.request.key] == [10, 20]
    [_, run] = fleet.decide(Reported("w0", 1, Report(1, rejected=((first.chunk, "bad"),))))
    assert isinstance(run, RunChunk)
    assert run.request.key == 11, "as long as group 2 for all that is known, and submitted first"


def test_a_rejected_chunk_ends_the_rollout_with_what_it_has() -> None:
    fleet = controller(on_failure="raise")
    fleet.decide(up())
    first, second = run_of(fleet.decide(Submitted((request(1, max_tokens=4), request(2, max_tokens=4)))))
    growth = grown(second.chunk, 0, 4).growths
    actions = fleet.decide(Reported("w0", 0, Report(1, growth, rejected=((first.chunk, "bad"),))))
    assert actions[-1] == Keep(1, 0, pack((4,)), 1, 0, None)
    assert failure_of(actions, RequestError) == "response 0 cannot run on worker w0: bad"


@pytest.mark.parametrize(
    "report",
    [
        grown(0, 0, *range(8)),
        grown(0, 6, 1, 2, 3),
        ended(0, 0, *range(9)),
        ended(0, 0, 1, 2, reason="length"),
        ended(0, 2, 3),
    ],
)
def test_reports_that_cannot_be_are_errors(report: Report) -> None:
    fleet = controller()
    fleet.decide(up())
    fleet.decide(Submitted((request(1),)))
    with pytest.raises(EngineError, match="worker w0"):
        fleet.decide(Reported("w0", 0, report))


def test_oracle_runs_the_longest_first_and_group_does_not_divide() -> None:
    requests = tuple(request(key) for key in (1, 2, 3))
    oracle = controller(variant="oracle")
    oracle.decide(up())
    runs = run_of(oracle.decide(Submitted(requests, true_lengths=(5, 19, 12))))
    assert [run.request.sample for run in runs] == [2, 3, 1]
    bound = controller(2, variant="group")
    bound.decide(up("w0"))
    bound.decide(up("w1"))
    runs = run_of(bound.decide(Submitted(requests)))
    assert {run.worker for run in runs} == {"w0"}
    assert {run.request.max_tokens for run in runs} == {20}


def test_who_runs_next_is_foreseen() -> None:
    fleet = controller()
    assert fleet.next_waiting(5) == []
    fleet.decide(up(blocks=6))
    requests = tuple(request(key) for key in (10, 20, 11, 21))
    runs = run_of(fleet.decide(Submitted(requests)))
    assert [run.request.key for run in runs] == [10, 20]
    assert [r.key for r in fleet.next_waiting(1)] == [11]
    assert [r.key for r in fleet.next_waiting(9)] == [11, 21]
    fleet.decide(Abandoned())
    assert fleet.next_waiting(5) == []

"""Free workers copy stragglers and take them over; whoever is killed meanwhile, no token is another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import ENGINE, KV_BYTES, POLICY, Generate
from saboteurs import roll_out
from vllm import SamplingParams

from paceline.config import EngineSettings, FleetSettings
from paceline.control import helping
from paceline.fleet import controller_replay
from paceline.fleet.fleet import Fleet
from paceline.planning.help import Help, HelpChoice, Helper, Load
from paceline.record.decisions import ControllerLine, DecisionReader
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)


def choose_copy(load: Load, helper: Helper) -> HelpChoice:
    is_possible = helper.can_copy and not load.is_helped
    return HelpChoice(Help.COPY if is_possible else Help.NOTHING, 0.0)


@pytest.fixture(autouse=True)
def _no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """On equal workers copies bring nothing, and would be ended."""
    monkeypatch.setattr(helping, "judge_help", lambda *_: None)


def choose_take(load: Load, helper: Helper) -> HelpChoice:
    is_possible = helper.can_take and len(load.steps) > 1
    return HelpChoice(Help.TAKE if is_possible else Help.NOTHING, 0.0, num_taken=1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="module")
def fleet(ray: Any, logs: Path) -> Iterator[Fleet]:
    """Two workers that share suffix trees and a KV pool."""
    settings = FleetSettings(workers=2, help="auto", chunk_tokens=256, progress_ms=20.0)
    engine = EngineSettings(run_seed=3, decision_log=str(logs))
    with Fleet(POLICY, settings, engine, kv_cache_bytes=KV_BYTES, **ENGINE) as made:
        made._wait_while(lambda: "starting" in made._states())
        yield made


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[RolloutRequest]:
    """Two stragglers, and short ones that need as many KV blocks, so that dispatch parts them."""
    lengths = (1300, 60, 60, 1200, 60, 60)
    return [RolloutRequest(prompts[i % len(prompts)], n, sample=i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def wanted(plain: Generate, requests: list[RolloutRequest]) -> list[tuple[int, ...]]:
    return [response.tokens for response in plain(requests, PARAMS)]


def generate(
    fleet: Fleet, requests: list[RolloutRequest], meanwhile: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    return [finished.response.tokens for finished in roll_out(fleet, requests, PARAMS, meanwhile)]


def racer(fleet: Fleet) -> tuple[str, str] | None:
    """Who runs a copy, and of whose response."""
    return next(
        ((name, one.helps or "") for name, one in fleet.board.workers.items() if one.state == "racing"), None
    )


def count_losses(fleet: Fleet) -> int:
    """Workers that the fleet has lost."""
    return sum(worker.num_losses for worker in fleet.board.workers.values())


def test_a_copy_changes_no_token(
    fleet: Fleet,
    requests: list[RolloutRequest],
    wanted: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(helping, "decide_help", choose_copy)
    fleet.helps.take()
    fleet.take_observations()
    seen = set()
    assert generate(fleet, requests, lambda: seen.add(racer(fleet))) == wanted
    assert seen - {None}
    helps = fleet.helps.take()
    assert sum(one.num_leads for one in helps) > 0
    assert sum(step.num_adopted_tokens for step in fleet.take_observations()) > 0
    assert {one.kind for one in helps} == {"copy"}
    assert {one.outcome for one in helps} <= {"won", "lost", "stopped"}
    assert sum(one.num_disagreed for one in fleet.board.workers.values()) == 0


@pytest.mark.parametrize("place", [0, 1], ids=["copy", "leader"])
def test_a_killed_racer_is_missed_by_no_token(
    fleet: Fleet,
    requests: list[RolloutRequest],
    wanted: list[tuple[int, ...]],
    place: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(helping, "decide_help", choose_copy)
    killed: list[str] = []
    since_s = [0.0]

    def kill() -> None:
        if (pair := racer(fleet)) is None:
            since_s[0] = time.monotonic()
        elif not killed and time.monotonic() - since_s[0] > 0.1:
            process = fleet._actors.process(pair[place])
            assert process is not None
            os.kill(process, signal.SIGKILL)
            killed.append(pair[place])

    losses = count_losses(fleet)
    for _ in range(4):  # a race may be over before anybody can be killed
        assert generate(fleet, requests, kill) == wanted
        if killed:
            break
    assert killed
    fleet._wait_while(lambda: count_losses(fleet) == losses)  # a kill at the end is noticed later
    fleet._wait_while(lambda: "starting" in fleet._states())


def test_a_response_that_is_taken_over_changes_no_token(
    fleet: Fleet,
    requests: list[RolloutRequest],
    wanted: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(helping, "decide_help", choose_take)
    fleet.helps.take()
    assert generate(fleet, requests) == wanted
    assert {(one.kind, one.outcome) for one in fleet.helps.take()} == {("take", "")}


def test_who_raced_is_decided_again_from_the_log(
    fleet: Fleet, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logs / "controller-1.decisions"
    with DecisionReader(log) as reader:
        lines = [line for line in reader if isinstance(line, ControllerLine)]
    texts = ["; ".join(line.actions) for line in lines]
    assert any("a copy of w" in text for text in texts)
    first_take = next(place for place, text in enumerate(texts) if "taken from w" in text)
    begin = max(place for place, line in enumerate(lines[:first_take]) if line.event == "Submitted")
    places, decide = iter(range(len(lines))), controller_replay._decide

    def decide_as_then(*arguments: Any) -> Any:
        choose = choose_copy if next(places) < begin else choose_take
        monkeypatch.setattr(helping, "decide_help", choose)
        return decide(*arguments)

    monkeypatch.setattr(controller_replay, "_decide", decide_as_then)
    with DecisionReader(log) as reader:
        [tally] = controller_replay.replay_controller(reader)
    assert tally.num_different == 0

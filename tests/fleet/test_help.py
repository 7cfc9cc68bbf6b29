"""A free worker drafts for the stragglers of another one, with its drafter or another: no token is another one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import ENGINE, KV_BYTES, POLICY, Generate
from saboteurs import roll_out
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings, FleetSettings
from paceline.control import helping
from paceline.fleet.controller_replay import replay_controller
from paceline.fleet.fleet import Fleet
from paceline.planning.help import Help, HelpChoice
from paceline.record.decisions import ControllerLine, DecisionReader
from paceline.types import RolloutRequest

DRAFTER = POLICY.parent / "countdown-drafter"
PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="module")
def weak_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter with noise in its weights: it is right less often, and elsewhere."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(DRAFTER, tmp_path_factory.mktemp("drafters") / "weak")
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: one + 0.3 * one.std() * torch.randn_like(one) for name, one in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def helped_fleet(ray: Any, logs: Path, weak_drafter: Path) -> Iterator[Fleet]:
    """Two workers with two model drafters each, of which a free one uses the first for the other."""
    patch = pytest.MonkeyPatch()
    choice = HelpChoice(Help.DRAFT, 0.0, window=8)
    patch.setattr(
        helping, "decide_help", lambda load, helper: choice
    )  # this drafter is too dear for this policy
    patch.setattr(helping, "judge_help", lambda before, after: None)
    settings = FleetSettings(workers=2, help="draft", chunk_tokens=128, progress_ms=20.0)
    engine = EngineSettings(
        run_seed=3,
        drafter="none",
        model_drafter=str(DRAFTER),
        further_drafters=(str(weak_drafter),),
        draft_window=4,
        budget=BudgetSettings(policy="fixed", fixed_tokens=4),
        decision_log=str(logs),
    )
    with Fleet(POLICY, settings, engine, kv_cache_bytes=KV_BYTES, **ENGINE) as made:
        yield made
    patch.undo()


def requests_for(prompts: list[tuple[int, ...]]) -> list[RolloutRequest]:
    """One straggler, and short ones."""
    return [RolloutRequest(prompts[0], 900), *(RolloutRequest(prompt, 60) for prompt in prompts[1:4])]


def generate(
    fleet: Fleet, requests: list[RolloutRequest], meanwhile: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    return [finished.response.tokens for finished in roll_out(fleet, requests, PARAMS, meanwhile)]


def helper_of(fleet: Fleet) -> str | None:
    return next((name for name, status in fleet.board.workers.items() if status.state == "drafting"), None)


@pytest.fixture(scope="module")
def wanted(plain: Generate, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [response.tokens for response in plain(requests_for(prompts), PARAMS)]


def test_a_free_worker_drafts_for_a_straggler_and_takes_chunks_again(
    helped_fleet: Fleet, wanted: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    helpers: set[str] = set()

    def look() -> None:
        if (name := helper_of(helped_fleet)) is not None:
            helpers.add(name)

    helped_fleet.take_observations()
    for _ in range(2):
        assert generate(helped_fleet, requests_for(prompts), look) == wanted
    assert helpers
    steps = helped_fleet.take_observations()
    assert sum(step.num_wasted_tokens for step in steps) > 0, "only what is drafted elsewhere is wasted"
    assert sum(step.num_model_tokens for step in steps) > 0.1 * sum(map(len, wanted))
    helped_fleet.advance(0.1)
    assert helper_of(helped_fleet) is None, "nobody is left to draft for"


def test_a_killed_helper_is_missed_by_no_token(
    helped_fleet: Fleet, wanted: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    killed: list[str] = []
    since_s = [0.0]

    def kill() -> None:
        name = helper_of(helped_fleet)
        if name is None:
            since_s[0] = time.monotonic()
        elif not killed and time.monotonic() - since_s[0] > 0.3:
            process = helped_fleet._actors.process(name)
            assert process is not None
            os.kill(process, signal.SIGKILL)
            killed.append(name)

    assert generate(helped_fleet, requests_for(prompts), kill) == wanted
    assert killed
    helped_fleet._wait_while(lambda: "starting" in helped_fleet._states())
    assert generate(helped_fleet, requests_for(prompts)) == wanted
    assert helped_fleet.board.workers[killed[0]].num_losses == 1


def test_who_helped_whom_is_decided_again_from_the_log(helped_fleet: Fleet, logs: Path) -> None:
    log = logs / "controller-1.decisions"
    with DecisionReader(log) as reader:
        actions = [action for line in reader if isinstance(line, ControllerLine) for action in line.actions]
    assert any("drafts for w" in action for action in actions)
    assert any(action.endswith("rests") or "nobody drafts" in action for action in actions)
    with DecisionReader(log) as reader:
        [tally] = replay_controller(reader)
    assert tally.num_different == 0


def test_drafts_of_a_worker_and_of_its_helper_meet(
    helped_fleet: Fleet, wanted: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    """The worker goes on with its own drafter, which the fleet chose, beside another one's drafts."""
    before = helped_fleet.drafter_score()
    helped_fleet.use_drafter(1)
    helped_fleet.take_observations()
    helpers: set[str | None] = set()
    for _ in range(2):
        assert (
            generate(helped_fleet, requests_for(prompts), lambda: helpers.add(helper_of(helped_fleet)))
            == wanted
        )
    assert helpers - {None}
    steps = helped_fleet.take_observations()
    assert sum(step.num_wasted_tokens for step in steps) > 0, "only what is drafted elsewhere is wasted"
    own = sum(sum(step.further_tokens) for step in steps)
    assert own > 5
    assert sum(step.num_model_tokens for step in steps) - own > 5
    assert (helped_fleet.drafter_score() - before).tried > 100
    helped_fleet.use_drafter(0)


def test_a_worker_that_only_drafts_changes_no_token(
    helped_fleet: Fleet, wanted: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    """The role as a start gives it (tests/unit/test_fleet_start.py); last, as the log does not tell of the change."""
    helped_fleet._controller._workers["w1"].is_drafter = True
    helped_fleet.take_observations()
    num_tokens = helped_fleet.board.workers["w1"].num_tokens
    seen: set[str | None] = set()
    assert generate(helped_fleet, requests_for(prompts), lambda: seen.add(helper_of(helped_fleet))) == wanted
    assert seen - {None} == {"w1"}
    assert helped_fleet.board.workers["w1"].num_tokens == num_tokens
    assert sum(step.num_wasted_tokens for step in helped_fleet.take_observations()) > 0

"""Training on a fleet: the same tokens, rewards and weights as on one engine, whichever drafter each step has."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from digit_task import DigitTask, kill_run, pause_after_a_save
from local_ray import local_ray
from rich.console import Console
from trace_rules import check_trace
from watched_comparisons import watch_comparisons

import paceline.training.run as training_run
from paceline.control.events import Kept
from paceline.distillation.spot_link import SpotLink
from paceline.fleet import fleet as fleet_module
from paceline.fleet.cluster import import_ray
from paceline.fleet.controller_replay import replay_controller
from paceline.fleet.journal import Journal
from paceline.planning.ladder import Rung
from paceline.record import (
    ChunkDone,
    Comparison,
    DrafterSession,
    DrafterStep,
    EngineStepSample,
    Note,
    RecordReader,
    ResponseDone,
    TrainStep,
)
from paceline.record.decisions import DecisionReader, find_decisions
from paceline.record.ladder_file import read_ladder
from paceline.report.trace import write_trace
from paceline.training import ladder_rollouts
from paceline.training.fleet_rollouts import FleetRollouts
from paceline.training.recipe import Recipe
from paceline.training.run import TrainingRun
from paceline.training.step_runner import Summary
from paceline.types import RolloutRequest

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """One for all trainings; workers start and end with each."""
    with local_ray():
        yield


@pytest.fixture(autouse=True)
def digit_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "load_task", lambda name, **options: DigitTask())


def make_recipe(policy_dir: Path, **sections: Any) -> Recipe:
    fields: dict[str, Any] = {
        "task": {"name": "countdown", "problems": 16},
        "model": str(policy_dir),
        "steps": 3,
        "batch": {"prompts": 2, "group_size": 4, "micro_batch": 4},
        "lengths": {"prompt_tokens": 32, "response_tokens": 48},
        "optimizer": {"learning_rate": 5e-3},
        "engine": {"compiled": False},
        # blocks longer than any response here: chunks end by their length
        "capacity": {"dtype": "float32", "kv_cache_mib": 64, "vllm": {"block_size": 128}},
        "evaluation": {"problems": 4, "every": 3},
    }
    return Recipe.model_validate(fields | sections)


def run(recipe: Recipe, folder: Path) -> Summary:
    return TrainingRun(recipe, folder, Console(file=io.StringIO(), width=200)).run()


def read(folder: Path, kind: type) -> list[Any]:
    with RecordReader(folder) as reader:
        return [event for event in reader if isinstance(event, kind)]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "policy" / "model.safetensors")


def check_chunks(folder: Path) -> None:
    """The record tells what ran where, and report and trace show it."""
    chunks, responses = read(folder, ChunkDone), read(folder, ResponseDone)
    for response in responses:
        place = (response.step, response.group, response.sample)
        own = [chunk for chunk in chunks if (chunk.step, chunk.group, chunk.sample) == place]
        assert sum(chunk.tokens for chunk in own) == response.response_tokens
        assert [chunk.start for chunk in own] == [16 * i for i in range(len(own))]
        assert all(before.t_end_s <= after.t_start_s for before, after in pairwise(own))
        assert response.t_start_s - 1e-6 <= own[0].t_start_s
        assert own[-1].t_end_s <= response.t_end_s
        assert own[-1].finish_reason == response.finish_reason
    assert {chunk.worker for chunk in chunks} == {"w0", "w1"}
    assert len(chunks) > len(responses)
    page = (folder / "report.html").read_text()
    assert page.count('class="timeline"') == len(read(folder, TrainStep))
    newest = max(chunk.step for chunk in chunks)
    count = sum(chunk.step == newest for chunk in chunks)
    assert f"{count} chunks on 2 workers" in page
    write_trace(folder, folder / "trace.json")
    drawn = [e for e in check_trace(folder / "trace.json") if e["ph"] == "X" and "first_token" in e["args"]]
    assert len(drawn) == len(chunks)


def check_drafters(folder: Path, first: str) -> None:
    """The ladder was measured after step 1, and all workers drafted with the other drafter from then on."""
    kept = read_ladder(folder / "ladder.json", (first, "twin"))
    assert kept.ladder is not None
    assert kept.tried[first].tried > 0
    assert kept.tried["twin"].tried > 0
    notes = [note.text for note in read(folder, Note)]
    assert sum("the draft ladder was measured" in text for text in notes) == 1
    assert sum("drafter twin from step 2 on" in text for text in notes) == 1


@pytest.mark.slow
def test_a_fleet_trains_the_same_policy(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    alone, many = tmp_path / "alone", tmp_path / "many"
    run(make_recipe(policy_dir), alone)
    fleet = {"workers": 2, "chunk_tokens": 16, "progress_ms": 5.0, "rewards": {}}
    twin = shutil.copytree(policy_dir, tmp_path / "twin")
    engine = {"compiled": False, "model_drafter": str(policy_dir), "further_drafters": [str(twin)]}
    monkeypatch.setattr(ladder_rollouts, "choose_first", lambda ladder, tried: Rung("twin", 1.0, 2.0))
    scored: list[tuple[float | None, ...]] = []
    take = FleetRollouts._take_rewards

    def watch(self: FleetRollouts, finished: Any) -> tuple[float | None, ...]:
        scored.append(take(self, finished))
        return scored[-1]

    monkeypatch.setattr(FleetRollouts, "_take_rewards", watch)
    import_ray().cloudpickle.register_pickle_by_value(sys.modules[DigitTask.__module__])
    compared = watch_comparisons(monkeypatch, ladder_rollouts.LadderRollouts)
    summary = run(make_recipe(policy_dir, fleet=fleet, engine=engine, compare={"every": 2}), many)
    assert len(compared) == 2
    assert all(drafted[True] == 0 < drafted[False] for drafted in compared)
    ours, theirs = weights(many), weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for one, other in zip(read(many, TrainStep), read(alone, TrainStep), strict=True):
        assert (one.tokens, one.reward_mean) == (other.tokens, other.reward_mean)
        assert one.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    keyed = [
        sorted((r.step, r.group, r.sample, r.response_tokens) for r in read(folder, ResponseDone))
        for folder in (alone, many)
    ]
    assert keyed[0] == keyed[1]
    assert summary.diverged_tokens == 0
    check_drafters(many, policy_dir.name)
    assert scored, "rewards must come while others still run"
    assert all(None not in rewards and max(rewards) > 0 for rewards in scored)
    assert len(read(many, Comparison)) == 2
    check_chunks(many)
    samples = read(many, EngineStepSample)
    assert {sample.worker for sample in samples} == {"w0", "w1"}
    assert sum(sample.num_generated_tokens for sample in samples) == sum(
        s.tokens for s in read(many, TrainStep)
    )


@pytest.mark.slow
def test_a_killed_driver_goes_on_within_the_rollout(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 2: what was finished is not generated again, what was not goes on from its tokens."""
    import torch

    sections: dict[str, Any] = {
        "batch": {"prompts": 4, "group_size": 8, "micro_batch": 4},
        "capacity": {"dtype": "float32", "kv_cache_mib": 64, "max_num_seqs": 3},
        "steps": 2,
    }
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    run(make_recipe(policy_dir, **sections), alone)
    fleet = {"workers": 2, "chunk_tokens": 16, "progress_ms": 5.0}
    recipe = make_recipe(policy_dir, fleet=fleet, **sections)
    kill_run(recipe, killed, step=2, num_finished=4)
    found: list[dict[int, Kept]] = []
    find = Journal.find

    def watch(journal: Journal, requests: Iterable[RolloutRequest]) -> dict[int, Kept]:
        found.append(find(journal, requests))
        return found[-1]

    monkeypatch.setattr(Journal, "find", watch)
    import_ray().cloudpickle.register_pickle_by_value(sys.modules[DigitTask.__module__])
    TrainingRun(recipe, killed, Console(file=io.StringIO()), resume=True).run()
    first, second = found
    assert len(first) == 32, "step 1, which no checkpoint holds, is trained again on the same responses"
    assert sum(kept.finish_reason is not None for kept in second.values()) >= 4
    assert any(kept.finish_reason is None and len(kept.packed) for kept in second.values())
    ours, theirs = weights(killed), weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def plain_run(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one engine that does not draft."""
    folder = tmp_path_factory.mktemp("run") / "plain"
    plain = {"compiled": False, "drafter": "none", "budget": {"policy": "off"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "load_task", lambda name, **options: DigitTask())
        run(make_recipe(policy_dir, engine=plain, steps=4), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("method", "trainers"), [("osd", 2), ("eagle", 1)])
def test_a_fleet_whose_drafter_grows_trains_the_same_policy(
    plain_run: Path,
    policy_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    trainers: int,
) -> None:
    """From nothing, on the time of free workers, of two at once where there are two trainers; swapped into every engine
    and used. The tokens are those of one engine that does not draft.
    """
    import torch

    alone, many = plain_run, tmp_path / "many"
    monkeypatch.setattr(SpotLink, "pause", pause_after_a_save(many, SpotLink.pause))
    monkeypatch.setattr(fleet_module, "TICK_S", 0.005)  # the tails of a run this small are short
    recipe = make_recipe(
        policy_dir,
        steps=4,
        fleet={"workers": 1 + trainers, "chunk_tokens": 16, "progress_ms": 5.0},
        adaptive_drafter={
            "method": method,
            "layers": 1,
            "learning_rate": 0.01,
            "states_share": 1.0,
            "trainers": trainers,
        },
        compare={"every": 2},
        record={"decisions": True},
    )
    assert run(recipe, many).diverged_tokens == 0
    ours, theirs = weights(many), weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    keyed = [
        sorted((r.step, r.group, r.sample, r.response_tokens) for r in read(folder, ResponseDone))
        for folder in (alone, many)
    ]
    assert keyed[0] == keyed[1]
    last = read(many, DrafterStep)[-1]
    assert last.version >= 1
    assert last.tried > 0
    assert (last.collected_tokens > 0) == (last.collection_s > 0) == (method == "eagle")
    sessions = read(many, DrafterSession)
    assert {session.worker for session in sessions} <= {f"w{number}" for number in range(1 + trainers)}
    at_once = [
        sum(other.t_start_s <= one.t_start_s < other.t_end_s for other in sessions) for one in sessions
    ]
    assert max(at_once) == trainers
    assert "trained the drafter" in (many / "report.html").read_text()
    [log] = [path for path in find_decisions(many) if path.name.startswith("controller")]
    with DecisionReader(log) as reader:
        [tally] = replay_controller(reader)
    assert tally.num_different == 0

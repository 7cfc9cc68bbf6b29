"""A whole run: recorded, compared, evaluated; interrupted at a bad moment and resumed, it ends bit for bit the same."""

from __future__ import annotations

import io
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from digit_task import DigitTask, kill_run, pause_after_a_save
from rich.console import Console
from watched_comparisons import watch_comparisons

import paceline.commands.train as train_command
import paceline.training.run as training_run
from paceline.distillation.spot_link import SpotLink
from paceline.drafting.drafter import is_draft_head
from paceline.drafting.model import ModelDrafter
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, RecordError
from paceline.record import (
    Comparison,
    DrafterSession,
    DrafterStep,
    EngineStepSample,
    Evaluation,
    Note,
    RecordReader,
    ResponseDone,
    RunEnd,
    TrainStep,
)
from paceline.record.decisions import DecisionReader, find_decisions
from paceline.record.ladder_file import read_ladder
from paceline.tasks.alphabet import ALPHABET
from paceline.training.recipe import Recipe
from paceline.training.rollouts import WatchedRollouts
from paceline.training.run import TrainingRun
from paceline.training.step_runner import StepRunner, Summary


@pytest.fixture(autouse=True)
def digit_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "load_task", lambda name, **options: DigitTask())


def make_recipe(policy_dir: Path, **sections: Any) -> Recipe:
    fields: dict[str, Any] = {
        "task": {"name": "countdown", "problems": 16},
        "model": str(policy_dir),
        "steps": 4,
        "algorithm": {"name": "dapo", "mask_truncated": False},
        "batch": {"prompts": 2, "group_size": 4, "micro_batch": 4},
        "lengths": {"prompt_tokens": 32, "response_tokens": 48},
        "optimizer": {"learning_rate": 5e-3},
        "engine": {"compiled": False},
        "capacity": {"dtype": "float32", "kv_cache_mib": 64},
        "evaluation": {"problems": 4, "every": 2},
        "compare": {"every": 2},
        "output": {"save_every": 3},
    }
    return Recipe.model_validate(fields | sections)


def run(recipe: Recipe, folder: Path, **options: Any) -> tuple[Summary, str]:
    screen = io.StringIO()
    summary = TrainingRun(recipe, folder, Console(file=screen, width=200), **options).run()
    return summary, screen.getvalue()


def read(folder: Path, kind: type) -> list[Any]:
    with RecordReader(folder) as reader:
        return [event for event in reader if isinstance(event, kind)]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary, str]:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "load_task", lambda name, **options: DigitTask())
        compared = watch_comparisons(patch, WatchedRollouts)
        summary, screen = run(make_recipe(policy_dir, record={"decisions": True}), folder)
    assert len(compared) == 2
    assert all(drafted[True] == 0 < drafted[False] for drafted in compared)
    return folder, summary, screen


def test_run_records_everything(whole: tuple[Path, Summary, str]) -> None:
    folder, summary, screen = whole
    steps = read(folder, TrainStep)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert all(step.phases.rollout_s > 0 and step.phases.train_s > 0 for step in steps)
    assert all(
        step.phases.push_weights_s > 0 for step in steps[1::2]
    )  # evaluations push for the next step too
    assert all(step.metrics["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
    responses = read(folder, ResponseDone)
    assert len(responses) == 4 * 8
    assert sum(r.response_tokens for r in responses) == sum(step.tokens for step in steps)
    assert all(response.reward is not None for response in responses)
    generated = sum(sample.num_generated_tokens for sample in read(folder, EngineStepSample))
    assert generated == sum(step.tokens for step in steps)
    assert [e.step for e in read(folder, Evaluation)] == sorted(summary.solve_rates) == [0, 2, 4]
    assert read(folder, RunEnd)[-1].reason == summary.reason == "finished"
    assert (folder / "report.html").is_file()
    assert "\x1b" not in screen
    assert "step 4/4" in screen


def test_a_disk_that_fills_up_is_told(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever meets it: the writers of checkpoints raise errors of their own kinds."""

    class Full:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self, **_: Any) -> None:
            raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training_run, "TrainingRun", Full)
    with pytest.raises(RecordError, match=r"the disk of .* is full.*--resume"):
        train_command._run(make_recipe(policy_dir), tmp_path / "run", resume=False, overwrite=False)


def test_decisions_of_the_run_are_the_same_again(whole: tuple[Path, Summary, str]) -> None:
    """Over pushed weights, evaluations and comparisons with plain rollouts."""
    folder, _, _ = whole
    [path] = find_decisions(folder)
    with DecisionReader(path) as reader:
        [tally] = replay_engine(reader)
        assert not reader.torn
    assert tally.num_planned > 100
    assert tally.num_different == 0


def test_comparison_finds_the_same_tokens(whole: tuple[Path, Summary, str]) -> None:
    folder, summary, _ = whole
    comparisons = read(folder, Comparison)
    assert [comparison.step for comparison in comparisons] == [1, 3]
    assert summary.compared_tokens == sum(comparison.tokens for comparison in comparisons) > 0
    assert summary.diverged_tokens == 0


def test_resumed_run_is_the_uninterrupted_one(
    whole: tuple[Path, Summary, str], policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recipe = tmp_path / "cut", make_recipe(policy_dir)
    interrupt_rewards(monkeypatch, call=3)
    summary, _ = run(recipe, folder)
    assert summary.reason == read(folder, RunEnd)[-1].reason == "interrupted"
    assert summary.steps == 2
    assert not (folder / "policy").exists()

    monkeypatch.undo()
    monkeypatch.setattr(training_run, "load_task", lambda name, **options: DigitTask())
    summary, _ = run(recipe, folder, resume=True)
    assert summary.reason == "finished"
    assert summary.solve_rates == whole[1].solve_rates
    expected = weights(whole[0])
    for name, weight in weights(folder).items():
        assert weight.equal(expected[name]), name

    def course(run_folder: Path) -> list[Any]:
        return [
            (r.step, r.group, r.sample, r.response_tokens, r.finish_reason, r.reward)
            for r in read(run_folder, ResponseDone)
        ]

    assert course(folder) == course(whole[0])


def interrupt_rewards(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Send Ctrl-C while the rewards of the given step are computed: its rollout is done, its update is not."""
    original, calls = StepRunner.reward, []

    def reward(self: StepRunner, completions: Sequence[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return original(self, completions, **columns)

    monkeypatch.setattr(StepRunner, "reward", reward)


def test_a_run_whose_drafter_grows_is_the_same_run(
    whole: tuple[Path, Summary, str], policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, log-probabilities and weights. The trainer of its drafter is killed, the run interrupted and
    resumed: both go on.
    """
    folder = tmp_path / "adaptive"
    recipe = make_recipe(policy_dir, adaptive_drafter={"layers": 1, "learning_rate": 0.01})
    killed: list[int] = []
    monkeypatch.setattr(SpotLink, "pause", pause_after_a_save(folder, SpotLink.pause, killed))
    interrupt_rewards(monkeypatch, call=3)
    assert run(recipe, folder)[0].reason == "interrupted"
    summary, _ = run(recipe, folder, resume=True)
    assert summary.reason == "finished"
    assert summary.diverged_tokens == 0
    expected = weights(whole[0])
    for name, weight in weights(folder).items():
        assert weight.equal(expected[name]), name
    assert list(map(trained_on, latest_steps(folder))) == list(map(trained_on, latest_steps(whole[0])))

    assert len(killed) == 1
    last = read(folder, DrafterStep)[-1]
    assert last.version >= 1
    assert last.tried > 0
    assert last.trained_tokens > 0
    assert len(read(folder, DrafterSession)) >= 2
    assert "Adaptive drafter" in (folder / "report.html").read_text()
    grown = ModelDrafter(folder / "drafter" / "model", max_model_len=64, max_requests=2)
    assert grown.vocab_size == len(ALPHABET)


def test_a_run_with_a_head_that_grows_is_the_same_run(
    whole: tuple[Path, Summary, str], policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing: states from the engine, trained on them in the tails, swapped in, and used."""
    folder = tmp_path / "head"
    drafter = {"method": "eagle", "learning_rate": 0.01, "states_share": 1.0}
    always = {
        "compiled": False,
        "budget": {"policy": "fixed", "fixed_tokens": 2},
    }  # whether the head pays or not
    monkeypatch.setattr(SpotLink, "pause", pause_after_a_save(folder, SpotLink.pause))
    summary, _ = run(make_recipe(policy_dir, engine=always, adaptive_drafter=drafter), folder)
    assert summary.reason == "finished"
    expected = weights(whole[0])
    for name, weight in weights(folder).items():
        assert weight.equal(expected[name]), name
    assert list(map(trained_on, latest_steps(folder))) == list(map(trained_on, latest_steps(whole[0])))
    with RecordReader(folder) as record:
        order = [(event.step, type(event)) for event in record if isinstance(event, DrafterStep | TrainStep)]
    steps = range(1, len(order) // 2 + 1)
    assert order == [(step, kind) for step in steps for kind in (DrafterStep, TrainStep)]
    last = read(folder, DrafterStep)[-1]
    assert last.version >= 1
    assert last.tried > 0
    assert last.collected_tokens > 0
    assert last.collection_s > 0
    assert is_draft_head(folder / "drafter" / "model")


def trained_on(step: TrainStep) -> dict[str, float | None]:
    """What of a step's metrics rests on its tokens and log-probabilities."""
    names = ("loss", "grad_norm", "reward", "entropy")
    return {
        name: value
        for name, value in step.metrics.items()
        if name in names or name.startswith(("sampling/", "completions/"))
    }


def latest_steps(folder: Path) -> list[TrainStep]:
    """A step that was done again counts once."""
    found = {step.step: step for step in read(folder, TrainStep)}
    return [found[number] for number in sorted(found)]


def test_resume_refuses_another_recipe(whole: tuple[Path, Summary, str], policy_dir: Path) -> None:
    recipe = make_recipe(policy_dir, seed=1)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        run(recipe, whole[0], resume=True)


def test_existing_run_is_not_overwritten(whole: tuple[Path, Summary, str], policy_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--resume, replace it with --overwrite"):
        run(make_recipe(policy_dir), whole[0])


def test_long_prompt_is_refused_before_the_engine_starts(policy_dir: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy_dir, lengths={"prompt_tokens": 8, "response_tokens": 16})
    with pytest.raises(ConfigError, match=r"has 1\d tokens, lengths.prompt_tokens is 8"):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_long_context_is_refused_before_the_engine_starts(policy_dir: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy_dir, lengths={"prompt_tokens": 64, "response_tokens": 300})
    with pytest.raises(ConfigError, match="exceeds the 256 positions"):
        train_command._run(recipe, tmp_path / "run", resume=False, overwrite=False)


def test_finished_run_trains_no_further_when_resumed(
    whole: tuple[Path, Summary, str], policy_dir: Path
) -> None:
    before = weights(whole[0])
    summary, _ = run(make_recipe(policy_dir), whole[0], resume=True)
    assert (summary.reason, summary.steps) == ("finished", 4)
    assert len(read(whole[0], TrainStep)) == 4
    assert all(weight.equal(before[name]) for name, weight in weights(whole[0]).items())


def test_a_killed_run_goes_on_within_the_rollout(
    whole: tuple[Path, Summary, str], policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 2, which no checkpoint holds: step 1 is done again, then three responses are known."""
    folder, recipe = tmp_path / "killed", make_recipe(policy_dir)
    kill_run(recipe, folder, step=2, num_finished=3)
    assert (folder / "rollouts" / "step-2").is_file()
    asked: list[int] = []
    stream = RolloutEngine.stream

    def count(engine: RolloutEngine, requests: Sequence[Any], params: Any, **options: Any) -> Any:
        asked.append(len(requests))
        return stream(engine, requests, params, **options)

    monkeypatch.setattr(RolloutEngine, "stream", count)
    summary, _ = run(recipe, folder, resume=True)
    assert summary.reason == "finished"
    assert asked == [8, 8, 5, 4, 8, 8, 8, 4], "step 1 twice (compared), what step 2 lacks, an evaluation, .."
    assert not (folder / "rollouts").exists()
    expected = weights(whole[0])
    for name, weight in weights(folder).items():
        assert weight.equal(expected[name]), name
    assert summary.solve_rates == whole[1].solve_rates


@pytest.mark.slow
def test_a_run_that_chooses_its_drafter_measures_its_ladder_and_ends_the_same(
    whole: tuple[Path, Summary, str], policy_dir: Path, tmp_path: Path
) -> None:
    twin = shutil.copytree(policy_dir, tmp_path / "twin")
    engine = {"compiled": False, "model_drafter": str(policy_dir), "further_drafters": [str(twin)]}
    folder = tmp_path / "run"
    summary, _ = run(make_recipe(policy_dir, engine=engine), folder)
    assert (summary.reason, summary.diverged_tokens) == ("finished", 0)
    kept = read_ladder(folder / "ladder.json")
    assert kept.ladder is not None
    assert [one.drafter for one in kept.ladder.drafters] == [policy_dir.name, "twin"]
    assert kept.tried[policy_dir.name].tried > 0
    assert any("the draft ladder was measured" in note.text for note in read(folder, Note))
    expected = weights(whole[0])
    for name, weight in weights(folder).items():
        assert weight.equal(expected[name]), name

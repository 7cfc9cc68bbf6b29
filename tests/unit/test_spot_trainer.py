"""A drafter in training beside a run: what it hears and saves, how it goes on, and the process that it lives in."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import msgspec
import torch
from safetensors.torch import load_file
from tiny_model import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.distillation import checkpoints, spot, spot_link
from paceline.distillation.export import export
from paceline.distillation.fresh_drafter import make_head, make_small_model
from paceline.distillation.packing import Sample
from paceline.distillation.sample_buffer import SampleBuffer
from paceline.distillation.spot import (
    LESSON,
    SpotSettings,
    SpotTrainer,
    is_held_out,
    make_lesson,
    read_drafter,
)
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.target import choose_layers, load_model, read_samples
from paceline.distillation.training_folder import FILE_NAME, USED_NAME, read_folder
from paceline.drafting.child_process import ChildProcess
from paceline.drafting.drafter import is_draft_head, read_fused_layers
from paceline.drafting.model import ModelDrafter
from paceline.errors import CheckpointError
from paceline.training.adaptive_rollouts import FRESH_RATE, GIVEN_RATE


@pytest.fixture
def settings(tmp_path: Path) -> SpotSettings:
    target = make_model(tmp_path / "target", tie=False)
    make_small_model(target, tmp_path / "small", 64, 1, seed=0)
    (tmp_path / "drafter").mkdir()
    return SpotSettings(
        parent=os.getpid(),
        folder=str(tmp_path / "drafter"),
        target=str(target),
        method="osd",
        drafter=str(tmp_path / "small"),
        temperature=0.5,
        rate=5e-3,
    )


def policy_of(settings: SpotSettings) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(settings.target).named_parameters())


def responses_of(settings: SpotSettings, count: int = 24) -> list[Sample]:
    """What the target writes, with states for a head."""
    model = AutoModelForCausalLM.from_pretrained(settings.target)
    torch.manual_seed(1)
    prompts = torch.randint(3, 64, (count, 4))
    made = model.generate(prompts, do_sample=True, temperature=0.5, max_new_tokens=40, min_new_tokens=40)
    if settings.method == "osd":
        return [Sample(row, 4, torch.empty(len(row), 0)) for row in made]
    layers = choose_layers(model.config.num_hidden_layers) if settings.method == "eagle3" else ()
    return list(read_samples(load_model(Path(settings.target)), [(row, 4) for row in made], layers, 4096))


def tell(settings: SpotSettings, step: int, count: int = 24) -> None:
    tensors, note = make_lesson(step, policy_of(settings), responses_of(settings, count))
    checkpoints.write(Path(settings.folder) / LESSON, tensors, note)


def ticking(step_s: float) -> itertools.count[float]:
    return itertools.count(0.0, step_s)


def test_a_drafter_grows_from_nothing_and_goes_on(settings: SpotSettings) -> None:
    weights = grow(settings)
    drafter = ModelDrafter(settings.drafter, max_model_len=64, max_requests=2)
    drafter.reload(weights.items())  # as an engine does


def test_a_head_grows_from_the_states_that_it_is_told(
    settings: SpotSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(Path(settings.target), tmp_path / "head", "hass", seed=0)
    settings = msgspec.structs.replace(settings, method="hass", drafter=str(tmp_path / "head"))
    monkeypatch.setattr(spot, "read_states", None)  # the target computes nothing
    weights = grow(settings)
    begun = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: weight.shape for name, weight in weights.items()} == {n: w.shape for n, w in begun.items()}
    assert is_draft_head(tmp_path / "head")


def test_an_eagle_3_head_says_which_layers_it_learns_from(settings: SpotSettings, tmp_path: Path) -> None:
    deep = make_model(tmp_path / "deep", layers=4, tie=False)
    make_head(deep, tmp_path / "head", "eagle3", seed=0)
    settings = msgspec.structs.replace(
        settings, target=str(deep), method="eagle3", drafter=str(tmp_path / "head")
    )
    trainer = SpotTrainer(settings, ticking(1.0).__next__)
    tell(settings, step=1)
    for _ in range(3):
        assert trainer.learn()
    trainer.close()
    found = read_folder(Path(settings.folder))
    assert found is not None
    export(*found, tmp_path / "grown", "huggingface", settings.target)
    assert read_fused_layers(tmp_path / "grown") == read_fused_layers(tmp_path / "head") == (1, 2, 3)
    with pytest.raises(CheckpointError, match="the target has 2 layers"):
        make_head(make_model(tmp_path / "shallow"), tmp_path / "none", "eagle3", seed=0)


def test_the_drafter_as_it_was_is_measured_beside_the_present_one(settings: SpotSettings) -> None:
    tell(settings, step=1)
    trainer = SpotTrainer(msgspec.structs.replace(settings, is_given=True), ticking(1.0).__next__)
    for _ in range(60):
        assert trainer.learn()
    trainer.close()
    _, made = read_drafter(Path(settings.folder)) or pytest.fail("nothing was saved")
    assert made.agreement is not None
    assert made.first_agreement is not None
    assert 0.0 < made.first_agreement < made.agreement


def test_a_drafter_that_was_given_is_not_spoilt(settings: SpotSettings, tmp_path: Path) -> None:
    """On the policy that it knows there is nothing to gain, and a fresh drafter's steps would undo what it knows."""
    tell(settings, step=1)
    first = SpotTrainer(settings, ticking(1.0).__next__)
    for _ in range(150):
        assert first.learn()
    first.close()
    found = read_folder(Path(settings.folder)) or pytest.fail("nothing was saved")
    export(*found, tmp_path / "given", "huggingface", settings.target)
    (tmp_path / "again").mkdir()
    settings = msgspec.structs.replace(
        settings,
        folder=str(tmp_path / "again"),
        drafter=str(tmp_path / "given"),
        rate=settings.rate * GIVEN_RATE / FRESH_RATE,
        is_given=True,
    )
    tell(settings, step=1)
    second, measured = SpotTrainer(settings, ticking(1.0).__next__), []
    for _ in range(60):
        assert second.learn()
        if (made := second._made).agreement is not None and made.first_agreement is not None:
            measured.append(made.agreement - made.first_agreement)
    second.close()
    assert min(measured) > -0.005, "at the full rate 0.012 are lost"


def test_nobody_learns_from_what_a_drafter_is_measured_on(
    settings: SpotSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, note = make_lesson(1, policy_of(settings), responses_of(settings, 50))
    checkpoints.write(Path(settings.folder) / LESSON, tensors, note)
    learned: set[tuple[int, ...]] = set()
    draw = SampleBuffer.draw

    def note_draw(buffer: SampleBuffer, num_tokens: int) -> list[Sample]:
        drawn = draw(buffer, num_tokens)
        learned.update(tuple(sample.ids.tolist()) for sample in drawn)
        return drawn

    monkeypatch.setattr(SampleBuffer, "draw", note_draw)
    trainer = SpotTrainer(settings, ticking(1.0).__next__)
    for _ in range(6):
        assert trainer.learn()
    trainer.close()
    measured = {tuple(sample.ids.tolist()) for sample in trainer._held}
    assert (len(learned), len(measured)) == (47, 3)
    assert not learned & measured
    _, made = read_drafter(Path(settings.folder)) or pytest.fail("nothing was saved")
    assert made.agreement is not None
    assert made.used_agreement is None, "engines have none yet"


def test_a_trainer_that_was_killed_is_not_measured_on_what_it_has_learned_from(
    settings: SpotSettings,
) -> None:
    """It hears the last lesson again, and holds out one more of it, as it has none yet."""
    trainer = SpotTrainer(settings)
    for step in (1, 2, 3):
        tell(settings, step, count=4)
        assert trainer.learn()
    trainer.close()
    assert len(trainer._buffer) == 3 * 4 - len(trainer._held)
    again = SpotTrainer(settings)
    assert again.learn()
    again.close()
    [held] = again._held
    number = next(n for n, one in enumerate(responses_of(settings, 4)) if one.ids.equal(held.ids))
    assert (3, number) not in again._buffer.held
    assert len(again._buffer) == len(trainer._buffer) - 1


def held_out(count: int, *steps: int, is_first: bool = False) -> list[tuple[int, int]]:
    return [
        (step, n) for step in steps for n in range(count) if is_held_out(step, n, count, is_first=is_first)
    ]


def test_one_response_in_twenty_is_held_out_however_few_a_step_has() -> None:
    for count in (1, 2, 3, 8, 20, 40, 256):
        share = len(held_out(count, *range(1, 201))) / (200 * count)
        assert share == pytest.approx(0.05, rel=0.02)
    assert len(held_out(400, 3)) == 20


def test_the_first_lesson_has_something_to_measure_on_and_to_learn_from() -> None:
    for count in (2, 3, 8, 20, 40):
        for step in (1, 2, 7):
            assert 1 <= len(held_out(count, step, is_first=True)) < count
    assert not held_out(1, 1, is_first=True)


def test_a_run_of_few_responses_learns_from_more_than_its_last_steps(settings: SpotSettings) -> None:
    trainer = SpotTrainer(settings)
    for step in range(1, 9):
        tell(settings, step=step, count=3)
        assert trainer.learn()
    trainer.close()
    assert len(trainer._buffer) == 8 * 3 - 1 - len(held_out(3, *range(2, 9)))
    assert len(trainer._held) == 1 + len(held_out(3, *range(2, 9)))


def test_the_drafter_that_engines_have_is_measured_beside_the_present_one(settings: SpotSettings) -> None:
    tell(settings, step=1)
    folder = Path(settings.folder)
    trainer = SpotTrainer(settings, itertools.count(1000.0).__next__)  # it was long in loading
    for _ in range(3):
        assert trainer.learn()
    trainer.close()
    tensors, first = read_folder(folder) or pytest.fail("nothing was saved")
    assert 0 < first.trained_s < 100
    used = {name: tensor for name, tensor in tensors.items() if name.startswith("network.")}
    checkpoints.write(folder / USED_NAME, used, first.note())
    trainer = SpotTrainer(settings, itertools.count(1000.0).__next__)
    for _ in range(6):
        assert trainer.learn()
    trainer.close()
    _, second = read_folder(folder) or pytest.fail("nothing was saved")
    assert second.used_agreement == pytest.approx(first.agreement, abs=1e-6)
    assert second.used_agreement != second.agreement
    assert first.trained_s < second.trained_s < 100


def test_a_session_tells_what_it_used_and_a_dead_trainer_has_none(
    settings: SpotSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = ("timeit", ("-n", "1000000000", "pass"))
    monkeypatch.setattr(spot_link, "ChildProcess", lambda what, *_: ChildProcess(what, *busy))
    link = SpotLink(settings)
    try:
        assert link.pause("w0", None) is None, "nobody has let it go"
        [child] = link._children
        link.resume("w0", "w0")
        while (child.core_s() or 0.0) < 0.1:
            time.sleep(0.01)
        core_s = link.pause("w0", None)
        assert core_s is not None
        assert 0.05 < core_s < 5.0
        link.resume("w0", "w0")
        os.kill(child.pid, signal.SIGKILL)
        while child.core_s() is not None:
            time.sleep(0.01)
        assert link.pause("w0", None) is None
    finally:
        link.close()


def test_a_full_disk_ends_no_run(
    settings: SpotSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spot_link, "ChildProcess", lambda *_: SimpleNamespace(close=lambda: None))
    tell(settings, step=1)
    trainer = SpotTrainer(settings, ticking(1.0).__next__)
    for _ in range(3):
        assert trainer.learn()
    trainer.close()
    num_tried = itertools.count()

    def refuse(*_: Any) -> None:
        next(num_tried)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write", refuse)
    link = SpotLink(settings)
    policy, samples = policy_of(settings), responses_of(settings, 2)
    assert link.take() is not None
    for _ in range(500):
        link.teach(2, policy, samples)
        link.use()
        if caplog.text.count("is not kept for the drafter's training: cannot write") > 3:
            break
        time.sleep(0.01)
    link.close()
    assert "a lesson is not kept" in caplog.text
    assert "the drafter that is used is not kept" in caplog.text
    assert "No space left on device; the checkpoint before it is whole. Free some space" in caplog.text
    assert next(num_tried) > 2, "each is tried again"


def test_a_trainer_works_once_it_has_saved_something(
    settings: SpotSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def start(*arguments: Any) -> Any:
        made.append(arguments[-1])
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(spot_link, "ChildProcess", start)
    SpotLink(settings, 2).close()
    folder, before_ns = Path(settings.folder), time.time_ns() - 1_000_000_000
    assert [has_worked(before_ns) for has_worked in made] == [False, False]
    (folder / FILE_NAME).touch()
    assert [has_worked(before_ns) for has_worked in made] == [True, True], (
        "a leader saves what all have learned"
    )
    assert not made[0](time.time_ns() + 1_000_000_000)


def test_a_drafter_that_engines_have_got_is_found_again(settings: SpotSettings) -> None:
    tell(settings, step=1)
    trainer = SpotTrainer(settings, ticking(1.0).__next__)
    for _ in range(3):
        assert trainer.learn()
    trainer.close()
    link = SpotLink(settings)
    assert link.used() is None
    weights, made = link.take() or pytest.fail("nothing was saved")
    link.use()
    link.close()
    found, described = link.used() or pytest.fail("nothing was kept")
    assert described == made
    assert found.keys() == weights.keys()
    assert all(one.equal(weights[name]) for name, one in found.items())


def test_a_head_of_another_target_is_refused(settings: SpotSettings, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", hidden=64)
    make_head(other, tmp_path / "head", "eagle", seed=0)
    with pytest.raises(CheckpointError, match="another network"):
        SpotTrainer(msgspec.structs.replace(settings, method="eagle", drafter=str(tmp_path / "head")))


def grow(settings: SpotSettings) -> dict[str, torch.Tensor]:
    """Train in two processes' lives, the second of which goes on; returns the weights."""
    trainer = SpotTrainer(settings, ticking(1.0).__next__)
    assert not trainer.learn()
    tell(settings, step=1)
    agreements = []
    for _ in range(60):
        assert trainer.learn()
    trainer.close()
    found = read_drafter(Path(settings.folder))
    assert found is not None
    agreements.append(found[1].agreement)
    tokens, seconds = found[1].trained_tokens, found[1].trained_s
    assert tokens > 20_000
    assert 0 < seconds < 200

    again = SpotTrainer(settings, ticking(1.0).__next__)
    for _ in range(60):
        assert again.learn()
    again.close()
    weights, made = read_drafter(Path(settings.folder)) or ({}, found[1])
    assert made.trained_tokens > tokens
    assert made.trained_s > seconds
    agreements.append(made.agreement)
    first, last = agreements
    assert first is not None
    assert last is not None
    assert 0.1 < first < last
    return weights


def test_a_run_that_went_back_to_a_checkpoint_repeats_steps(settings: SpotSettings) -> None:
    trainer = SpotTrainer(settings)
    for step in (7, 3):
        tell(settings, step)
        assert trainer.learn()
    trainer.close()


def test_lessons_of_another_policy_are_refused(settings: SpotSettings) -> None:
    tensors, note = make_lesson(1, {"model.other": torch.zeros(1)}, responses_of(settings, 1))
    checkpoints.write(Path(settings.folder) / LESSON, tensors, note)
    with pytest.raises(CheckpointError, match=r"no weight 'model\.other'"):
        SpotTrainer(settings).learn()


def test_new_weights_of_the_policy_are_used(settings: SpotSettings) -> None:
    """The head that is shared follows too."""
    trainer = SpotTrainer(settings)
    other = {name: weight + 1.0 for name, weight in policy_of(settings).items()}
    checkpoints.write(Path(settings.folder) / LESSON, *make_lesson(1, other, responses_of(settings, 2)))
    assert trainer.learn()
    for name, weight in trainer._target.named_parameters():
        assert weight.equal(other[name]), name
    assert trainer._shared.head.equal(other["lm_head.weight"])


def test_a_new_drafter_has_the_targets_vocabulary(settings: SpotSettings, tmp_path: Path) -> None:
    made, target = (AutoConfig.from_pretrained(folder) for folder in (tmp_path / "small", settings.target))
    assert made.vocab_size == target.vocab_size
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match="multiple of 64"):
        make_small_model(Path(settings.target), tmp_path / "odd", 100, 1, seed=0)


@pytest.mark.slow
def test_the_process_stops_at_once_and_survives_being_killed(settings: SpotSettings) -> None:
    link = SpotLink(settings)
    try:
        tell(settings, step=1)
        saved = wait_for_save(settings, 0)
        [first] = link.pids

        began_s = time.monotonic()
        link.stop()
        while state_of(first) != "T":
            time.sleep(0.001)
        assert time.monotonic() - began_s < 0.2
        used = cpu_ticks(first)
        time.sleep(0.3)
        assert cpu_ticks(first) == used
        link.resume("w0", "w0")
        saved = wait_for_save(settings, saved)
        assert link.take() is not None
        before = (read_drafter(Path(settings.folder)) or ({}, None))[1]

        os.kill(first, signal.SIGKILL)
        while is_alive(first):
            time.sleep(0.01)
        while link.pids == [first]:
            link.pause("w0", None)  # nothing is there to be paused
            link.resume("w0", "w0")  # a zombie whose threads have not all ended cannot be waited for yet
            time.sleep(0.01)
        wait_for_save(settings, (Path(settings.folder) / FILE_NAME).stat().st_mtime_ns)
        after = (read_drafter(Path(settings.folder)) or ({}, None))[1]
        assert before is not None
        assert after is not None
        assert after.trained_tokens > before.trained_tokens
    finally:
        link.close()
    assert not any(map(is_alive, link.pids))


@pytest.mark.slow
def test_a_trainer_that_is_stopped_ends_with_the_run(settings: SpotSettings) -> None:
    """The run is killed; nobody is left to tell its trainer."""
    code = (
        "import sys, msgspec, os, time\n"
        "from paceline.distillation.spot import SpotSettings\n"
        "from paceline.distillation.spot_link import SpotLink\n"
        "s = msgspec.json.decode(sys.argv[1], type=SpotSettings)\n"
        "link = SpotLink(msgspec.structs.replace(s, parent=os.getpid()))\n"
        "time.sleep(1.0); link.stop(); print(*link.pids, flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert is_alive(pid)
        run.kill()
    for _ in range(500):
        if not is_alive(pid):
            return
        time.sleep(0.01)
    pytest.fail("it is still there")


def wait_for_save(settings: SpotSettings, since_ns: int) -> int:
    path = Path(settings.folder) / FILE_NAME
    for _ in range(6000):
        if path.is_file() and path.stat().st_mtime_ns > since_ns:
            return path.stat().st_mtime_ns
        time.sleep(0.05)
    raise AssertionError("nothing was saved")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

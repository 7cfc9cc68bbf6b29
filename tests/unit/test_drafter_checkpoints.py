"""Checkpoints of a drafter's training: whole at any moment, newest first, and what goes wrong is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from paceline.distillation import checkpoints
from paceline.distillation.checkpoints import CheckpointWriter, read, write, written_aside
from paceline.errors import CheckpointError, RecordError

SAVES_FOREVER = """
import sys, torch
from pathlib import Path
from paceline.distillation.checkpoints import CheckpointWriter, read
path = Path(sys.argv[1])
found = read(path)
count = int(found[1]["count"]) if found else 0
with CheckpointWriter(path) as writer:
    while True:
        count += 1
        writer.save({"weights": torch.full((300_000,), float(count))}, {"count": str(count)})
        print(count, flush=True)
"""

WRITES_ASIDE = """
import sys, time
from pathlib import Path
from paceline.distillation.checkpoints import written_aside
with written_aside(Path(sys.argv[1])) as aside:
    (aside / "model.safetensors").write_text("half")
    print("written", flush=True)
    time.sleep(600.0)
"""


def test_a_killed_trainer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    last = 0
    for delay in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES_FOREVER, path], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        while delay and not path.is_file():  # the first time it is killed before anything is written
            child.stdout.readline()
        for _ in range(400 * delay):  # then at another moment each time
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        found = read(path)
        if found is None:  # killed before the first one was written
            assert last == 0
            continue
        tensors, note = found
        count = int(note["count"])
        assert count >= last
        assert (tensors["weights"] == count).all()
        last = count
    assert last > 0


def test_what_was_saved_last_is_in_the_file_after_close(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.safetensors"
    weights = torch.zeros(10)
    with CheckpointWriter(path) as writer:
        for step in range(50):
            weights += 1
            writer.save({"weights": weights, "step": torch.tensor(step)}, {"step": str(step)})
    found = read(path)
    assert found is not None
    tensors, note = found
    assert note == {"step": "49"}
    assert (tensors["weights"] == 50).all()
    assert tensors["step"].shape == ()


def test_saving_does_not_wait_for_the_disk_and_later_changes_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = tmp_path / "state.safetensors", threading.Event()
    real, began = write, threading.Event()
    written: list[float] = []

    def slow(path: Path, tensors: dict[str, torch.Tensor], note: dict[str, str]) -> None:
        began.set()
        gate.wait()
        written.append(float(tensors["weights"][0]))
        real(path, tensors, note)

    monkeypatch.setattr(checkpoints, "write", slow)
    weights = torch.ones(4)
    with CheckpointWriter(path) as writer:
        writer.save({"weights": weights}, {})
        began.wait()
        for value in (2.0, 3.0, 4.0):  # while the first one is being written
            weights.fill_(value)
            writer.save({"weights": weights}, {})
        weights.fill_(9.0)
        gate.set()
    assert written == [1.0, 4.0]


def test_a_full_disk_is_told_and_the_old_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    write(path, {"weights": torch.ones(2)}, {"step": "1"})

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    writer = CheckpointWriter(path)
    writer.save({"weights": torch.zeros(2)}, {"step": "2"})
    with pytest.raises(RecordError, match="Free some space"):
        writer.close()
    found = read(path)
    assert found is not None
    assert found[1] == {"step": "1"}


def test_a_full_disk_keeps_no_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "state.safetensors", {"weights": torch.zeros(2)}, {})
    assert not list(tmp_path.iterdir())


def test_what_else_goes_wrong_is_told_too_and_the_next_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, failed = tmp_path / "state.safetensors", threading.Event()

    def lack(*_: object) -> bytes:
        failed.set()
        raise MemoryError

    writer = CheckpointWriter(path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.safetensors.torch, "save", lack)
        writer.save({"weights": torch.zeros(2)}, {"step": "1"})
        assert failed.wait(10.0)
    for _ in range(1000):
        if writer._error is not None:
            break
        threading.Event().wait(0.01)
    with pytest.raises(RecordError, match=r"state\.safetensors: MemoryError\(\); .* Free some space"):
        writer.save({"weights": torch.zeros(2)}, {"step": "2"})
    writer.save({"weights": torch.zeros(2)}, {"step": "3"})
    writer.close()
    found = read(path)
    assert found is not None
    assert found[1] == {"step": "3"}


def test_what_is_written_aside_touches_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "head.new").mkdir()
    (tmp_path / "head.new" / "notes").write_text("mine")
    with written_aside(tmp_path / "head") as aside:
        (aside / "config.json").write_text("{}")
    assert (tmp_path / "head.new" / "notes").read_text() == "mine"
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "head").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").rmdir()
    with pytest.raises(IsADirectoryError), written_aside(tmp_path / "head") as aside:
        aside.write_text("what is written here fails")
    assert (tmp_path / "head" / "config.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"head", "head.new"}


def write_config(out: Path) -> None:
    with written_aside(out) as aside:
        (aside / "config.json").write_text("{}")


def test_what_a_killed_process_was_writing_is_removed_by_the_next_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "head[1]"
    mine = tmp_path / f".{out.name}-mine"
    mine.mkdir()
    child = subprocess.Popen([sys.executable, "-c", WRITES_ASIDE, out], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        write_config(out)
        [half] = {*tmp_path.iterdir()} - {out, mine}
        assert [path.read_text() for path in half.rglob("model.safetensors")] == ["half"], "its writer lives"
        write_config(tmp_path / "other")
        assert half.exists()
    finally:
        child.kill()
        child.communicate()
    write_config(tmp_path / "other")
    assert half.exists(), "of another target"
    write_config(out)
    assert {*tmp_path.iterdir()} == {out, mine, tmp_path / "other"}
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_a_file_system_without_locks_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    write_config(tmp_path / "head")
    write_config(tmp_path / "head")
    with pytest.raises(ValueError, match="half way"), written_aside(tmp_path / "head"):
        raise ValueError("half way")
    assert [path.name for path in tmp_path.rglob("*")] == ["head", "config.json"]


def test_no_checkpoint_is_none_and_another_file_is_an_error(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") is None
    (tmp_path / "other").write_text("not this")
    with pytest.raises(CheckpointError, match="begin anew"):
        read(tmp_path / "other")

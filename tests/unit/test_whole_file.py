"""Files that are there whole or not at all: links, devices, disks that refuse, bytes that no decoder takes."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from paceline.commands.inputs.options import check_writable
from paceline.errors import RecordError
from paceline.record.plan_file import read_plan
from paceline.record.whole_file import replacing, write_text


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    file, link = tmp_path / "far" / "real.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    check_writable("--out", link)
    write_text("new", link)
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["far", "link.json", "real.json"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable("--out", pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text("whole", pipe)
    reader.join(10.0)
    assert read == ["whole"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_pipe_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(RecordError, match=r"Permission denied; choose another --out"):
        check_writable("--out", tmp_path / "pipe")


def test_a_disk_that_refuses_keeps_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def fill() -> None:
        with replacing(file) as draft:
            draft.write_text("ne")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RecordError, match="No space left"):
        fill()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "text",
    [b'{"version": 1, "target": "caf\xe9"}', b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=["not UTF-8", "nested"],
)
def test_a_file_that_no_decoder_takes_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(RecordError, match="not a plan"):
        read_plan(tmp_path / "plan.json")

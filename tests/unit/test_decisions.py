"""The decision log: what is written is read back bit for bit; torn, damaged and foreign files; disks that refuse."""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline import __version__
from paceline.config import BudgetSettings, EngineSettings, FleetSettings
from paceline.errors import RecordError
from paceline.record.decisions import (
    BudgetLine,
    ControllerLine,
    DecisionHeader,
    DecisionLine,
    DecisionReader,
    DecisionWriter,
    DrafterLine,
    GrowthLine,
    PathCandidates,
    PathsGainLine,
    PathsLine,
    Rows,
    StepLine,
    find_decisions,
)
from paceline.types import StepObservation

SETTINGS = EngineSettings(sharpness=math.inf, budget=BudgetSettings(bandit_epsilon=1 / 3))
HEADER = DecisionHeader(kind="engine", settings=SETTINGS.model_dump())
DRAFTS = Rows.pack(np.array([[0.9, 0.1, 0.0], [0.0, 0.0, 0.0], [1.0, 1e-38, 1e-45]], np.float32))
STEP = StepLine(step=StepObservation(3, 4, 2, 0, 0.1 + 0.2, num_context_tokens=99), expected_tokens=1 / 3)
LINES: list[DecisionLine] = [
    BudgetLine(
        num_context_tokens=12,
        num_other_tokens=3,
        max_total_draft_tokens=48,
        drafts=DRAFTS,
        lengths=(1, 0, 2),
        judged=True,
        free=DRAFTS,
    ),
    PathsLine(),
    PathsLine(
        max_rows=4,
        candidates=PathCandidates((0, 2), b"12345678" * 3, DRAFTS, (1, 1), (0, 1), (5, 7)),
        chosen=(1,),
        lengths=(1,),
    ),
    PathsGainLine(promised=0.1, gained=2.0),
    DrafterLine(),
    DrafterLine(floor=0.07, level_costs=b"1234"),
    GrowthLine(num_levels=3, num_rows=7, seconds=0.002),
    STEP,
    ControllerLine(event="Opened", body=msgspec.Raw(b"\x80"), actions=("start w0 (life 0)",), error="no"),
]


def write(folder: Path, *lines: DecisionLine) -> Path:
    writer = DecisionWriter.create(folder, HEADER)
    for line in lines:
        writer.write(line)
    writer.close()
    return writer.path


def test_every_line_is_read_back_as_it_was(tmp_path: Path) -> None:
    with DecisionReader(write(tmp_path, *LINES)) as reader:
        assert (reader.header.kind, reader.header.paceline) == ("engine", __version__)
        assert reader.settings(EngineSettings) == SETTINGS
        found = list(reader)
        assert not reader.torn
    for line, mine in zip(found, LINES, strict=True):
        assert msgspec.msgpack.encode(line) == msgspec.msgpack.encode(mine)
    assert type(found[0]) is BudgetLine
    assert found[7] == STEP


def test_rows_come_back_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    for shape in ((0, 3), (1, 1), (5, 16), (64, 127)):
        table = np.cumprod(rng.random(shape, np.float32), axis=1, dtype=np.float32)
        table[np.arange(shape[1]) >= rng.integers(0, shape[1] + 1, shape[0])[:, None]] = 0.0
        back = Rows.pack(table).unpack()
        assert back.dtype == np.float32
        assert np.array_equal(back.view(np.uint32), table.view(np.uint32))


def test_a_log_is_a_plain_stream_of_messagepack(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")
    with write(tmp_path, STEP).open("rb") as file:
        size, header, _, step = list(msgpack.Unpacker(file))
    assert size > 100
    assert header["kind"] == "engine"
    assert step["line"] == "step"


def test_every_log_gets_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / "new", STEP) for _ in range(11)]
    assert [path.name for path in paths[:2]] == ["engine-1.decisions", "engine-2.decisions"]
    assert find_decisions(tmp_path / "new") == paths
    assert find_decisions(paths[3]) == [paths[3]]
    (tmp_path / "new").rename(tmp_path / "decisions")
    assert len(find_decisions(tmp_path)) == 11, "a run folder"


def test_what_was_torn_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, STEP, STEP)
    whole = path.read_bytes()
    for cut in (1, 10, 150):
        path.write_bytes(whole[:-cut])
        with DecisionReader(path) as reader:
            assert list(reader) == [STEP]
            assert reader.torn


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    writer = DecisionWriter.create(tmp_path, msgspec.structs.replace(HEADER, version=99))
    writer.close()
    with pytest.raises(RecordError, match="version 99, this Paceline reads version 1: replay it with"):
        DecisionReader(writer.path)


def test_settings_that_this_version_does_not_know_are_refused(tmp_path: Path) -> None:
    writer = DecisionWriter.create(tmp_path, DecisionHeader(kind="engine", settings={"magic": 3}))
    writer.close()
    with DecisionReader(writer.path) as reader, pytest.raises(RecordError, match="magic=3"):
        reader.settings(FleetSettings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"event": "header"}\n', "is not a decision log, or damaged"),
        (b"\xce\x00\x00\x00\x01\xc0", "is not a decision log"),
        (b"\xce\x00\x00\x00\x0f\x81\xa7version\xa5wrong", "is not a decision log"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "some.decisions"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        DecisionReader(path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, STEP)
    path.write_bytes(path.read_bytes() + b"\xce\x00\x00\x00\x01\xc0")
    with DecisionReader(path) as reader, pytest.raises(RecordError, match="the line that ends at byte"):
        list(reader)


@pytest.mark.parametrize("value", [b"\xa4caf\xe9", b"\x91" * 100_000 + b"\x90"], ids=["not UTF-8", "nested"])
def test_what_no_decoder_takes_is_damage_too(tmp_path: Path, value: bytes) -> None:
    def framed(line: bytes) -> bytes:
        return struct.pack(">BI", 0xCE, len(line)) + line

    path = tmp_path / "some.decisions"
    path.write_bytes(framed(b"\x82\xa7version\x01\xa8settings\x81\xa1x" + value))
    with pytest.raises(RecordError, match="is not a decision log"):
        DecisionReader(path)
    line = framed(b"\x83\xa4line\xaacontroller\xa4body" + value + b"\xa5event" + value)
    path = write(tmp_path)
    path.write_bytes(path.read_bytes() + line)
    with DecisionReader(path) as reader, pytest.raises(RecordError, match="the file is damaged"):
        list(reader)


def test_where_nothing_was_logged_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RecordError, match=r"--decisions DIR`, or `paceline train --set record.decisions=true"
    ):
        find_decisions(tmp_path)


def test_a_full_disk_ends_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = DecisionWriter.create(tmp_path, HEADER)
    writer.write(STEP)
    whole = writer.path.read_bytes()
    real = os.write

    def write_half(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) - 10])

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", write_half)
        writer.write(STEP)
    assert not writer.is_open
    writer.write(STEP)
    writer.close()
    assert writer.path.read_bytes() == whole, "the torn line was cut off"
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert "the rollout goes on" in caplog.text


def test_a_folder_that_cannot_be_made_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    writer = DecisionWriter.create(tmp_path / "file" / "decisions", HEADER)
    writer.write(STEP)
    assert not writer.is_open
    assert "Not a directory" in caplog.text


def test_what_cannot_be_encoded_ends_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = DecisionWriter.create(tmp_path, HEADER)
    writer.write(
        BudgetLine(
            num_context_tokens=1 << 70,
            num_other_tokens=0,
            max_total_draft_tokens=0,
            drafts=DRAFTS,
            lengths=(),
        )
    )
    assert not writer.is_open
    assert "no longer logged" in caplog.text

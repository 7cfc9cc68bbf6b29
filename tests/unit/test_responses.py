"""The output file: nothing written is lost, nothing foreign is mixed in."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import write

from paceline.commands.rollout.responses import (
    KnownResponse,
    ResponseFile,
    ResponseLine,
    encode_line,
    refuse_difference,
)
from paceline.errors import RecordError


def line(prompt: str | int = 1, sample: int = 0, **changes: Any) -> ResponseLine:
    return ResponseLine(
        **{
            "id": prompt,
            "sample": sample,
            "group": 5,
            "key": 2**64 - 1,
            "prompt_ids": (1, 2),
            "tokens": (3, 4),
            "text": "ab",
            "logprobs": (-0.1, -0.2),
            "finish_reason": "stop",
            "policy": "model",
            "policy_fingerprint": "f",
            "options": {"seed": 0, "temperature": 1.0},
            "num_draft_tokens": 3,
            "num_accepted_tokens": 1,
            "num_steps": 1,
            **changes,
        }
    )


@pytest.fixture
def partly_failed(tmp_path: Path) -> Path:
    """Three responses, the second of which has failed, and a torn line."""
    reasons = ["stop", "error", "length"]
    lines = [encode_line(line("a", i, finish_reason=reasons[i]), {}) for i in range(3)]
    path = tmp_path / "o.jsonl"
    path.write_bytes(b"".join(lines) + b'{"id')
    return path


def test_failed_responses_are_taken_out_to_be_made_again(partly_failed: Path) -> None:
    first, _, last = partly_failed.read_bytes().splitlines(keepends=True)[:3]
    with ResponseFile.resume(partly_failed)[0]:
        assert len(partly_failed.read_bytes().splitlines()) == 3, "unasked it stays"
    file, known = ResponseFile.resume(partly_failed, without_failed=True)
    with file:
        assert set(known) == {("a", 0), ("a", 2)}
        assert partly_failed.read_bytes() == first + last
        file.append(encode_line(line("a", 1), {}))
        assert file.num_written == 1
        with pytest.raises(RecordError, match="written by another process"):
            ResponseFile.resume(partly_failed)
    assert set(ResponseFile.resume(partly_failed)[1]) == {("a", 0), ("a", 1), ("a", 2)}
    assert [one.name for one in partly_failed.parent.iterdir()] == ["o.jsonl"]


def test_a_disk_without_room_for_both_keeps_failed_responses(
    partly_failed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(RecordError, match=r"No space left on device; .* is as it was"):
        ResponseFile.resume(partly_failed, without_failed=True)
    monkeypatch.undo()
    assert len(ResponseFile.resume(partly_failed)[1]) == 3
    assert [one.name for one in partly_failed.parent.iterdir()] == ["o.jsonl"]


def test_a_resumed_output_drops_a_torn_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "o.jsonl"
    lines = [encode_line(line("a", sample), {"answer": 7}) for sample in range(3)]
    with ResponseFile.create(path) as file:
        for one in lines:
            file.append(one)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    file, known = ResponseFile.resume(path)
    with file:
        assert set(known) == {("a", 0), ("a", 1)}
        assert known["a", 0].key == 2**64 - 1
        file.append(lines[2])
    assert path.read_bytes() == whole
    assert json.loads(lines[0])["answer"] == 7


def test_a_foreign_line_in_the_output_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "o.jsonl", {"id": 1}, {"id": 2})
    with pytest.raises(RecordError, match="line 1 is not a response of 'paceline rollout'"):
        ResponseFile.resume(path)


@pytest.mark.parametrize(
    "value", [b'"caf\xe9"', b"[" * 100_000 + b"]" * 100_000], ids=["not UTF-8", "nested"]
)
def test_a_line_that_no_decoder_takes_is_foreign_too(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "o.jsonl"
    path.write_bytes(b'{"x":' + value + b',"finish_reason":' + value + b"}\n")
    with pytest.raises(RecordError, match="line 1 is not a response of 'paceline rollout'"):
        ResponseFile.resume(path)


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    with ResponseFile.create(path), pytest.raises(RecordError, match="another process"):
        ResponseFile.resume(path)
    ResponseFile.resume(path)[0].close()


def test_a_full_disk_loses_nothing_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.jsonl"
    real = os.write
    room = 3 * len(encode_line(line(), {})) // 2

    def write_little(fd: int, data: bytes) -> int:
        left = room - os.fstat(fd).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:left])

    with ResponseFile.create(path) as file:
        monkeypatch.setattr(os, "write", write_little)
        file.append(encode_line(line(sample=0), {}))
        with pytest.raises(RecordError, match=r"No space left on device; the 1 responses .* --resume"):
            file.append(encode_line(line(sample=1), {}))
        monkeypatch.undo()
    assert path.read_bytes() == encode_line(line(sample=0), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_fingerprint": "g"}, "of other weights"),
        ({"options": {"seed": 0, "temperature": 0.5}}, "made with temperature=0.5, this run has 1.0"),
        ({"options": {"temperature": 1.0}}, "made with seed=None, this run has 0"),
        (
            {"options": {"seed": 0, "temperature": 1.0, "compiled": True}},
            "made with compiled=True, this run has None",
        ),
        ({"key": 4}, "of another prompt"),
    ],
)
def test_responses_of_another_run_are_not_mixed_in(changes: dict[str, Any], message: str) -> None:
    own = line()
    values = {name: getattr(own, name) for name in KnownResponse.__struct_fields__}
    arguments = (own.key, own.policy_fingerprint, own.options)
    refuse_difference(Path("o.jsonl"), KnownResponse(**values), *arguments)
    with pytest.raises(RecordError, match=re.escape(message)):
        refuse_difference(Path("o.jsonl"), KnownResponse(**{**values, **changes}), *arguments)

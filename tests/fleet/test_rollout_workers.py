"""`paceline rollout --workers`: killed outright and resumed, it writes what one engine would have."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_parts import POLICY, Generate
from vllm import SamplingParams

from paceline.fleet.journal import _FRAME, _read_entries, _read_frames
from paceline.record import ChunkDone, RecordReader, ResponseDone, RunEnd
from paceline.report import build_report
from paceline.types import RolloutRequest

SAMPLES = 8
OPTIONS = [
    "--samples",
    SAMPLES,
    "--max-tokens",
    600,
    "--dtype",
    "float32",
    "--kv-cache-gib",
    0.0625,
    "--seed",
    5,
    "--eager",
]


def command(prompts: Path, out: Path, *arguments: object) -> list[str]:
    words = ["rollout", POLICY, prompts, "--out", out, *OPTIONS, *arguments]
    return [sys.executable, "-m", "paceline.cli", *map(str, words)]


def read(path: Path) -> dict[tuple[Any, int], dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line["id"], line["sample"]): line for line in lines}
    assert len(found) == len(lines), "a response was written twice"
    return found


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_record(folder: Path, num_resumed: int) -> None:
    """Both parts of the rollout are recorded, and the report shows the whole one."""
    with RecordReader(folder) as reader:
        events = list(reader)
    steps = {event.step for event in events if isinstance(event, ChunkDone)}
    assert len(steps) == 2
    responses = [event for event in events if isinstance(event, ResponseDone) and event.step == max(steps)]
    assert len(responses) == num_resumed
    for response in responses:
        place = (response.step, response.group, response.sample)
        own = [e for e in events if isinstance(e, ChunkDone) and (e.step, e.group, e.sample) == place]
        assert own[0].start + sum(chunk.tokens for chunk in own) == response.response_tokens
    assert any(event.start for event in events if isinstance(event, ChunkDone) and event.step == max(steps))
    assert isinstance(events[-1], RunEnd)
    assert events[-1].reason == "finished"
    assert build_report(folder).read_text().count('class="timeline"') == 1


def count_journal(path: Path, without: set[int]) -> int:
    """Tokens that it has of responses, but for those with the keys in `without`."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _FRAME.size:
        return 0
    head = data[: _FRAME.size + _FRAME.unpack_from(data)[0]]
    entries = (entry for frame in _read_frames(path, head) for entry in _read_entries(frame))
    return sum(len(entry.packed) for entry in entries if entry.name[0] not in without)


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The responses that are written in whole."""
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def keys_of(out: Path) -> set[int]:
    """Keys of the responses that are written."""
    return {line["key"] for line in lines_of(out)}


def test_killed_and_resumed(plain: Generate, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "o.jsonl"
    journal = tmp_path / "o.jsonl.progress"
    prompts.write_text("".join(json.dumps({"prompt": f"{i},{i + 2},3:21 "}) + "\n" for i in range(1, 9)))
    environment = {**os.environ, "COLUMNS": "120"}
    first = subprocess.Popen(
        command(prompts, out, "--workers", 2, "--chunk-tokens", 64, "--record", tmp_path / "record"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline_s = time.monotonic() + 400
    while count(out) < 3 or count_journal(journal, keys_of(out)) < 60:
        if first.poll() is not None or time.monotonic() > deadline_s:
            first.kill()
            pytest.fail(f"it did not get that far: {first.communicate()[1]}")
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = count(out)
    assert 3 <= kept < 8 * SAMPLES
    written = lines_of(out)
    from_journal = count_journal(journal, keys_of(out))
    assert from_journal > 0, "the control: nothing to go on from"
    num_kept = from_journal + sum(len(line["tokens"]) for line in written)

    arguments = command(
        prompts, out, "--workers", 1, "--chunk-tokens", 100, "--resume", "--record", tmp_path / "record"
    )
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kept} are there already" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not journal.exists()

    check_record(tmp_path / "record", 8 * SAMPLES - kept)

    lines = read(out)
    assert len(lines) == 8 * SAMPLES
    num_made = int(re.findall(r"(\d+) tokens in", done.stderr)[-1])
    assert 0 < num_made <= sum(len(line["tokens"]) for line in lines.values()) - num_kept
    requests = [RolloutRequest(tuple(line["prompt_ids"]), 600, key=line["key"]) for line in lines.values()]
    for line, response in zip(lines.values(), plain(requests, SamplingParams(temperature=1.0)), strict=True):
        assert tuple(line["tokens"]) == response.tokens
        assert line["finish_reason"] == response.finish_reason
        assert len(line["logprobs"]) == len(line["tokens"])
        assert line["logprobs"] == pytest.approx(response.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["raylet", "ray::RolloutWorker"])
def test_ended_while_the_engines_start(tmp_path: Path, name: str) -> None:
    """SIGTERM while Ray, or the first engine, has only just been started."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "o.jsonl"
    prompts.write_text(json.dumps({"prompt": "1,3,3:21 "}) + "\n")
    started = subprocess.Popen(command(prompts, out, "--workers", 2), stderr=subprocess.PIPE, text=True)
    family: set[psutil.Process] = set()
    deadline_s = time.monotonic() + 300
    while not any(_is_called(child, name) for child in family):
        assert started.poll() is None
        assert time.monotonic() < deadline_s
        family |= _children(started)
        time.sleep(0.25)
    started.send_signal(signal.SIGTERM)
    while started.poll() is None:
        assert time.monotonic() < deadline_s
        family |= _children(started)
        time.sleep(0.25)
    assert started.stderr is not None
    said = started.stderr.read()
    assert started.returncode == 130, said
    assert "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=30)[1]


def _children(process: subprocess.Popen[str]) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()


def _is_called(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return name in " ".join(process.cmdline())
    return False

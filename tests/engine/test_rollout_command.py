"""`paceline rollout` and `paceline bench` as a user runs them: real engine, a process of their own, a tiny model.

Commands that start no engine run in this process, which has loaded vLLM already.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, run_here
from tiny_model import make_model

from paceline.commands.doctor.invariance_check import check_invariance
from paceline.commands.rollout.responses import ResponseLine

SAMPLES = 6
OPTIONS = [
    "--samples",
    SAMPLES,
    "--max-tokens",
    120,
    "--max-num-seqs",
    4,
    "--dtype",
    "float32",
    "--seed",
    5,
    "--eager",
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "ABCDEFG", "answer": 42},
    {"id": "long", "prompt": "ABC" * 60},
    {"id": "ids", "prompt_ids": [1, 9, 9, 9, 7], "level": {"deep": [1, 2]}},
    {"id": "again", "prompt": "ABCDEFG"},
]

Line = dict[str, Any]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(), check=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that starts no engine."""
    return run_here(monkeypatch, capsys)


def read(path: Path) -> dict[tuple[Any, int], Line]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line["id"], line["sample"]): line for line in lines}
    assert len(found) == len(lines), "a response was written twice"
    return found


def essence(line: Line) -> Line:
    """What must be the same however a response was made."""
    return {
        k: v for k, v in line.items() if k not in {"num_draft_tokens", "num_accepted_tokens", "num_steps"}
    }


@pytest.fixture(scope="module")
def whole(model_dir: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run without drafts."""
    out = tmp_path_factory.mktemp("whole") / "o.jsonl"
    done = run("rollout", model_dir, prompts, "--out", out, *OPTIONS, "--drafter", "none")
    assert done.returncode == 0, done.stderr
    assert f"written to {out}" in done.stderr.replace("\n", "")
    assert "\x1b" not in done.stderr, "control characters where there is no terminal"
    assert "Loading" not in done.stderr, "the engine's own chatter"
    return out


def test_every_response_is_written_in_full(whole: Path, model_dir: Path) -> None:
    lines = read(whole)
    ids = [line.get("id", number) for number, line in enumerate(PROMPTS, start=1)]
    assert set(lines) == {(name, sample) for name in ids for sample in range(SAMPLES)}
    for line in lines.values():
        assert set(ResponseLine.__struct_fields__) <= set(line)
        assert len(line["logprobs"]) == len(line["tokens"]) >= 1
        assert all(value <= 0 for value in line["logprobs"])
        assert (line["finish_reason"] == "stop") == (line["tokens"][-1] == 2)
        assert line["finish_reason"] in {"stop", "length"}
        assert line["policy"] == str(model_dir)
    assert lines[1, 0]["answer"] == 42
    assert lines[1, 0]["prompt"] == "ABCDEFG"
    assert lines["ids", 0]["level"] == {"deep": [1, 2]}
    assert lines["ids", 0]["prompt_ids"] == [1, 9, 9, 9, 7]
    assert set(lines["ids", 0]["text"]) <= {chr(33 + i) for i in range(61)}


def test_samples_differ_and_so_do_equal_prompts(whole: Path) -> None:
    lines = read(whole)
    assert lines[1, 0]["prompt_ids"] == lines["again", 0]["prompt_ids"]
    keys = {line["key"] for line in lines.values()}
    assert len(keys) == len(lines)
    assert len({tuple(line["tokens"]) for line in lines.values()}) > len(lines) * 3 // 4


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    process.kill()
    pytest.fail(f"no {count} responses came: {process.communicate()[1]}")


def test_ctrl_c_then_resume_gives_the_same_with_drafts(
    whole: Path, model_dir: Path, prompts: Path, tmp_path: Path, here: Run
) -> None:
    out = tmp_path / "o.jsonl"
    decisions = tmp_path / "decisions"
    arguments = ("rollout", model_dir, prompts, "--out", out, *OPTIONS, "--decisions", decisions)
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, env=environment())
    wait_for_lines(process, out, 3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "go on with the same command and --resume" in told.replace("\n", " ")
    assert "Traceback" not in told
    kept = read(out)
    assert 3 <= len(kept) < len(PROMPTS) * SAMPLES

    with out.open("ab") as file:
        file.write(b'{"id": 1, "sample": 5, "tok')  # as a crash in the middle of a write leaves it
    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} are there already" in done.stderr
    resumed, wanted = read(out), read(whole)
    assert {name: essence(line) for name, line in resumed.items()} == {
        name: essence(line) for name, line in wanted.items()
    }
    assert sum(line["num_draft_tokens"] for line in resumed.values()) > 0
    replayed = here("replay", decisions)
    assert replayed.code == 0, replayed.out + replayed.error
    rows = [line.split() for line in replayed.out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["engine-1.decisions", "engine-2.decisions"]
    assert all(int(row[-2]) > 10 and row[-1] == "0" for row in rows[1:])

    before = out.read_bytes()
    again = here(*arguments, "--resume")
    assert again.code == 0
    assert "nothing to do" in again.error
    assert out.read_bytes() == before
    other = here(*arguments, "--resume", "--temperature", "0.5")
    assert other.code == 6
    assert "made with temperature=1.0, this run has 0.5" in other.error.replace("\n", " ")
    other = here(*arguments, "--resume", "--compiled")
    assert other.code == 6
    assert "made with compiled=False, this run has True" in other.error.replace("\n", " ")
    assert out.read_bytes() == before


def test_bench_compares_tokens(model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    result = tmp_path / "b.json"
    done = run(
        "bench", model_dir, prompts, "--methods", "lookup", "--repetitions", 2, "--samples", 2, "--limit", 2,
        "--max-tokens", 60, "--dtype", "float32", "--eager", "--json", result,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compared tokens are those of decoding without drafts" in done.stdout.replace("\n", " ")
    assert "Traceback" not in done.stderr
    found = json.loads(result.read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert found["benchmark"] == "bench"
    assert list(rows) == ["none", "lookup"]
    assert rows["none"]["acceptance_length"] == 1.0
    assert rows["lookup"]["diverged_tokens"] == 0
    assert rows["lookup"]["compared_tokens"] == rows["none"]["tokens"] == rows["lookup"]["tokens"] > 60
    assert all(row["wall_s"] > 0 and row["repetitions"] == 2 for row in rows.values())


def test_a_drafter_of_another_tokenizer_is_refused(
    model_dir: Path, prompts: Path, tmp_path: Path, here: Run
) -> None:
    drafter = make_model(tmp_path / "drafter", layers=1)
    path = drafter / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(content))
    done = here("rollout", model_dir, prompts, "--out", tmp_path / "o.jsonl", "--model-drafter", drafter)
    assert done.code == 3
    assert "different tokenizers: 2 tokens differ, 'A' among them" in done.error.replace("\n", " ")


@pytest.mark.slow
def test_the_doctor_tells_an_invariant_machine_from_one_that_is_not() -> None:
    ways = check_invariance("float32")
    assert [(way.diverged, way.different_logprobs) for way in ways] == [(0, 0)] * len(ways)
    assert ways[0].num_draft_tokens > 0
    without = check_invariance("float32", batch_invariant=False)
    if not any(way.different_logprobs for way in without):
        pytest.skip("the stock float32 kernels of this processor are invariant")


def test_the_quick_doctor_finds_this_machine_fit(here: Run) -> None:
    done = here("doctor", "--quick", "--json")
    found = json.loads(done.out)
    assert found["ok"] == (done.code == 0)
    names = {(finding["area"], finding["name"]) for finding in found["findings"]}
    assert {("installation", "vllm"), ("doors", "vllm"), ("machine", "cores")} <= names
    assert [f for f in found["findings"] if f["state"] == "fail"] == []

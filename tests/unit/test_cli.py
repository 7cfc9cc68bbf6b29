"""The command line without an engine: help, bad input, the prompts file, the output file, findings, comparisons."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import cli
from paceline.commands.bench import choose_methods, compare
from paceline.commands.checkpoint import Checkpoint, read_checkpoint
from paceline.commands.contender import Measurement, summarise
from paceline.commands.findings import Finding, cpu_quota, fits, look_at_environment
from paceline.commands.interrupt import Interrupt
from paceline.commands.launch import check_batch
from paceline.commands.progress import LINE_S, Progress
from paceline.commands.prompts import read_prompts
from paceline.commands.responses import (
    RESERVED,
    KnownResponse,
    ResponseFile,
    ResponseLine,
    encode_line,
    refuse_difference,
)
from paceline.errors import ConfigError, PacelineError, RecordError, RequestError
from paceline.types import Response, RolloutRequest, StepObservation

COMMANDS = ("train", "rollout", "bench", "report", "doctor")
CONFIG = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model until an engine is started."""
    return make_model(tmp_path / "model", CONFIG)


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", {"prompt_ids": [1, 2, 3]})


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@dataclass
class Outcome:
    code: int
    out: str
    error: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `paceline ARGUMENTS` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.err)
        return Outcome(int(ended.value.code or 0), captured.out, plain)

    return invoke


# -- help and start


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "transformers", "trl", "ray")
    code = f"import paceline.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert f"Usage: paceline {command}" in done.out
    assert len(done.out.splitlines()) > 8


def test_help_lists_every_command(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert all(command in done.out for command in COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("paceline 0.")


def test_a_wrong_flag_names_the_right_one(run: Run, model: Path, prompts: Path) -> None:
    done = run("rollout", model, prompts, "--out", "o.jsonl", "--sample", 3)
    assert done.code == 2
    assert "--samples" in done.error


def test_errors_print_the_message_alone(run: Run, prompts: Path) -> None:
    done = run("rollout", "no/such/model", prompts, "--out", "o.jsonl")
    assert done.code == 3
    assert done.error.startswith("error: model folder no/such/model does not exist")
    assert "Traceback" not in done.error
    assert len(done.error.strip().splitlines()) == 1


def test_a_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv(cli.TRACEBACK, "1")
    arguments = ["paceline", "rollout", "no/such/model", str(prompts), "--out", str(tmp_path / "o.jsonl")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(PacelineError):
        cli.main()


# -- bad input, before any long work


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--temperature", "-1"], 2, "--temperature -1.0: must be 0 (greedy) or more"),
        (["--temperature", "nan"], 2, "--temperature nan"),
        (["--top-p", "1.5"], 2, "--top-p 1.5: must be above 0 and at most 1"),
        (["--top-p", "0"], 2, "--top-p 0.0"),
        (["--top-k", "-3"], 2, "--top-k -3"),
        (["--min-p", "2"], 2, "--min-p 2.0: must be from 0 (off) to 1"),
        (["--max-tokens", "0"], 2, "--max-tokens 0: must be at least 1"),
        (["--samples", "0"], 2, "--samples 0"),
        (["--seed", "-1"], 2, "--seed -1"),
        (["--stop", ""], 2, "at least one character"),
        (["--stop", "END"], 3, "has no tokenizer"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs 0"),
        (["--kv-cache-gib", "0"], 2, "--kv-cache-gib 0.0"),
        (["--kv-cache-gib", "nan"], 2, "--kv-cache-gib nan"),
        (["--resume", "--overwrite"], 2, "give one of them"),
        (["--plain", "--resume"], 2, "too many would be short"),
        (["--plain", "--model-drafter", "x"], 2, "drop one of them"),
        (["--model-drafter", "no/such/drafter"], 3, "model folder no/such/drafter does not exist"),
        (["--drafter", "magic"], 2, "'suffix', 'lookup', 'none'"),
        (["--dtype", "int4"], 2, "'float32'"),
    ],
)
def test_rollout_refuses(
    run: Run, model: Path, prompts: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    out = tmp_path / "o.jsonl"
    done = run("rollout", model, prompts, "--out", out, *options)
    assert done.code == code
    assert message in done.error
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "magic"], "there is no method 'magic', choose from plain, none, suffix"),
        (["--methods", ","], "names none"),
        (["--methods", "model"], "'model' needs --model-drafter DIR"),
        (["--repetitions", "0"], "--repetitions 0: must be at least 1"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
    ],
)
def test_bench_refuses(run: Run, model: Path, prompts: Path, options: list[str], message: str) -> None:
    done = run("bench", model, prompts, *options)
    assert done.code == 2
    assert message in done.error


def test_bench_refuses_an_unwritable_result_file(run: Run, model: Path, prompts: Path) -> None:
    done = run("bench", model, prompts, "--json", model / "config.json" / "b.json")
    assert done.code == 6
    assert "choose another --json" in done.error


def test_report_refuses_a_folder_without_a_run(run: Run, tmp_path: Path) -> None:
    done = run("report", tmp_path)
    assert done.code == 6
    assert "record.jsonl" in done.error


def test_report_writes_a_page(run: Run, tmp_path: Path) -> None:
    from paceline.record import Header, RecordWriter, describe_machine, describe_versions

    header = Header(machine=describe_machine(), versions=describe_versions(), started_unix_s=0.0)
    RecordWriter.create(tmp_path, header).close()
    done = run("report", tmp_path)
    assert done.code == 0
    assert "<html" in (tmp_path / "report.html").read_text()


def test_an_output_that_holds_responses_is_kept(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "o.jsonl", {"precious": True})
    done = run("rollout", model, prompts, "--out", out)
    assert done.code == 6
    assert "--resume" in done.error
    assert out.read_text() == '{"precious": true}\n'


def test_a_drafter_of_another_vocabulary_is_refused(
    run: Run, model: Path, prompts: Path, tmp_path: Path
) -> None:
    drafter = make_model(tmp_path / "drafter", {**CONFIG, "vocab_size": 65})
    done = run("rollout", model, prompts, "--out", tmp_path / "o.jsonl", "--model-drafter", drafter)
    assert done.code == 3
    assert "has 65 tokens" in done.error
    assert "has 64" in done.error


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no weights")],
)
def test_an_incomplete_model_is_named(
    run: Run, model: Path, prompts: Path, missing: str, message: str
) -> None:
    (model / missing).unlink()
    done = run("rollout", model, prompts, "--out", model.parent / "o.jsonl")
    assert done.code == 3
    assert message in done.error


# -- the prompts file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"text": "x"}, "line 2 needs exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "x", "prompt_ids": [1]}, "found prompt and prompt_ids"),
        ({"prompt_ids": []}, "line 2: the prompt is empty"),
        ({"prompt_ids": "123"}, "must be a list of integers"),
        ({"prompt_ids": [1, True]}, "must be a list of integers"),
        ({"prompt_ids": [1, 64]}, "line 2: token id 64 is unknown, the model has ids 0 to 63"),
        ({"prompt_ids": [-1]}, "token id -1 is unknown"),
        ({"prompt_ids": [1] * 32}, "line 2: 32 tokens leave no room to generate, the model takes 32"),
        ({"prompt_ids": [1], "id": 1.5}, "id=1.5"),
        ({"prompt_ids": [1], "id": 1}, "lines 1 and 2 have the same id 1"),
        ({"prompt_ids": [1], "logprobs": 0}, "field 'logprobs', which the output uses itself"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(
    tmp_path: Path, model: Path, line: dict[str, Any] | str, message: str
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt_ids": [1]}, line)
    with pytest.raises(RequestError, match=re.escape(message)):
        read_prompts(path, read_checkpoint(model), RESERVED)


@pytest.mark.parametrize(("name", "message"), [("absent", "cannot be read"), ("empty", "has no prompts")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, model: Path, name: str, message: str) -> None:
    write(tmp_path / "empty")
    with pytest.raises(RequestError, match=message):
        read_prompts(tmp_path / name, read_checkpoint(model))


def test_prompts_keep_their_fields_and_equal_ones_get_dice_of_their_own(tmp_path: Path, model: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt_ids": [1, 2], "answer": [3, 4]},
        "",
        {"id": "b", "prompt_ids": [5]},
        {"id": "c", "prompt_ids": [1, 2]},
    )
    one, two, three = read_prompts(path, read_checkpoint(model))
    assert [(p.id, p.line) for p in (one, two, three)] == [(1, 1), ("b", 3), ("c", 4)]
    assert one.tokens == three.tokens == (1, 2)
    assert one.fields == {"answer": [3, 4]}
    assert {one.sample_of(s) for s in range(1000)}.isdisjoint(three.sample_of(s) for s in range(1000))
    assert two.sample_of(7) == one.sample_of(7) == 7


# -- the output file


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


# -- the model folder and the batch


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 32),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, 64),
    ],
)
def test_the_longest_sequence_is_read_from_the_configuration(
    fields: dict[str, Any], length: int | None
) -> None:
    assert Checkpoint(Path(), {**CONFIG, **fields}).max_len == length


def test_the_fingerprint_follows_the_weights(model: Path) -> None:
    checkpoint = read_checkpoint(model)
    before = checkpoint.fingerprint()
    assert read_checkpoint(model).fingerprint() == before
    (model / "model.safetensors").write_bytes(bytes(500) + b"x" + bytes(499))
    assert checkpoint.fingerprint() != before


def test_an_impossible_batch_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.commands.launch.is_cpu_build", lambda: True)
    checkpoint = read_checkpoint(model)
    per_token = 2 * 2 * 2 * 16 * 4
    assert checkpoint.kv_bytes_per_token("float32") == per_token
    needed = per_token * 100 / 2**30
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 1}
    assert check_batch(checkpoint, kv_cache_gib=needed * 1.01, **options) >= per_token * 100
    with pytest.raises(ConfigError, match="one response of 100 tokens needs"):
        check_batch(checkpoint, kv_cache_gib=needed * 0.99, **options)
    with pytest.raises(ConfigError, match=r"3 engine\(s\) need 3\d+\.\d GiB"):
        check_batch(checkpoint, kv_cache_gib=1e5 / 1000 * 1.01, num_engines=3, **options)


# -- progress and interruption


def test_without_a_terminal_progress_is_plain_lines() -> None:
    now = [0.0]
    text = io.StringIO()
    step = StepObservation(
        num_requests=4, num_draft_tokens=8, num_accepted_tokens=6, num_prefill_tokens=0, step_s=0.1
    )
    with Progress(8, Console(file=text, width=100), clock=lambda: now[0]) as progress:
        progress.count(100, 1, lambda: [step])
        assert text.getvalue() == ""
        now[0] = LINE_S
        progress.count(100, 1, lambda: [step])
    assert text.getvalue() == "2/8 responses, 20 tokens/s, acceptance length 2.50, 4 running, 10 s\n"


def test_an_interrupt_is_a_request_first() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


# -- bench


def test_methods_bring_their_reference() -> None:
    assert choose_methods(None, None) == ["plain", "none", "suffix"]
    assert choose_methods(None, Path("d")) == ["plain", "none", "suffix", "suffix+model"]
    assert choose_methods("lookup", None) == ["none", "lookup"]
    assert choose_methods("plain, lookup,lookup", None) == ["plain", "none", "lookup"]
    assert choose_methods("plain", None) == ["plain"]


def response(tokens: tuple[int, ...]) -> Response:
    return Response(RolloutRequest((1,), 9), tokens, (), "stop", 0, 0, 0, 4, 2, len(tokens))


def test_the_tail_begins_when_nine_in_ten_have_finished() -> None:
    result = summarise([response((1, 2))] * 10, [float(t) for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20)])
    assert (result.wall_s, result.tail_s) == (20.0, 11.0)
    assert (result.num_tokens, result.num_draft_tokens, result.num_accepted_tokens, result.num_steps) == (
        20,
        40,
        20,
        20,
    )
    assert summarise([response((1,))], [3.0]).tail_s == 0.0


def measurement(wall_s: float, *tokens: tuple[int, ...]) -> Measurement:
    return Measurement(wall_s, 0.5, tokens, 10, 5, 4)


def test_every_token_is_compared_with_the_reference() -> None:
    measured = {
        "plain": [measurement(2.0, (9, 9), (9, 9))],
        "none": [measurement(2.0, (1, 2, 3), (4,))],
        "suffix": [measurement(1.0, (1, 2, 3), (4,))],
        "lookup": [measurement(1.0, (1, 5, 3, 8), (4,))],
    }
    rows = {name: compare(name, measured) for name in measured}
    assert rows["suffix"]["compared_tokens"] == 4
    assert rows["suffix"]["diverged_tokens"] == 0
    assert rows["suffix"]["ratio"] == 2.0
    assert rows["lookup"]["diverged_tokens"] == 2
    assert rows["lookup"]["diverged_responses"] == 1
    assert rows["plain"]["compared_tokens"] == rows["none"]["compared_tokens"] == 0
    assert rows["suffix"]["acceptance_length"] == 1.0
    assert rows["suffix"]["acceptance_rate"] == 0.5


# -- doctor


def states(**environment: str) -> dict[str, Finding]:
    return {f.name: f for f in look_at_environment(environment, cores=4, on_cpu=True)}


@pytest.mark.parametrize(
    ("environment", "name", "state"),
    [
        ({}, "OMP_NUM_THREADS", "ok"),
        ({"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS", "ok"),
        ({"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS", "warn"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS", "fail"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "VLLM_CPU_OMP_THREADS_BIND", "warn"),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "VLLM_ENABLE_V1_MULTIPROCESSING", "fail"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT", "fail"),
    ],
)
def test_variables_that_bite_are_found(environment: dict[str, str], name: str, state: str) -> None:
    found = states(**environment)[name]
    assert found.state == state
    assert bool(found.remedy) == (state != "ok")


def test_settings_in_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PACELINE": "1", "PACELINE_SETTINGS": '{"run_sed": 7}'}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = states(**environment)["PACELINE"]
    assert found.state == "fail"
    assert "run_sed" in str(found.remedy)


def test_findings_turn_into_json() -> None:
    assert json.loads(json.dumps(asdict(states()["OMP_NUM_THREADS"])))["state"] == "ok"


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("odd", None)])
def test_the_quota_of_a_container_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert cpu_quota(path) == quota


@pytest.mark.parametrize(
    ("version", "wanted", "answer"),
    [
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0+cpu", "==2.13.0+cpu", True),
        ("2.12.0", "==2.13.0", False),
        ("5.19.0", ">=5.16.1,<5.20", True),
    ],
)
def test_versions_are_compared_without_their_label(version: str, wanted: str, answer: bool) -> None:
    assert fits(version, wanted) is answer

"""The command line without an engine: help, errors, bad input before any long work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CONFIG, Run, make_model, write

from paceline import cli
from paceline.errors import PacelineError

COMMANDS = (
    "train",
    "rollout",
    "bench",
    "report",
    "replay",
    "profile",
    "ladder",
    "plan",
    "draft-server",
    "drafter",
    "simulate",
    "doctor",
)


def test_a_reader_finds_every_command_under_its_name() -> None:
    folder = Path(cli.__file__).parent / "commands"
    found = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
    assert found - {"inputs"} == {name.replace("-", "_") for name in COMMANDS}


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
        (["--draft-worker"], 2, "draft_worker needs a model_drafter"),
        (["--draft-worker-auto"], 2, "draft_worker needs a model_drafter"),
        (["--model-drafter", "b", "--draft-worker-auto", "--further-drafter", "c"], 2, "--draft-worker"),
        (["--further-drafter", "b"], 2, "give --draft-worker, or --ladder"),
        (["--model-drafter", "b", "--ladder", "x"], 2, "--further-drafter: give both"),
        (["--model-drafter", "b", "--draft-worker", "--further-drafter", "b"], 2, "name a folder twice"),
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

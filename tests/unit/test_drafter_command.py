"""`paceline drafter`: train, measure and export, from a file of responses to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from command_line import Run, write
from tiny_target import tiny_target

from paceline.commands.drafter.job import _owned
from paceline.distillation.responses import read_responses
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import FILE_NAME, NOTE, read_folder
from paceline.errors import CheckpointError, RecordError

TARGET = tiny_target()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TARGET.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    """Responses of random tokens: what is trained does not matter here."""
    random = np.random.default_rng(0)
    lines = [
        {
            "prompt_ids": [1, 5, 9],
            "tokens": random.integers(3, 29, int(random.integers(4, 25))).tolist(),
            "key": key,
            "options": {"temperature": 1.0},
        }
        for key in range(12)
    ]
    return write(tmp_path / "responses.jsonl", *lines)


@pytest.mark.parametrize("method", ["eagle", "hass", "eagle3", "osd"])
def test_a_drafter_is_trained_measured_and_exported(
    run: Run, tmp_path: Path, folder: Path, responses: Path, method: str
) -> None:
    out = tmp_path / "head"
    words: list[object] = ["drafter", "train", folder, responses, "--out", out, "--method", method]
    words += ["--core-minutes", 0.01, "--threads", 1]
    if method == "osd":
        tiny_target(3).save_pretrained(tmp_path / "small")
        words += ["--small-model", tmp_path / "small"]
    done = run(*words)
    assert done.code == 0, done.error
    assert run(*words).code == 6  # there is one already
    done = run(*words, "--resume", "--core-minutes", 0.02)
    assert done.code == 0, done.error
    done = run("drafter", "measure", folder, responses, out, "--depth", 2)
    assert done.code == 0, done.error
    assert "acceptance length 1." in done.out
    done = run("drafter", "export", out, "--out", tmp_path / "exported")
    assert done.code == 0, done.error
    config = json.loads((tmp_path / "exported/config.json").read_text())
    weights = safetensors.torch.load_file(tmp_path / "exported/model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"]
    assert ("fc.weight" in weights) == (method != "osd")
    assert run("drafter", "export", out, "--out", tmp_path / "exported").code == 6


def test_an_exported_small_model_is_the_one_that_was_trained(
    run: Run, tmp_path: Path, folder: Path, responses: Path
) -> None:
    tiny_target(3).save_pretrained(tmp_path / "small")
    words = ("--method", "osd", "--small-model", tmp_path / "small", "--core-minutes", 0.01, "--threads", 1)
    assert run("drafter", "train", folder, responses, "--out", tmp_path / "run", *words).code == 0
    assert run("drafter", "export", tmp_path / "run", "--out", tmp_path / "exported").code == 0
    said = [
        run("drafter", "measure", folder, responses, tmp_path / name).out
        for name in ("run", "exported", "small")
    ]
    assert said[0] == said[1] != said[2]


def test_the_speculators_form_is_eagle3s_and_names_the_target(
    run: Run, tmp_path: Path, folder: Path, responses: Path
) -> None:
    quick = ("--core-minutes", 0.001, "--threads", 1)
    for method in ("eagle", "eagle3"):
        done = run(
            "drafter", "train", folder, responses, "--out", tmp_path / method, "--method", method, *quick
        )
        assert done.code == 0, done.error
    form = ("--form", "speculators", "--target", "org/model")
    assert run("drafter", "export", tmp_path / "eagle3", "--out", tmp_path / "out", *form[:2]).code == 2
    assert run("drafter", "export", tmp_path / "eagle", "--out", tmp_path / "out", *form).code == 2
    assert run("drafter", "export", tmp_path / "eagle3", "--out", tmp_path / "out", *form).code == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "org/model"}
    assert "layers.0.hidden_norm.weight" in safetensors.torch.load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (("--method", "osd"), 2, "give its folder"),
        (("--small-model", "x"), 2, "choose osd"),
        (("--core-minutes", 0), 2, "above 0"),
        (("--core-minutes", "nan"), 2, "above 0, and finite"),
        (("--core-minutes", "inf"), 2, "above 0, and finite"),
        (("--rate", "nan"), 2, "--rate nan: must be above 0, and at most 1"),
        (("--rate", -1), 2, "at most 1"),
        (("--rate", "1e30"), 2, "at most 1"),
        (("--threads", -2), 2, "--threads -2: must be 0"),
    ],
)
def test_bad_input_is_refused(
    run: Run, tmp_path: Path, folder: Path, responses: Path, words: tuple[object, ...], code: int, remedy: str
) -> None:
    done = run("drafter", "train", folder, responses, "--out", tmp_path / "out", *words)
    assert done.code == code
    assert remedy in done.error


def test_other_files_are_refused(run: Run, tmp_path: Path, folder: Path, responses: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    done = run("drafter", "train", folder, empty, "--out", tmp_path / "out")
    assert done.code == 6
    assert "no response" in done.error
    assert run("drafter", "measure", folder, responses, tmp_path / "nowhere").code == 3
    assert run("drafter", "export", tmp_path / "nowhere", "--out", tmp_path / "out").code == 6


@pytest.mark.parametrize(
    "value", [b'"caf\xe9"', b"[" * 100_000 + b"]" * 100_000], ids=["not UTF-8", "nested"]
)
def test_responses_that_no_decoder_takes_are_refused(tmp_path: Path, value: bytes) -> None:
    file = tmp_path / "o.jsonl"
    file.write_bytes(b'{"prompt_ids": [1], "tokens": [2], "options": {"x": ' + value + b"}}\n")
    with pytest.raises(RecordError, match=r"o\.jsonl is no file of 'paceline rollout' .*: give its --out"):
        read_responses(file)


def test_a_training_file_with_a_note_that_no_decoder_takes_is_refused(tmp_path: Path) -> None:
    note = '{"config": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / FILE_NAME, {NOTE: note})
    with pytest.raises(CheckpointError, match=r"was not written by .*: choose another folder"):
        read_folder(tmp_path)


def test_what_is_refused_costs_no_trained_drafter(
    run: Run, tmp_path: Path, folder: Path, responses: Path
) -> None:
    out = tmp_path / "head"
    quick = ("--method", "eagle", "--core-minutes", 0.002, "--threads", 1)
    assert run("drafter", "train", folder, responses, "--out", out, *quick).code == 0
    trained = (out / "training.safetensors").read_bytes()
    empty = write(tmp_path / "empty.jsonl")
    assert run("drafter", "train", folder, empty, "--out", out, *quick, "--overwrite").code == 6
    with _owned(out):
        done = run("drafter", "train", folder, responses, "--out", out, *quick, "--overwrite")
    assert done.code == 6
    assert "another process trains a drafter there" in done.error
    assert (out / "training.safetensors").read_bytes() == trained
    assert run("drafter", "train", folder, empty, "--out", tmp_path / "other", *quick).code == 6
    assert not (tmp_path / "other").exists()
    assert run("drafter", "train", folder, responses, "--out", out, *quick, "--overwrite").code == 0


def test_a_loss_that_is_not_finite_costs_no_trained_drafter(
    run: Run, tmp_path: Path, folder: Path, responses: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("drafter", "train", folder, responses, "--out", tmp_path / "head", "--method", "eagle")
    assert run(*words, "--core-minutes", 0.002).code == 0
    trained = (tmp_path / "head/training.safetensors").read_bytes()
    monkeypatch.setattr(Trainer, "look_at", lambda *_: float("nan"))
    done = run(*words, "--core-minutes", 1, "--resume")
    assert done.code == 8
    assert "lower --rate" in done.error
    assert (tmp_path / "head/training.safetensors").read_bytes() == trained


def test_responses_of_another_tokenizer_are_refused(
    run: Run, tmp_path: Path, folder: Path, responses: Path
) -> None:
    other = write(tmp_path / "other.jsonl", {"prompt_ids": [1], "tokens": [29, 3], "key": 1})
    for words in (("train", folder, other, "--out", tmp_path / "out"), ("measure", folder, other, folder)):
        done = run("drafter", *words)
        assert done.code == 6
        assert "has token id 29, and target and drafter know 29" in done.error


def test_what_is_measured_is_where_it_was_trained(
    run: Run, tmp_path: Path, folder: Path, responses: Path
) -> None:
    words = ("--method", "eagle", "--core-minutes", 0.001)
    assert run("drafter", "train", folder, responses, "--out", tmp_path / "head", *words).code == 0
    assert run("drafter", "export", tmp_path / "head", "--out", tmp_path / "exported").code == 0
    done = run("drafter", "measure", folder, responses, tmp_path / "exported")
    assert done.code == 3
    assert "measure the folder it was trained in" in done.error
    assert run("drafter", "measure", folder, responses, tmp_path / "head", "--threads", -1).code == 2

"""The folder of an adaptive drafter: what it begins with, what --resume refuses, and what is left in the end."""

from __future__ import annotations

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

from paceline.distillation import checkpoints, fresh_drafter
from paceline.distillation.export import export
from paceline.distillation.fresh_drafter import make_head
from paceline.distillation.methods import METHODS, build_network
from paceline.distillation.networks import Shared
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import FILE_NAME, USED_NAME, describe
from paceline.errors import CheckpointError
from paceline.training import adaptive_rollouts
from paceline.training.adaptive_rollouts import AdaptiveDrafter
from paceline.training.recipe import AdaptiveDrafterSection, Recipe


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy; no trainer is started for it."""
    monkeypatch.setattr(adaptive_rollouts, "SpotLink", lambda *_: SimpleNamespace(close=lambda: None))
    return make_model(tmp_path / "target", tie=False)


def start(target: Path, folder: Path, given: Path | None = None, **section: Any) -> AdaptiveDrafter:
    engine = {} if given is None else {"model_drafter": str(given)}
    fields = {"task": {"name": "countdown"}, "model": str(target), "steps": 1, "engine": engine}
    return AdaptiveDrafter(Recipe.model_validate(fields), AdaptiveDrafterSection(**section), folder)


def test_a_resumed_run_goes_on_with_what_grew(target: Path, tmp_path: Path) -> None:
    made = start(target, tmp_path / "run", method="eagle").model / "model.safetensors"
    before = made.stat().st_mtime_ns
    start(target, tmp_path / "run", method="hass")  # the same network
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"method": "eagle"},
            "is a small language model, and adaptive_drafter.method=eagle grows an EAGLE head: set",
        ),
        (
            {"hidden_size": 128},
            "has hidden size 64 and 2 layers, and .* asks for hidden size 128 and 2 layers: set",
        ),
        ({"layers": 1}, "has hidden size 64 and 2 layers, and .* asks for hidden size 64 and 1 layers: set"),
    ],
)
def test_a_resumed_run_keeps_to_the_kind_of_its_drafter(
    target: Path, tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    start(target, tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        start(target, tmp_path / "run", **section)


def test_a_drafter_that_was_half_written_is_made_anew(target: Path, tmp_path: Path) -> None:
    half = tmp_path / "run" / "drafter" / "model"
    half.mkdir(parents=True)
    AutoConfig.from_pretrained(target).save_pretrained(half)
    AutoModelForCausalLM.from_pretrained(start(target, tmp_path / "run").model)


def test_a_drafter_whose_making_is_ended_is_not_there(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fresh_drafter, "lend_tokenizer", die)
        with pytest.raises(KeyboardInterrupt):
            start(target, tmp_path / "run")
    assert not (tmp_path / "run" / "drafter" / "model").exists()
    AutoModelForCausalLM.from_pretrained(start(target, tmp_path / "run").model)


def test_an_export_that_is_ended_leaves_no_part_of_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(target, tmp_path / "head", "eagle", seed=0)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    tensors, made = grown(target, 2.0)
    for out in ("head", "new"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", die)  # of the second file
            with pytest.raises(KeyboardInterrupt):
                export(tensors, made, tmp_path / out, "huggingface", str(target))
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "new").exists()
    export(tensors, made, tmp_path / "new", "huggingface", str(target))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("is_given", "has_used", "agreement", "left"),
    [
        (True, False, 0.4, None),
        (True, True, 0.4, 2.0),
        (True, True, 0.8, 3.0),
        (False, True, 0.4, 2.0),
        (False, False, 0.2, 3.0),
    ],
)
def test_the_best_drafter_that_is_known_is_left(
    target: Path, tmp_path: Path, is_given: bool, has_used: bool, agreement: float, left: float | None
) -> None:
    """2: the one that engines used, which agrees in 0.7; 3: the newest one."""
    given = tmp_path / "given"
    make_head(target, given, "eagle", seed=0)
    folder = tmp_path / "run" / "drafter"
    with start(target, tmp_path / "run", given if is_given else None, method="eagle"):
        tensors, made = grown(target, 3.0)
        present = 0.7 if is_given or has_used else None
        made = msgspec.structs.replace(made, agreement=agreement, used_agreement=present)
        checkpoints.write(folder / FILE_NAME, tensors, made.note())
        if has_used:
            tensors, made = grown(target, 2.0)
            checkpoints.write(folder / USED_NAME, tensors, made.note())
    found = folder / "model" / "model.safetensors"
    assert found.exists() == (left is not None)
    if left is not None:
        assert {float(one.mean()) for one in load_file(found).values()} == {left}


def grown(target: Path, value: float) -> tuple[dict[str, torch.Tensor], Any]:
    """An EAGLE head in training, all weights of which are the same."""
    nothing, config = torch.empty(0), AutoConfig.from_pretrained(target)
    network = build_network(METHODS["eagle"], Shared(nothing, nothing, config), None)
    made = describe(network, "eagle", "smooth_l1", 1.0, ())
    return {f"{NETWORK}{name}": torch.full_like(one, value) for name, one in network.named_parameters()}, made

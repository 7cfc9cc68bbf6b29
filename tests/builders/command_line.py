"""What tests of the commands share: a folder that passes for a model, files of JSON lines, what a command said."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import cli

CONFIG = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@dataclass
class Outcome:
    code: int
    out: str
    error: str


Run = Callable[..., Outcome]


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What runs `paceline ARGUMENTS` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.err)
        return Outcome(int(ended.value.code or 0), captured.out, plain)

    return invoke

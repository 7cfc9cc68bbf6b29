"""Fixtures of the tests of the commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_line import CONFIG, Outcome, Run, make_model, write

from paceline import cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model until an engine is started."""
    return make_model(tmp_path / "model", CONFIG)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", {"prompt_ids": [1, 2, 3]})


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

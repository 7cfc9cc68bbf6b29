"""Fixtures of the tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CONFIG, Run, make_model, run_here, write


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
    return run_here(monkeypatch, capsys)

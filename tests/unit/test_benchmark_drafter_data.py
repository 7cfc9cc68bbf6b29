"""Responses of an earlier run count if they are of the same weights, and all there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import drafter_data

PROMPTS = [(1, 2), (3, 4)]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that a rollout wrote; it fails, with one response written, while there is one named `interrupted`."""
    files: list[Path] = []

    def run(*words: Any) -> None:
        out = Path(words[words.index("--out") + 1])
        files.append(out)
        out.write_text("one response\n")
        if (out.parent / "interrupted").exists():
            raise SystemExit("interrupted")
        out.write_text("one response\nanother\n")

    monkeypatch.setattr(drafter_data, "run_paceline", run)
    return files


def test_other_weights_of_the_same_name_have_other_responses(policy: Path, asked: list[Path]) -> None:
    folder = policy.parent / "responses"
    first, again = (drafter_data.roll_out(policy, PROMPTS, 2, folder) for _ in range(2))
    assert first == again
    assert len(asked) == 1
    (policy / "model.safetensors").write_bytes(b"others!")
    assert drafter_data.roll_out(policy, PROMPTS, 2, folder) != first
    assert len(asked) == 2


def test_an_interrupted_rollout_is_not_taken_for_a_whole_one(policy: Path, asked: list[Path]) -> None:
    folder = policy.parent
    (folder / "interrupted").touch()
    with pytest.raises(SystemExit):
        drafter_data.roll_out(policy, PROMPTS, 2, folder)
    (folder / "interrupted").unlink()
    assert drafter_data.roll_out(policy, PROMPTS, 2, folder).read_text() == "one response\nanother\n"
    assert len(asked) == 2

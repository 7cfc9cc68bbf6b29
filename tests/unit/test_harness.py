"""What every benchmark's result file names: commit, changed files, arguments, date, no folder of one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("code.py", "benchmarks/results/speed.json"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_tree_is_its_commit_although_results_are_being_written(repository: Path) -> None:
    (repository / "benchmarks/results/speed.json").write_text("2\n")
    assert harness.describe_tree(repository) == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "changed_files": [],
    }


def test_changed_files_are_named(repository: Path) -> None:
    (repository / "code.py").write_text("2\n")
    assert harness.describe_tree(repository)["changed_files"] == ["code.py"]


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert harness.describe_tree(tmp_path) == {"commit": None, "changed_files": []}


def test_the_result_file_names_tree_date_and_all_arguments(tmp_path: Path) -> None:
    made = harness.parser("What it does.")
    made.add_argument("--drafter", default=str(ROOT / "assets/countdown-drafter"))
    made.add_argument("--groups", type=Path)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--cases", nargs="+", default=["8x16"])
    words = ["--json", str(tmp_path / "new" / "speed.json"), "--groups", str(tmp_path / "groups.gz")]
    options = made.parse_args(words)
    harness.publish("speed", [{"case": "8x16", "ratio": 1.5}], ("case", "ratio"), options, systems=[1])
    written = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert list(written)[:4] == ["benchmark", "date", "commit", "changed_files"]
    assert written["commit"] == harness.describe_tree()["commit"]
    assert datetime.fromisoformat(written["date"]).tzinfo is not None
    assert written["arguments"] == {
        "drafter": "assets/countdown-drafter",
        "groups": "groups.gz",
        "threads": 2,
        "cases": ["8x16"],
    }
    assert written["rows"] == [{"case": "8x16", "ratio": 1.5}]
    assert written["systems"] == [1]
    assert {"machine", "versions"} <= set(written)

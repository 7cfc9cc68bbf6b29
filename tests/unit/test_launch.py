"""What the libraries print is kept away from the screen, and never takes our own errors with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.commands.inputs import launch
from paceline.commands.inputs.launch import Launch, build_settings, check_model_drafter
from paceline.commands.inputs.model_folder import Checkpoint
from paceline.config import MTP

PROGRAM = """
import sys
from pathlib import Path
from paceline.commands.inputs.launch import hush
from paceline.errors import RecordError
try:
    with hush(Path(sys.argv[1])):
        print("from a library")
        raise RecordError("the record cannot be written")
except RecordError as error:
    print("told:", error)
"""


@pytest.mark.parametrize("log", ["log.txt", "/dev/full"])
def test_an_error_comes_through_whatever_becomes_of_the_log(log: str, tmp_path: Path) -> None:
    path = tmp_path / log
    words = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("told: the record cannot be written\n")
    if log == "log.txt":
        assert done.stdout.startswith("told")
        assert path.read_text() == "from a library\n"


def test_the_targets_own_prediction_layers_have_no_folder(tmp_path: Path) -> None:
    assert build_settings(0, "suffix", Path(MTP), compiled=False).model_drafter == MTP
    assert build_settings(0, "suffix", tmp_path, compiled=False).model_drafter == str(tmp_path.resolve())
    check_model_drafter(Path(MTP), Checkpoint(tmp_path, {}))


@pytest.mark.parametrize(
    ("chosen", "dtype", "is_cpu", "kernel"),
    [
        ("paceline", "bfloat16", True, "paceline"),
        ("paceline", "auto", True, "paceline"),
        ("paceline-dot", "bfloat16", True, "paceline-dot"),
        ("vllm", "bfloat16", True, "vllm"),
        ("paceline", "float32", True, "vllm"),
        ("paceline", "bfloat16", False, "vllm"),
    ],
)
def test_whose_linear_layers(
    chosen: str, dtype: str, is_cpu: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "is_cpu_build", lambda: is_cpu)
    settings = build_settings(0, "suffix", None, compiled=False, linear_kernel=chosen)
    assert Launch(Path("model"), settings, dtype, 64, 4, 1 << 20, True, False).linear_kernel == kernel
    assert Launch(Path("model"), None, dtype, 64, 4, 1 << 20, True, False).linear_kernel == "vllm"

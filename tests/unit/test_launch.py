"""What the libraries print is kept away from the screen, and never takes our own errors with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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

"""Runs a program on model runner V2 in a process of its own: Triton has to be prepared before anything imports it.

The program imports `interpreted` (tests/engine) first, and writes what it made as JSON into the file that is its last
argument. Its tests are slow, and need Triton.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUILDERS = Path(__file__).parent
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def run_interpreted(program: Path, *arguments: object, folder: Path, timeout_s: float) -> dict[str, Any]:
    """What the program made, and under "log" what it said. folder: to write into."""
    file = folder / "made.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
    paths = [str(BUILDERS), str(BUILDERS.parent / "engine"), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "WARNING"}
    command = list(map(str, (sys.executable, program, *arguments, file)))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-5000:]
    return {**json.loads(file.read_text()), "log": done.stdout + done.stderr}

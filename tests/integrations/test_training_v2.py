"""Training on vLLM's model runner V2 beside a drafter that grows from nothing: the same policy as without.

One process runs everything (interpreted_training.py), because Triton has to be prepared before anything imports it.
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

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(scope="module")
def made(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the runs, by way of drafting."""
    folder = tmp_path_factory.mktemp("training")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
    paths = [str(HERE.parent / "engine"), str(HERE.parent / "builders"), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "WARNING"}
    file = folder / "made.json"
    command = [sys.executable, str(HERE / "interpreted_training.py"), policy_dir, folder, file]
    done = subprocess.run(map(str, command), env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(json.loads(file.read_text()))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("way", ["osd", "overlapped"])
def test_a_drafter_grows_and_the_policy_stays_the_same(made: dict[str, Any], way: str) -> None:
    """A small model, and a head behind steps that overlap: swapped in, used, and no token changed."""
    assert made[way]["responses"] == made["plain"]["responses"]
    assert made[way]["is_same_policy"]
    assert made[way]["versions"][-1] >= 1
    assert made[way]["tried"] > 0
    assert (made[way]["collected_tokens"] > 0) == (way != "osd")

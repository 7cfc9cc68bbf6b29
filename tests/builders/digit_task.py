"""A task whose reward a random policy can raise, and runs of it that are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DigitTask:
    """Countdown prompts; the reward is the share of digits in the completion."""

    name = "digits"

    def train_rows(self, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"prompt": f"{i},{i + seed},3:21 ", "number": i} for i in range(1, size + 1)]

    def held_out_rows(self, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"prompt": f"9,{i},{seed}:99 ", "number": i} for i in range(1, size + 1)]

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        assert isinstance(row["number"], int)
        return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def kill_run(recipe: Any, folder: Path, *, step: int, num_finished: int) -> None:
    """Run in a process that is killed in the middle of a step's rollout."""
    description = folder.with_suffix(".json")
    description.write_text(recipe.model_dump_json())
    program = str(Path(__file__).with_name("killed_run.py"))
    command = [sys.executable, program, str(description), str(folder), str(step), str(num_finished)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]

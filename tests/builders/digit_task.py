"""A task whose reward a random policy can raise, runs of it that are killed, and sessions of their drafters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.distillation.spot_link import SpotLink


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


def pause_after_a_save(folder: Path, pause: Any, killed: list[int] | None = None) -> Any:
    """Sessions of a run this short would end before anything was learned: they last until a trainer saves something.

    killed: takes the first trainer that saved something; None: nobody is killed.
    """
    lesson = folder / "drafter" / "lesson.safetensors"

    def saved_ns() -> int:
        files = (folder / "drafter").glob("training*.safetensors")
        return max((file.stat().st_mtime_ns for file in files), default=0)

    def wait(link: SpotLink, lender: str, leader: str | None) -> Any:
        before = saved_ns()
        trainer = link._children[link._lent[lender]] if lender in link._lent else None
        for _ in range(2400):
            if not lesson.is_file() or saved_ns() > before:
                break
            if trainer is None or trainer.core_s() is None:
                break  # nobody trains: who was killed is back in another session
            time.sleep(0.05)
        if saved_ns() and killed == []:
            killed.extend(link.pids)
            for process in killed:
                os.kill(process, signal.SIGKILL)
        return pause(link, lender, leader)

    return wait

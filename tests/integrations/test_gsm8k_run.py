"""The GSM8K recipe's way, from the questions file to the rewards, on a model small enough for the CPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from paceline.record import Evaluation, RecordReader, ResponseDone
from paceline.training.recipe import load_recipe
from paceline.training.run import TrainingRun

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k.yaml"
SMALL: dict[str, Any] = {
    "task.problems": 16,
    "task.options.held_out_share": 0.25,
    "steps": 2,
    "batch": {"prompts": 8, "group_size": 8, "micro_batch": 32},
    "lengths": {"prompt_tokens": 16, "response_tokens": 4},
    "optimizer.precision": "float32",
    "engine.compiled": False,
    "capacity": {"dtype": "float32", "kv_cache_mib": 64},
    "evaluation.problems": 4,
}


def test_questions_become_rewards(policy_dir: Path, tmp_path: Path) -> None:
    """The policy knows digits only, so the template is the question and a blank; a random answer of one digit is
    sometimes right."""
    questions = tmp_path / "train.jsonl"
    rows = [{"question": f"{n}-{n - n % 10}:", "answer": f"#### {n % 10}"} for n in range(100, 140)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": str(policy_dir), "task.options.prompts": str(questions)}
    options["task.options.template"] = "{question} "
    changes = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in (SMALL | options).items()
    ]
    screen = Console(file=io.StringIO(), width=200)
    summary = TrainingRun(load_recipe(RECIPE, changes), tmp_path / "run", screen).run()
    assert (summary.reason, summary.steps) == ("finished", 2)
    with RecordReader(tmp_path / "run") as reader:
        events = list(reader)
    rewards = [event.reward for event in events if isinstance(event, ResponseDone)]
    assert len(rewards) == 2 * 8 * 8
    assert {0.0, 1.0} <= set(rewards)
    assert [event.step for event in events if isinstance(event, Evaluation)] == [0, 2]

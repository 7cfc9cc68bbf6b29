"""Trains a tiny policy on model runner V2, without drafts and beside growing drafters, and writes what came of it.

Arguments: folder of the policy, folder for the runs, file to write.
"""

from __future__ import annotations

from interpreted import DTYPE  # first: it prepares Triton

# isort: split
import io
import json
import sys
from pathlib import Path
from typing import Any

from digit_task import DigitTask, pause_after_a_save
from rich.console import Console
from safetensors.torch import load_file

import paceline.training.run as training_run
from paceline.distillation.spot_link import SpotLink
from paceline.record import DrafterStep, RecordReader, ResponseDone
from paceline.training.recipe import Recipe
from paceline.training.run import TrainingRun

PAUSE = SpotLink.pause
GROWS = {"layers": 1, "learning_rate": 0.01, "states_share": 1.0}
ALWAYS = {"compiled": False, "budget": {"policy": "fixed", "fixed_tokens": 2}}  # whether it pays or not
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"engine": {"compiled": False, "drafter": "none", "budget": {"policy": "off"}}},
    "osd": {"engine": ALWAYS, "adaptive_drafter": {"method": "osd", **GROWS}},
    "overlapped": {
        "engine": ALWAYS,
        "adaptive_drafter": {"method": "eagle", **GROWS},
        "capacity": {"dtype": DTYPE, "kv_cache_mib": 64, "vllm": {"async_scheduling": True}},
    },
}


def make_recipe(policy: str, **sections: Any) -> Recipe:
    fields: dict[str, Any] = {
        "task": {"name": "countdown", "problems": 16},
        "model": policy,
        "steps": 3,
        "algorithm": {"name": "dapo", "mask_truncated": False},
        "batch": {"prompts": 2, "group_size": 2, "micro_batch": 4},
        "lengths": {"prompt_tokens": 32, "response_tokens": 12},
        "optimizer": {"learning_rate": 5e-3},
        "capacity": {"dtype": DTYPE, "kv_cache_mib": 64},
        "evaluation": {"problems": 0},
        "compare": {"every": 0},
    }
    return Recipe.model_validate(fields | sections)


def main() -> None:
    policy, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    training_run.load_task = lambda name, **options: DigitTask()  # type: ignore[assignment]
    made: dict[str, Any] = {}
    policies = {}
    for way, sections in WAYS.items():
        SpotLink.pause = pause_after_a_save(folder / way, PAUSE)  # type: ignore[method-assign]
        TrainingRun(make_recipe(policy, **sections), folder / way, Console(file=io.StringIO())).run()
        with RecordReader(folder / way) as record:
            events = list(record)
        policies[way] = load_file(folder / way / "policy" / "model.safetensors")
        drafter = [event for event in events if isinstance(event, DrafterStep)]
        made[way] = {
            "responses": sorted(
                (r.step, r.group, r.sample, r.response_tokens) for r in events if isinstance(r, ResponseDone)
            ),
            "is_same_policy": all(w.equal(policies["plain"][name]) for name, w in policies[way].items()),
            "versions": [step.version for step in drafter],
            "tried": sum(step.tried for step in drafter),
            "collected_tokens": sum(step.collected_tokens for step in drafter),
        }
    out.write_text(json.dumps(made))


if __name__ == "__main__":
    main()

"""Profiling on a real engine: the steps have the shapes asked for, and the file that comes out can be planned with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make_model

from paceline.engine.profiling import STEPS, Shape, measure_steps, profiling_settings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, EngineError
from paceline.record.profile import read_profile


def test_steps_have_the_shapes_asked_for(model_dir: Path) -> None:
    shapes = [Shape(b, q, c) for b in (1, 3) for q in (1, 4, 20) for c in (40,)]
    with RolloutEngine(model_dir, profiling_settings(20), max_model_len=128, max_num_seqs=4) as engine:
        points = measure_steps(engine, shapes, repetitions=2)
    assert [(p.batch, p.tokens_per_request, p.context) for p in points] == [
        (s.batch, s.tokens_per_request, s.context) for s in shapes
    ]
    assert all(p.num_steps == 2 * STEPS and p.step_s > 0 for p in points)


def test_steps_that_never_run_whole_are_an_error(model_dir: Path) -> None:
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    with (
        RolloutEngine(model_dir, profiling_settings(40), **limits) as engine,
        pytest.raises(EngineError, match="1 of 2 shapes never ran whole, among them batch 4 x 40 tokens"),
    ):
        measure_steps(engine, [Shape(1, 1, 20), Shape(4, 40, 20)], repetitions=1)


@pytest.mark.parametrize("tokens", [0, 200])
def test_drafts_that_no_engine_takes_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="tokens per request and step"):
        profiling_settings(tokens)


def test_the_commands_work_end_to_end(model_dir: Path, tmp_path: Path) -> None:
    small = make_model(tmp_path / "small", layers=1, hidden=64, seed=1)
    out = tmp_path / "profile.json"
    program = [sys.executable, "-m", "paceline.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    grid = [
        "--batches",
        "1,4",
        "--tokens",
        "1,4",
        "--contexts",
        "32,64",
        "--repetitions",
        "1",
        "--kv-cache-gib",
        "0.1",
        "--eager",
    ]
    made = subprocess.run(
        [*program, "profile", model_dir, "--drafter", small, "--out", out, *grid],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    profile = read_profile(out)
    assert len(profile.steps) == 8
    assert [one.name for one in profile.drafters] == ["suffix", "small"]
    assert out.with_suffix(".html").is_file()
    planned = subprocess.run(
        [*program, "plan", out, "--acceptance", "0.8", "--devices", "4", "--requests", "16"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert planned.returncode == 0, planned.stderr
    assert "decoupled" in planned.stdout

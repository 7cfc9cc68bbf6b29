"""`paceline train` refuses at once, in one line and with an exit code, what cannot work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.train import _check_capacity
from paceline.errors import ConfigError
from paceline.training.recipe import load_recipe

ASSETS = Path(__file__).parents[2] / "assets"
RECIPE = "task: {name: countdown}\nmodel: policy\nsteps: 4\n"
PROGRAM = (
    "import sys\n"
    "from paceline.cli import main\n"
    "try:\n"
    "    main()\n"
    "finally:\n"
    "    heavy = [m for m in ('torch', 'vllm', 'trl') if m in sys.modules]\n"
    "    print('heavy', heavy)\n"
)


def train(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `paceline train`."""
    made = subprocess.run([sys.executable, "-c", PROGRAM, "train", *words], capture_output=True, text=True)
    return made.returncode, made.stdout, made.stderr


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_existing_folder_is_refused_before_anything_heavy_is_imported(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "record.jsonl").touch()
    code, printed, error = train(recipe, "--out", str(out))
    assert (code, printed) == (2, "heavy []\n")
    assert error.startswith(f"error: --out {out} exists: continue that run with --resume")
    assert "Traceback" not in error


def test_overwrite_keeps_what_is_no_run(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").touch()
    code, _, error = train(recipe, "--out", str(out), "--overwrite")
    assert code == 2
    assert "holds something other than a run" in error
    assert (out / "thesis.tex").exists()


def test_resuming_where_there_is_no_run_deletes_nothing(recipe: str, tmp_path: Path) -> None:
    """A run whose record is gone, or a folder of something else."""
    out = tmp_path / "models"
    (out / "policy").mkdir(parents=True)
    (out / "policy" / "model.safetensors").touch()
    code, _, error = train(recipe, "--out", str(out), "--resume")
    assert code == 2
    assert f"--out {out} has no record.jsonl to go on with" in error
    assert (out / "policy" / "model.safetensors").exists()


def test_a_record_without_a_header_is_no_run_to_go_on_with(recipe: str, tmp_path: Path) -> None:
    """Its writer was ended while it replaced another run."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "record.jsonl").touch()
    code, _, error = train(recipe, "--out", str(out), "--resume")
    assert code == 2
    assert "begin anew with --overwrite" in error


def test_contradicting_options_are_refused(recipe: str, tmp_path: Path) -> None:
    code, _, error = train(recipe, "--out", str(tmp_path / "run"), "--resume", "--overwrite")
    assert code == 2
    assert "contradict" in error


def test_a_folder_that_cannot_be_made_is_refused(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, error = train(recipe, "--out", str(tmp_path / "file" / "run"))
    assert code == 6
    assert f"cannot make --out {tmp_path / 'file' / 'run'}" in error
    assert "Traceback" not in error


def test_resuming_nothing_is_told(recipe: str, tmp_path: Path) -> None:
    _, _, error = train(recipe, "--out", str(tmp_path / "run"), "--resume")
    assert "nothing to resume" in error


def test_missing_model_is_refused_and_leaves_no_run(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, error = train(recipe, "--out", str(out), "--steps", "2")
    assert code == 3
    assert f"model folder {tmp_path / 'policy'} does not exist" in error
    assert not (out / "record.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("capacity.kv_cache_mib=90000000", "of memory are free: lower capacity.kv_cache_mib"),
        (
            "capacity.vllm={block_sise: 16}",
            "block_sise is no argument of vLLM's engine: did you mean block_size?",
        ),
    ],
)
def test_impossible_engines_leave_the_old_run_alone(
    recipe: str, tmp_path: Path, change: str, message: str
) -> None:
    out = tmp_path / "run"
    old = out / "checkpoints" / "checkpoint-1" / "model.safetensors"
    old.parent.mkdir(parents=True)
    old.touch()
    (out / "record.jsonl").touch()
    model = f"model={ASSETS / 'countdown-policy'}"
    given = train(recipe, "--out", str(out), "--overwrite", "--set", model, "--set", change)
    assert (given[0], old.exists()) == (2, True), given
    assert message in given[2]


@pytest.mark.parametrize(
    ("scaling", "fits"), [({}, False), ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, True)]
)
def test_a_context_may_be_as_long_as_the_scaled_positions(
    recipe: str, tmp_path: Path, scaling: dict[str, Any], fits: bool
) -> None:
    """As in `paceline rollout`."""
    model = shutil.copytree(ASSETS / "countdown-policy", tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"rope_parameters": None} | scaling
    (model / "config.json").write_text(json.dumps(config))
    wanted = load_recipe(
        recipe, [f"model={model}", f"lengths.response_tokens={config['max_position_embeddings']}"]
    )
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"exceeds the \d+ positions of"):
        _check_capacity(wanted)


def test_unknown_key_is_refused_at_once(recipe: str, tmp_path: Path) -> None:
    code, printed, error = train(recipe, "--out", str(tmp_path / "run"), "--set", "batch.promts=3")
    assert (code, printed) == (2, "heavy []\n")
    assert "did you mean batch.prompts?" in error

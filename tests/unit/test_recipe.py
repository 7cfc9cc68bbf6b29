"""Recipes: what is read, what is refused, and whether the message says what to do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import MTP
from paceline.errors import ConfigError
from paceline.training.recipe import Recipe, check_resumable, load_recipe

MINIMAL = "task: {name: countdown}\nmodel: policy\nsteps: 4\n"
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_minimal_recipe_has_defaults_and_paths_relative_to_the_file(tmp_path: Path) -> None:
    pool = "kv_pool: {directory: pool, disk_directory: /disk, disk_bytes: 1}"
    text = (
        MINIMAL
        + f"engine: {{model_drafter: small, decision_log: logs, draft_secret_file: ../secret, {pool}}}\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.model == str(tmp_path / "policy")
    assert recipe.engine.model_drafter == str(tmp_path / "small")
    assert recipe.engine.decision_log == str(tmp_path / "logs")
    assert recipe.engine.draft_secret_file == str(tmp_path.parent / "secret")
    assert recipe.engine.kv_pool is not None
    assert recipe.engine.kv_pool.directory == str(tmp_path / "pool")
    assert recipe.engine.kv_pool.disk_directory == "/disk"
    assert recipe.batch.responses == 64
    assert recipe.batch.accumulation == 8
    assert recipe.context_tokens == 768
    mtp = load_recipe(write(tmp_path, MINIMAL), ["engine.model_drafter=mtp", "model=/x"])
    assert mtp.engine.model_drafter == MTP
    (tmp_path / "named").mkdir()
    named = load_recipe(write(tmp_path / "named", MINIMAL.replace("policy", MTP)))
    assert named.model == str(tmp_path / "named" / MTP), "any other folder may have that name"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_loads_and_runs_on_any_processor(path: Path) -> None:
    """Emulated bfloat16 takes tens of times as long."""
    assert load_recipe(path).optimizer.precision == "auto"


def test_overrides_win_and_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = ["batch.prompts=2", "optimizer.learning_rate=3e-4", "trl.delta=2e0", "model=/elsewhere"]
    recipe = load_recipe(path, overrides)
    assert recipe.batch.prompts == 2
    assert recipe.optimizer.learning_rate == 3e-4
    assert recipe.trl == {"delta": 2.0}
    assert recipe.model == "/elsewhere"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("promts: 3", "unknown key promts = 3"),
        ("batch: {promts: 3}", "did you mean batch.prompts?"),
        ("learning_rate: 0.1", "it belongs to optimizer.learning_rate"),
        ("batch: {wat: 1}", "there are: prompts, group_size, micro_batch, updates"),
        ("batch: {prompts: 3, group_size: 3, micro_batch: 2}", "9 responses cannot be cut into"),
        ("batch: {group_size: 1}", "batch.group_size = 1: must be at least 2"),
        ("algorithm: {name: ppo}", "algorithm.name = 'ppo': must be 'grpo', 'dapo'"),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate = inf"),
        ("sampling: {temperature: 0}", "sampling.temperature = 0"),
        ("engine: {budget: {policy: fastest}}", "engine.budget.policy = 'fastest'"),
        ("adaptive_drafter: {hidden_size: 100}", "adaptive_drafter.hidden_size = 100"),
        ("adaptive_drafter: {}\nfleet: {help: draft}", "set fleet.help to none, auto, copy or take"),
        ("adaptive_drafter: {}\nfleet: {roles: 1 verifiers + 1 drafters}", "remove fleet.roles"),
        ("adaptive_drafter: {}\nfleet: {address: auto}", "remove fleet.address"),
        ("adaptive_drafter: {trainers: 2}", "adaptive_drafter.trainers=2 with 1 worker(s)"),
        (
            "adaptive_drafter: {trainers: 4}\nfleet: {workers: 3}",
            "adaptive_drafter.trainers=4 with 3 worker(s)",
        ),
        (
            "adaptive_drafter: {}\nengine: {model_drafter: d, further_drafters: [e]}",
            "engine.further_drafters are chosen from as they are",
        ),
        (
            "adaptive_drafter: {}\nengine: {model_drafter: d, draft_worker: true}",
            "remove engine.draft_worker",
        ),
        ("fleet: {variant: oracle}", "choose even, context, no-context, sticky or group"),
        ("seed: 4294967296", "seed = 4294967296: must be at most 4294967295"),
        (
            "batch: {prompts: 4097}",
            "task.problems=4096 are fewer than the batch.prompts=4097 of a step: raise task.problems",
        ),
        ("capacity: {vllm: {max_model_len: 9}}", "vllm.max_model_len = 9: leave it away, it is lengths."),
        ("capacity: {vllm: {dtype: float32}}", "vllm.dtype = 'float32': leave it away, set capacity.dtype"),
        ("capacity: {vllm: {max_num_seqs: 2}}", "leave it away, set capacity.max_num_seqs"),
        ("capacity: {vllm: {logprobs_mode: raw_logprobs}}", "vllm.logprobs_mode = 'raw_logprobs': leave it"),
    ],
)
def test_bad_value_is_named_with_its_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(write(tmp_path, MINIMAL + text))
    assert message in str(error.value)
    assert "recipe.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping"),
        ("- 1", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("batch: {prompts: 2}\nsteps: 3\nbatch: {updates: 2}", "batch stands twice.*line 3"),
        ("batch: {prompts: 2, prompts: 3}", "prompts stands twice"),
        ("steps: 3", "model is missing"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load_recipe(tmp_path / "nothing.yaml")


def test_merged_keys_do_not_stand_twice(tmp_path: Path) -> None:
    """Whatever the order in which the mappings are made."""
    text = "task: {name: countdown, options: {a: &a {x: 1}, b: &b {<<: *a, x: 2}}}\nmodel: m\nsteps: 1\ntrl: {<<: *b}"
    assert load_recipe(write(tmp_path, text)).trl == {"x": 2}


def test_override_reaches_an_empty_section(tmp_path: Path) -> None:
    fleet = load_recipe(write(tmp_path, MINIMAL + "fleet:\n"), ["fleet.workers=2"]).fleet
    assert fleet is not None
    assert fleet.workers == 2


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=1", "steps.x=1", "steps=[", "task.name.x=1"])
def test_bad_override_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_recipe(write(tmp_path, MINIMAL), [override])


@given(st.text(max_size=60))
def test_no_override_breaks_the_reader(text: str) -> None:
    """Whatever is given with --set, the answer is a recipe or a ConfigError."""
    path = Path(__file__).parents[2] / "recipes" / "countdown.yaml"
    with suppress(ConfigError):
        assert isinstance(load_recipe(path, [text]), Recipe)


def test_resume_allows_what_changes_no_result_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recorded = load_recipe(path).model_dump(mode="json")
    check_resumable(load_recipe(path, ["steps=9", "compare.every=2", "output.keep=1"]), recorded)
    for override in ("seed=1", "batch.prompts=4", "engine.max_draft_tokens=8", "trl.delta=2.0"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            check_resumable(load_recipe(path, [override]), recorded)


def test_an_infinite_value_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    changes = ["engine.sharpness=.inf", "algorithm.clip_high=.inf", "trl.delta=.inf"]
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(path, changes)
    recorded = msgspec.json.decode(msgspec.json.encode(recipe.recorded()))
    assert Recipe.model_validate(recorded | {"trl": recipe.trl}) == recipe
    check_resumable(recipe, recorded)
    for left_out in changes:
        changed = load_recipe(path, [change for change in changes if change != left_out])
        with pytest.raises(ConfigError, match="was 'inf' and is None"):
            check_resumable(changed, recorded)


def test_a_run_keeps_to_its_mode(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    eager = load_recipe(path, ["engine.compiled=false"])
    recorded = load_recipe(path).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"engine\.compiled was True and is False"):
        check_resumable(eager, recorded)
    del recorded["engine"]["compiled"]  # as written before there was a choice: eager
    check_resumable(eager, recorded)
    with pytest.raises(ConfigError, match=r"engine\.compiled was False and is True"):
        check_resumable(load_recipe(path), recorded)


def test_a_run_keeps_to_its_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, MINIMAL)
    own, other = (load_recipe(path, [f"engine.linear_kernel={name}"]) for name in ("paceline", "vllm"))
    recorded = own.model_dump(mode="json")
    check_resumable(own, recorded)
    with pytest.raises(ConfigError, match=r"engine\.linear_kernel was 'paceline' and is 'vllm'"):
        check_resumable(other, recorded)
    del recorded["engine"]["linear_kernel"]  # as written before there was a choice
    check_resumable(other, recorded)
    with pytest.raises(ConfigError, match=r"engine\.linear_kernel was 'vllm' and is 'paceline'"):
        check_resumable(own, recorded)
    monkeypatch.setattr("paceline.training.recipe.is_cpu_build", lambda: False)
    check_resumable(own, recorded)


def test_schedule_with_an_end_fixes_the_steps(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "optimizer: {schedule: linear}\n")
    recorded = load_recipe(path).model_dump(mode="json")
    with pytest.raises(ConfigError, match="steps was 4 and is 9"):
        check_resumable(load_recipe(path, ["steps=9"]), recorded)


def test_reading_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys, paceline.training.recipe, paceline.training.run_folder; "
        "print([m for m in ('torch', 'vllm', 'trl', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

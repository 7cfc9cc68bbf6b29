"""A plan as a file: written by `plan --out`, carried out by `rollout --plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import Run
from test_planning_commands import make_profile, rows

from paceline.commands.inputs.planned import carry_out, warn_of_others
from paceline.config import EngineSettings, FleetSettings
from paceline.errors import ConfigError, RecordError
from paceline.record.plan_file import PlanFile, read_plan, write_plan
from paceline.record.profile import write_profile


def make_plan(**fields: Any) -> PlanFile:
    given: dict[str, Any] = {
        "target": "policy",
        "mode": "decoupled",
        "drafter": "small",
        "window": 6,
        "verifiers": 3,
        "drafters": 3,
        "engine_devices": 1,
        "drafter_devices": 1,
        "devices": 6,
        "requests": 64,
        "tokens_per_s": 80.0,
    }
    return PlanFile(**given | fields)


def test_a_plan_comes_back_as_written(tmp_path: Path) -> None:
    write_plan(make_plan(), tmp_path / "deep" / "plan.json")
    assert read_plan(tmp_path / "deep" / "plan.json") == make_plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "paceline plan --out"),
        ("{", "not a plan"),
        ('{"version": 9}', "plan again"),
        ('{"version": 1}', "not a"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_plan(file)


def test_its_roles_are_those_of_a_fleet() -> None:
    ahead, inside = make_plan(), make_plan(mode="coupled", drafters=0, drafter_devices=0)
    assert FleetSettings(workers=ahead.workers, roles=ahead.roles).num_drafters == 3
    assert (inside.workers, inside.roles) == (3, "auto")


def test_it_says_how_engines_draft() -> None:
    engine = EngineSettings(model_drafter="small")
    assert carry_out(make_plan(), engine).draft_window == 6
    assert carry_out(make_plan(mode="plain", drafter="", drafters=0), engine).budget.policy == "off"
    assert (
        carry_out(make_plan(mode="coupled", drafter="suffix", drafters=0), EngineSettings())
        == EngineSettings()
    )


@pytest.mark.parametrize(
    ("plan", "engine", "message"),
    [
        (make_plan(engine_devices=4), EngineSettings(model_drafter="small"), "tensor_parallel_size"),
        (make_plan(), EngineSettings(), "--model-drafter"),
        (make_plan(), EngineSettings(model_drafter="small", draft_worker=True), "--draft-worker"),
        (make_plan(window=64), EngineSettings(model_drafter="small"), "window of 64.*--max-window 63"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(plan: PlanFile, engine: EngineSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        carry_out(plan, engine)


@pytest.mark.parametrize(
    ("plan", "drafter", "told"),
    [
        (make_plan(), "models/small", ""),
        (make_plan(drafter="models/small"), "models/small", ""),
        (make_plan(mode="plain", drafter=""), None, ""),
        (make_plan(target="other"), "small", "the plan is for 'other'"),
        (make_plan(), "models/tiny", "the plan drafts with 'small', --model-drafter is 'models/tiny'"),
    ],
)
def test_a_plan_for_something_else_is_told(
    plan: PlanFile, drafter: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_others(plan, Path("models/policy"), EngineSettings(model_drafter=drafter))
    error = capsys.readouterr().err
    assert told in error
    assert bool(error) == bool(told)


@pytest.mark.parametrize("acceptance", ["small=0.99", "suffix=0.9", "small=0.0"])
def test_the_best_plan_is_written(tmp_path: Path, run: Run, acceptance: str) -> None:
    profile, out = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(make_profile(), profile)
    told = run("plan", profile, "--acceptance", acceptance, "--devices", 8, "--requests", 64, "--out", out)
    assert told.code == 0, told.error
    best, plan = rows(told.out)[0], read_plan(out)
    assert (plan.mode, plan.drafter, plan.devices, plan.requests) == (best[0], best[1], 8, 64)
    assert str(plan.window or "") == best[4]
    assert plan.tokens_per_s == pytest.approx(float(best[6]), abs=0.06)
    assert plan.workers <= 8
    assert (plan.drafters > 0) == (plan.mode == "decoupled")
    assert msgspec.json.decode(out.read_bytes())["version"] == 1


def test_a_rollout_by_a_plan_has_no_workers_of_its_own(
    tmp_path: Path, run: Run, model: Path, prompts: Path
) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "o.jsonl"
    write_plan(make_plan(verifiers=1, drafters=1), file)
    twice = run("rollout", model, prompts, "--out", out, "--plan", file, "--workers", 2)
    assert twice.code == 2
    assert "drop --workers" in twice.error
    lacking = run("rollout", model, prompts, "--out", out, "--plan", file)
    assert lacking.code == 2
    assert "--model-drafter" in lacking.error

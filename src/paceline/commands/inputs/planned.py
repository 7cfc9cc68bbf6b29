"""What a plan file means for a rollout."""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.config import MOST_DRAFT_WINDOW, BudgetSettings, EngineSettings
from paceline.errors import ConfigError
from paceline.record.plan_file import PlanFile


def check_plan(plan: PlanFile, settings: EngineSettings) -> None:
    """Raise ConfigError for a plan that cannot be carried out here, or lacks its drafter."""
    if plan.engine_devices != 1 or plan.drafter_devices > 1:
        raise ConfigError(
            f"--plan has engines of {plan.engine_devices} devices and drafters of {plan.drafter_devices}: the command "
            "line starts engines of one; use paceline.fleet.Fleet with tensor_parallel_size and roles"
        )
    if plan.drafter not in ("", "suffix") and settings.model_drafter is None:
        raise ConfigError(f"--plan drafts with {plan.drafter!r}: give its folder as --model-drafter")
    if plan.mode == "decoupled" and plan.window > MOST_DRAFT_WINDOW:
        raise ConfigError(
            f"--plan has a draft window of {plan.window}, and drafters on workers of their own draft at most "
            f"{MOST_DRAFT_WINDOW} tokens ahead: plan again with --max-window {MOST_DRAFT_WINDOW}"
        )
    if plan.drafters and settings.draft_worker:
        raise ConfigError("--plan has drafters on workers of their own: drop --draft-worker")


def warn_of_others(plan: PlanFile, model: Path, settings: EngineSettings) -> None:
    """Say so where model or drafter has another name than what was planned for: it may be a later checkpoint, or
    another model, which the plan knows nothing of."""
    if model.resolve().name != plan.target:
        _warn(f"the plan is for {plan.target!r}, the model is {str(model)!r}")
    drafter = settings.model_drafter
    if drafter is None or plan.drafter in ("", "suffix"):
        return
    if plan.drafter not in (drafter, Path(drafter).name, Path(drafter).resolve().name):
        _warn(f"the plan drafts with {plan.drafter!r}, --model-drafter is {drafter!r}")


def _warn(what: str) -> None:
    typer.echo(
        f"note: {what}: unless it is a checkpoint of the same one, plan again from its own profile", err=True
    )


def carry_out(plan: PlanFile, settings: EngineSettings) -> EngineSettings:
    """The engines' settings by the plan; coupled, the draft budget decides about lengths. Raises as `check_plan`."""
    check_plan(plan, settings)
    match plan.mode:
        case "plain":
            return settings.model_copy(update={"budget": BudgetSettings(policy="off")})
        case "decoupled":
            return settings.model_copy(update={"draft_window": plan.window})
        case "coupled":
            return settings

"""What a plan file means for a rollout."""

from __future__ import annotations

from paceline.config import BudgetSettings, EngineSettings
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
    if plan.drafters and settings.draft_worker:
        raise ConfigError("--plan has drafters on workers of their own: drop --draft-worker")


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

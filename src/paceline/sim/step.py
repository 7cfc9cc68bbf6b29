"""Whole training steps: rollout, prepare, learn, and a drafter that ages while the policy learns.

Called by `paceline simulate`. Invariant: prepare and learn take the same time in every system of a comparison, as no
system changes them, unless it overlaps prepare with the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.sim.acceptance_model import moved_logit
from paceline.sim.rollout import FleetPlan, RolloutResult, simulate_rollout
from paceline.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Phases:
    """What a step does beside its rollout, on all workers. Raises ConfigError for a negative time."""

    prepare_s: float = 0.0
    """Rewards, reference and old log-probabilities."""
    learn_s: float = 0.0
    """Training and the weight update."""

    def __post_init__(self) -> None:
        if min(self.prepare_s, self.learn_s) < 0.0:
            raise ConfigError(f"phases of {self.prepare_s} and {self.learn_s} seconds: must not be negative")


@dataclass(frozen=True, slots=True)
class Ageing:
    """What a policy update costs a small-model drafter, and what training on idle workers gives back."""

    lost: float = 0.0
    """Of the logit of its acceptance, per policy update."""
    session_s: float = 60.0
    """Worker seconds of training that win a step's loss back."""


NEVER = Ageing()
"""A drafter that stays as it is."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of one system."""

    rollout: RolloutResult
    step_s: float


@dataclass(frozen=True, slots=True)
class System:
    """A way to run training steps."""

    name: str
    plan: FleetPlan
    overlaps_prepare: bool = False
    """Whether workers that fell free prepare what is finished (RLHFuse)."""
    learn_factor: float = 1.0
    """Prepare and learn time as a multiple: 0.5 with twice the GPUs."""
    ageing: Ageing = NEVER
    note: str = ""
    """What was planned for it, and over what."""


def simulate_steps(
    system: System, draw: Callable[[int], Workload], phases: Phases, num_steps: int, seed: int = 0
) -> list[StepResult]:
    """`num_steps` steps in a row. draw: the workload of each step, by its number."""
    results = []
    lost = 0.0
    for step in range(num_steps):
        plan = _aged(system.plan, lost)
        rollout = simulate_rollout(plan, draw(step), seed + step)
        results.append(StepResult(rollout, rollout.rollout_s + rest_s(system, rollout, phases)))
        lost = _after(system.ageing, lost, rollout)
    return results


def rest_s(system: System, rollout: RolloutResult, phases: Phases) -> float:
    """Seconds of a step beside its rollout."""
    prepare_s, learn_s = (system.learn_factor * part for part in (phases.prepare_s, phases.learn_s))
    if system.overlaps_prepare:
        free_s = rollout.idle_share * rollout.rollout_s
        prepare_s -= min(prepare_s, free_s)
    return prepare_s + learn_s


def _after(ageing: Ageing, lost: float, rollout: RolloutResult) -> float:
    """Loss of logit after a policy update; training wins back what has accumulated."""
    lost += ageing.lost
    return max(lost - ageing.lost * rollout.training_s / ageing.session_s, 0.0)


def _aged(plan: FleetPlan, lost: float) -> FleetPlan:
    if not lost:
        return plan
    drafters = tuple(
        replace(
            drafter,
            acceptance=replace(drafter.acceptance, level=moved_logit(drafter.acceptance.level, -lost)),
        )
        if drafter.kind == "model"
        else drafter
        for drafter in plan.drafters
    )
    return replace(plan, drafters=drafters)

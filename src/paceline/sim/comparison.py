"""Systems side by side: what a scenario's systems take, and what was claimed about them elsewhere.

Called by `paceline simulate` and the tests. Invariant: all systems get the same responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.sim.rollout import RolloutResult
from paceline.sim.scenario import Claim, Scenario, build_system
from paceline.sim.step import Phases, StepResult, System, rest_s, simulate_steps


@dataclass(frozen=True, slots=True)
class SystemResult:
    """Means over the steps of one system."""

    name: str
    rollout_s: float
    step_s: float
    tail_s: float
    idle_share: float
    wasted_tokens: float
    drafted_tokens: float
    acceptance_length: float
    """Tokens per verification and request; 1 without drafts."""
    preemptions: float
    training_s: float
    last: RolloutResult
    """The rollout of the last step."""
    note: str = ""
    """What was planned for the system, and over what."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A published number and ours."""

    claim: Claim
    ours: float | None
    """None: a ratio to no time at all, such as the tail of responses that end together."""

    @property
    def difference(self) -> float | None:
        """Ours relative to the published number, or to the nearest end of the range; 0 within it. None: there is
        neither, or that number is 0."""
        if self.ours is None:
            return None
        nearest = self._nearest(self.ours)
        if self.ours == nearest:
            return 0.0
        return self.ours / nearest - 1.0 if nearest else None

    @property
    def gain_difference(self) -> float | None:
        """As `difference`, of the gains (speed-up - 1): 1.1 for 1.2 is half of the gain. None: not a gain."""
        if self.ours is None or self.claim.quantity not in ("rollout", "step", "tail"):
            return None
        nearest = self._nearest(self.ours)
        return (self.ours - 1.0) / (nearest - 1.0) - 1.0 if nearest > 1.0 else None

    @property
    def ours_text(self) -> str:
        """For a table."""
        return "–" if self.ours is None else f"{self.ours:.3g}"

    @property
    def difference_text(self) -> str:
        """For a table."""
        return "–" if self.difference is None else f"{100 * self.difference:+.0f} %"

    def _nearest(self, ours: float) -> float:
        ends = (self.claim.paper, self.claim.paper if self.claim.paper_to is None else self.claim.paper_to)
        return min(max(ours, min(ends)), max(ends))


def run_systems(
    scenario: Scenario, names: Sequence[str], told: Callable[[str], None] = lambda name: None
) -> dict[str, SystemResult]:
    """Simulate the systems of these names, the first being the one that prepare and learn are measured by.

    told: called with each name before its turn.
    """
    distribution = scenario.length_distribution()
    found: dict[str, SystemResult] = {}
    phases = Phases()
    for name in names:
        told(name)
        system = build_system(name, scenario)
        steps = simulate_steps(
            system,
            lambda step: scenario.draw(distribution, step),
            phases,
            scenario.steps,
            scenario.seed,
        )
        if not found:
            phases = scenario.phases_of(fmean(step.rollout.rollout_s for step in steps))
            steps = [
                StepResult(step.rollout, step.rollout.rollout_s + rest_s(system, step.rollout, phases))
                for step in steps
            ]
        found[name] = _summary(system, steps)
    return found


def judge_claims(
    scenario: Scenario,
    results: Mapping[str, SystemResult],
    variants: Mapping[tuple[str, ...], Mapping[str, SystemResult]],
) -> list[ClaimResult]:
    """Our number beside every claim whose systems were simulated.

    results: of the scenario as it is; variants: by `Claim.where`, of the scenario changed so.
    """
    found = []
    for claim in scenario.claims:
        at = variants.get(claim.where, {}) if claim.where else results
        if claim.of in at and (claim.over is None or claim.over in at):
            found.append(ClaimResult(claim, _measure(claim, at)))
    return found


def _measure(claim: Claim, results: Mapping[str, SystemResult]) -> float | None:
    of, over = results[claim.of], results[claim.over or claim.of]
    if claim.quantity == "rollout":
        return over.rollout_s / of.rollout_s
    if claim.quantity == "step":
        return over.step_s / of.step_s
    if claim.quantity == "tail":
        return over.tail_s / of.tail_s if of.tail_s else None
    if claim.quantity == "tail_cut":
        return 1.0 - of.tail_s / over.tail_s if over.tail_s else None
    return float(getattr(of, claim.quantity))


def _summary(system: System, steps: Sequence[StepResult]) -> SystemResult:
    rollouts = [step.rollout for step in steps]
    drafted = fmean(sum(c.drafted_tokens for c in r.counters) for r in rollouts)
    rounds = fmean(sum(c.rounds for c in r.counters) for r in rollouts)
    generated = fmean(sum(c.generated_tokens for c in r.counters) for r in rollouts)
    return SystemResult(
        name=system.name,
        rollout_s=fmean(r.rollout_s for r in rollouts),
        step_s=fmean(step.step_s for step in steps),
        tail_s=fmean(r.tail_s for r in rollouts),
        idle_share=fmean(r.idle_share for r in rollouts),
        wasted_tokens=fmean(r.wasted_tokens for r in rollouts),
        drafted_tokens=drafted,
        acceptance_length=generated / rounds if rounds else 1.0,
        preemptions=fmean(r.preemptions for r in rollouts),
        training_s=fmean(r.training_s for r in rollouts),
        last=rollouts[-1],
        note=system.note,
    )

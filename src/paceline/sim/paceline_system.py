"""Paceline as a simulated system: one composition of all techniques, planned for the scenario.

Where drafters draft (inside the engine, or ahead on devices of their own from the first token on) is
`planning.composition`'s choice, at the rollout's first batch and with the shared dice's acceptance; whatever it is,
responses are divided and run evenly, and free workers race with shared progress or train the drafter. What
was planned, and over what, is the system's note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.config import BudgetSettings
from paceline.errors import ConfigError
from paceline.planning.composition import Candidate, Devices, Option, best_of, describe, rank_options
from paceline.planning.dispatch import DispatchSettings
from paceline.planning.harvest import HarvestSettings
from paceline.planning.latency_profile import VerifyLatency
from paceline.planning.window import Mode, best_window, profiled_times
from paceline.sim.acceptance_model import moved_logit, sibling_level
from paceline.sim.budgeted import Budgeted
from paceline.sim.costs import Drafter
from paceline.sim.help import Helpers
from paceline.sim.race import Racing
from paceline.sim.rollout import FleetPlan
from paceline.sim.speculation import Decoupled, Plain, Speculation
from paceline.sim.step import System
from paceline.sim.systems import Setup, divided, inside

_RACERS_PER_HOST = 5  # a racing worker's drafter takes one GPU: the four of a worker serve four others
_REFRESH_ROUNDS = 256.0


@dataclass(frozen=True, slots=True)
class PacelineOptions:
    """Paceline's parameters."""

    variant: Literal["even", "context", "sticky"] = "even"
    """Of the dispatcher."""
    chunk_tokens: int = 8192
    max_draft_tokens: int = 16
    max_batch: int = 16
    """b_max of racing."""
    dice_logit: float = 0.07
    """What throwing the target's dice adds to the logit of a model drafter's acceptance."""
    deploy_s: float = 1.0


PacelineStage = Literal["divided", "budget", "helped", "single-path", "coupled", "decoupled", "full"]


def paceline(setup: Setup, options: PacelineOptions, stage: PacelineStage = "full") -> System:
    """Paceline, or it without some of its techniques.

    divided: chunks, evenly. budget: grouped and model drafts in the engine with the shared dice, cut
    by the draft budget. helped: and free workers help as those of a live fleet do. full: the drafter is trained on idle
    workers, workers that fall free race for the slowest responses and take the leader's tokens, and drafters draft
    where the plan says. coupled, decoupled: in the engine or ahead, whatever the plan says. single-path: drafts without
    alternatives. Raises ConfigError for `decoupled` without a drafter that can draft ahead.
    """
    models = tuple(_ours(one, options.dice_logit, stage != "single-path") for one in setup.models)
    setup = replace(setup, models=models)
    name = "Paceline" if stage == "full" else f"Paceline, {stage}"
    dispatch = DispatchSettings(variant=options.variant, chunk_tokens=options.chunk_tokens)
    if stage == "divided":
        return System(name, divided(setup, dispatch, Plain))
    ranked = plan_composition(setup, options)
    if stage == "decoupled" or (stage in ("full", "single-path") and ranked[0].mode is Mode.DECOUPLED):
        ahead = best_of(ranked, Mode.DECOUPLED)
        if ahead is None:
            raise ConfigError(
                "Paceline, decoupled: no drafter of the scenario can draft on devices of its own: add a model that "
                "is not attached, and GPUs for it"
            )
        plan = _decoupled(setup, options, dispatch, ahead)
    else:
        plan = _coupled(setup, options, dispatch, ranked, stage)
    note = describe(ranked) if stage == "full" else ""
    return System(name, plan, ageing=setup.ageing, note=note)


def plan_composition(setup: Setup, options: PacelineOptions) -> tuple[Option, ...]:
    """Ways to use the GPUs, the best first: acceptance as the median response has it, suffix trees with all siblings.

    Of the models only the one that is fastest for a response alone drafts ahead: as a rollout ends so.
    """
    size = setup.engine.num_gpus
    verify = setup.engine.step.for_requests_of(setup.mean_context_tokens)
    first = _first_ahead(setup, verify, options.max_draft_tokens)
    candidates = [
        Candidate(
            one.name,
            one.acceptance.level,
            inside(one).token,
            {1: one.token} if one.name == first else {},
        )
        for one in setup.models
    ]
    if tree := setup.group_drafter:
        acceptance = sibling_level(tree.acceptance, setup.group_size - 1)
        candidates.append(Candidate(tree.name, acceptance, tree.token))
    devices = Devices(setup.num_gpus, setup.num_responses, {size: verify})
    return rank_options(devices, candidates, options.max_draft_tokens)


def _first_ahead(setup: Setup, verify: VerifyLatency, max_window: int) -> str | None:
    """The model that a lone response is fastest with on a device of its own; None: there is none."""
    models = {one.name: one for one in setup.models if not one.is_attached}
    if not models:
        return None

    def rate(name: str) -> float:
        times = profiled_times(models[name].token, verify, 1, max_window)
        return float(best_window(models[name].acceptance.level, times, Mode.DECOUPLED).tokens_per_s)

    return max(models, key=rate)


def _coupled(
    setup: Setup,
    options: PacelineOptions,
    dispatch: DispatchSettings,
    ranked: Sequence[Option],
    stage: PacelineStage,
) -> FleetPlan:
    """All GPUs verify; the model that is best inside the engine and the suffix trees draft under the budget."""
    by_name = {one.name: one for one in setup.models}
    names = [one.drafter for one in ranked if one.mode is Mode.COUPLED and one.drafter in by_name]
    first = by_name[names[0]] if names else next(iter(setup.models), None)
    free = (setup.row(setup.group_drafter),) if setup.group_drafter else ()
    budget = BudgetSettings(max_draft_tokens=options.max_draft_tokens)
    row = setup.row(first) if first else 0
    model = inside(first) if first else None
    home = lambda: Budgeted(free, model, row, budget)  # noqa: E731
    plan = replace(divided(setup, dispatch, home), refresh_rounds=_REFRESH_ROUNDS)
    if stage == "helped":
        return replace(plan, helpers=_helpers(setup, options, home, first, free))
    if stage == "budget":
        return plan
    can_be_hosted = any(not one.is_attached for one in setup.models)
    racing = _racing(setup, options, home, first, 0, _RACERS_PER_HOST if can_be_hosted else 0)
    return replace(plan, racing=racing, harvest=HarvestSettings())


def _decoupled(
    setup: Setup, options: PacelineOptions, dispatch: DispatchSettings, ahead: Option
) -> FleetPlan:
    """Every worker has a drafter of its own, which drafts ahead; suffix trees draft where they promise more."""
    drafter = next(one for one in setup.models if one.name == ahead.drafter)
    free = (setup.row(setup.group_drafter),) if setup.group_drafter else ()
    home = _ahead(setup, drafter, ahead.window, options, free)
    racing = _racing(setup, options, home, drafter, ahead.window, 0)
    plan = divided(setup, dispatch, home)
    return replace(
        plan,
        num_workers=ahead.num_groups,
        racing=racing,
        harvest=HarvestSettings(),
        refresh_rounds=_REFRESH_ROUNDS,
    )


def _helpers(
    setup: Setup,
    options: PacelineOptions,
    home: Callable[[], Speculation],
    drafter: Drafter | None,
    free: tuple[int, ...],
) -> Helpers | None:
    """Free workers draft ahead with the engines' own model drafter; None: there is none that can."""
    if drafter is None or drafter.is_attached:
        return None
    return Helpers(drafter, setup.row(drafter), _ahead(setup, drafter, 0, options, free), home)


def _racing(
    setup: Setup,
    options: PacelineOptions,
    home: Callable[[], Speculation],
    first: Drafter | None,
    window: int,
    hosts_every: int,
) -> Racing | None:
    """first: the drafter that responses begin with, None: suffix trees. window: of racers, 0: the best of each."""
    racers = setup.drafters
    if not racers:
        return None
    return Racing(
        speculate=tuple(_racer(setup, one, window, options) for one in racers),
        drafter_rows=tuple(setup.row(one) for one in racers),
        home=home,
        max_batch=options.max_batch,
        deploy_s=options.deploy_s,
        first_rank=racers.index(first) if first else 0,
        shares_progress=True,
        hosts_every=hosts_every,
    )


def _racer(
    setup: Setup, drafter: Drafter, window: int, options: PacelineOptions
) -> Callable[[], Speculation]:
    """A worker that races with this drafter: a model drafts ahead elsewhere, anything else in the engine."""
    row = setup.row(drafter)
    if drafter.kind == "model" and not drafter.is_attached:
        return _ahead(setup, drafter, window, options, ())
    budget = BudgetSettings(max_draft_tokens=options.max_draft_tokens)
    if drafter.kind == "model":
        return lambda: Budgeted((), inside(drafter), row, budget)
    return lambda: Budgeted((row,), None, row, budget)


def _ahead(
    setup: Setup, drafter: Drafter, window: int, options: PacelineOptions, free: tuple[int, ...]
) -> Callable[[], Speculation]:
    """A worker whose drafter drafts ahead: the placement's window, or at 0 the best one of each request."""
    row, most = setup.row(drafter), options.max_draft_tokens
    return lambda: Decoupled(drafter, row, window or most, most, chooses_all=not window, free=free)


def _ours(drafter: Drafter, logit: float, has_paths: bool) -> Drafter:
    """The drafter with the shared dice; both its levels rise."""
    tree = drafter.tree_level if has_paths else None
    level = moved_logit(drafter.acceptance.level, logit)
    return replace(
        drafter,
        acceptance=replace(drafter.acceptance, level=level),
        tree_level=None if tree is None else moved_logit(tree, logit),
    )

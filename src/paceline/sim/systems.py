"""The systems of the papers, as compositions of the decisions in `planning/`; ours is in `paceline_system.py`.

Each function takes what all systems share (`Setup`) and gives one `System`; a preset picks and names them. What a
technique costs or yields is never written here, only which decisions are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.dispatch import DispatchSettings
from paceline.planning.harvest import HarvestSettings
from paceline.planning.placement import Cluster, place
from paceline.planning.racing import assign_best_of_n, assign_fastest_of_n
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.race import Racing
from paceline.sim.rollout import FleetPlan
from paceline.sim.speculation import (
    Bandit,
    Decoupled,
    DraftRange,
    FixedWindow,
    Plain,
    Speculation,
)
from paceline.sim.step import NEVER, Ageing, System

GROUP_BOUND = DispatchSettings(variant="group")
_EPSILON, _REWARDS = 0.1, 1000  # of TLT's bandit, as in the SGLang change that its release builds on


@dataclass(frozen=True, slots=True)
class Setup:
    """What the systems of a comparison share."""

    num_gpus: int
    engine: EngineCosts
    """One worker of the baseline."""
    num_responses: int
    models: tuple[Drafter, ...] = ()
    """Small-model drafters in the order of the draft ladder."""
    group_drafter: Drafter | None = None
    """Suffix trees, or an n-gram look-up, shared by a group."""
    lookup: Drafter | None = None
    """n-gram look-up in the response alone."""
    mean_context_tokens: int = 2048
    """At which plans are made."""
    ageing: Ageing = NEVER
    group_size: int = 1

    @property
    def num_workers(self) -> int:
        """Workers of the baseline."""
        return self.num_gpus // self.engine.num_gpus

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """All of them: the rows of the acceptance rates."""
        return (*self.models, *(one for one in (self.group_drafter, self.lookup) if one is not None))

    def row(self, drafter: Drafter) -> int:
        """Its row of the acceptance rates."""
        return self.drafters.index(drafter)


def verl(setup: Setup) -> System:
    """Whole groups bound to workers, no speculation."""
    return System("veRL", bound(setup, Plain))


def verl_twice(setup: Setup) -> System:
    """veRL on twice the GPUs."""
    plan = replace(bound(setup, Plain), num_workers=2 * setup.num_workers)
    return System("veRL (2x)", plan, learn_factor=0.5)


def rlhfuse(setup: Setup) -> System:
    """veRL that prepares finished responses on workers that fell free."""
    return System("RLHFuse", bound(setup, Plain), overlaps_prepare=True)


def vanilla(setup: Setup, window: int) -> System:
    """Group-bound, with the first small model drafting `window` tokens in the same engine."""
    drafter, row = inside(setup.models[0]), setup.row(setup.models[0])
    plan = bound(setup, lambda: FixedWindow(drafter, row, window))
    return System("vanilla speculation", plan, ageing=setup.ageing)


def ngram(setup: Setup, window: int) -> System:
    """Group-bound, with n-gram look-up."""
    drafter = setup.lookup
    assert drafter is not None
    return System("n-gram", bound(setup, lambda: FixedWindow(drafter, setup.row(drafter), window)))


@dataclass(frozen=True, slots=True)
class SpecActorOptions:
    """SpecActor's parameters."""

    acceptance: float
    """Historical acceptance of the first drafter, which the plan is made for."""
    first_window: int = 3
    """w of the stages before algorithm 1 plans it."""
    first_draft_gpus: int = 1
    naive_draft_gpus: int = 4
    max_window: int = 16
    max_batch: int = 16
    """b_max of racing."""
    reconfigure_rounds: float = 1000.0
    deploy_s: float = 1.0


Stage = Literal["naive", "decoupled", "reconfigured", "best-of-N", "full"]


def specactor(setup: Setup, options: SpecActorOptions, stage: Stage = "full") -> System:
    """SpecActor, or it without its later techniques, in the order of its ablation.

    naive: vanilla speculation, its slow drafting included, with the drafter on devices of its own. decoupled: drafting
    ahead, with a first plan. reconfigured: algorithms 1 and 2. best-of-N: racers too, by the paper's first version.
    full: fastest-of-N, its second version, in their place.
    """
    drafter = setup.models[0]
    row = setup.row(drafter)
    if stage in ("naive", "decoupled"):
        is_naive = stage == "naive"
        draft_gpus = options.naive_draft_gpus if is_naive else options.first_draft_gpus
        groups = setup.num_gpus // (setup.engine.num_gpus + draft_gpus)
        drafter = inside(drafter) if is_naive else drafter
        made = lambda: Decoupled(drafter, row, options.first_window, synchronous=is_naive)  # noqa: E731
        plan = replace(bound(setup, made), num_workers=groups)
        return System(f"SpecActor, {stage}", plan, ageing=setup.ageing)
    window, groups = _placed(setup, drafter, options)
    made = lambda: Decoupled(drafter, row, window, options.max_window)  # noqa: E731
    plan = replace(bound(setup, made), num_workers=groups, refresh_rounds=options.reconfigure_rounds)
    if stage == "reconfigured":
        return System("SpecActor, reconfigured", plan, ageing=setup.ageing)
    racers = (*setup.models, *([setup.lookup] if setup.lookup else []))
    racing = Racing(
        speculate=tuple(_racer(setup, one, window, options) for one in racers),
        drafter_rows=tuple(setup.row(one) for one in racers),
        home=made,
        max_batch=options.max_batch,
        deploy_s=options.deploy_s,
        assign=assign_best_of_n if stage == "best-of-N" else assign_fastest_of_n,
    )
    name = "SpecActor" if stage == "full" else f"SpecActor, {stage}"
    return System(name, replace(plan, racing=racing), ageing=setup.ageing)


@dataclass(frozen=True, slots=True)
class SeerOptions:
    """Seer's parameters."""

    chunk_tokens: int = 8192
    request_tokens: int = 8
    """Longest draft."""
    batch_tokens: int = 256
    """Draft tokens of a batch, which the concurrency shares."""
    min_probability: float = 0.15
    fixed_window: int = 3
    """Draft length without adaptation."""


SeerStage = Literal["divided", "context", "oracle", "no-adaptation", "no-group-context", "full"]


def seer(setup: Setup, options: SeerOptions, stage: SeerStage = "full") -> System:
    """Seer, or it without its later techniques, in the order of its ablation.

    divided: chunks and the KV pool. context: scheduling by length context. oracle: by true lengths. no-adaptation: all
    drafts of one length. no-group-context: every response drafts from its own tokens. full: grouped speculation.
    """
    variant = {"divided": "no-context", "oracle": "oracle"}.get(stage, "context")
    dispatch = DispatchSettings(variant=variant, chunk_tokens=options.chunk_tokens)  # type: ignore[arg-type]
    name = "Seer" if stage == "full" else f"Seer, {stage}"
    if stage in ("divided", "context", "oracle"):
        return System(name, divided(setup, dispatch, Plain))
    drafter = setup.lookup if stage == "no-group-context" else setup.group_drafter
    assert drafter is not None
    row = setup.row(drafter)
    if stage == "no-adaptation":
        return System(name, divided(setup, dispatch, lambda: FixedWindow(drafter, row, options.fixed_window)))
    budget = BudgetSettings(
        policy="thresholds",
        max_draft_tokens=options.request_tokens,
        threshold_request_tokens=options.request_tokens,
        threshold_batch_tokens=options.batch_tokens,
        threshold_min_probability=options.min_probability,
    )
    return System(name, divided(setup, dispatch, lambda: DraftRange(drafter, row, budget)))


@dataclass(frozen=True, slots=True)
class TltOptions:
    """TLT's parameters."""

    max_batch: int = 32
    """Requests of a worker below which it speculates."""
    strategies: tuple[tuple[int, int], ...] = ((10, 64), (10, 48), (10, 32), (10, 16))
    """(draft depth, tokens to verify), one group for each number of tokens to verify."""
    batch_sizes: tuple[int, ...] = (1, 2, 3, 8)
    """Smallest batch of each number of tokens to verify, the largest number first."""


def tlt(setup: Setup, options: TltOptions, is_adaptive: bool = True) -> System:
    """TLT: elastic speculation with the bandit, its drafter trained on idle workers (not: TLT with a static one).

    A drafter with second choices drafts trees, others lines.
    """
    row, drafter = setup.row(setup.models[0]), setup.models[0]
    drafter = inside(drafter)
    strategies = tuple(bandit.Strategy(depth, 1, verified) for depth, verified in options.strategies)
    start = bandit.initialize(strategies, options.batch_sizes, _EPSILON, _REWARDS, seed=0)
    plan = replace(
        bound(setup, lambda: Bandit(drafter, row, options.max_batch, start)),
        harvest=HarvestSettings() if is_adaptive else None,
    )
    return System("TLT" if is_adaptive else "TLT, static drafter", plan, ageing=setup.ageing)


def bound(setup: Setup, made: Callable[[], Speculation]) -> FleetPlan:
    """Whole groups bound to workers, as veRL does."""
    return FleetPlan(setup.engine, setup.num_workers, GROUP_BOUND, made, setup.drafters)


def divided(setup: Setup, dispatch: DispatchSettings, made: Callable[[], Speculation]) -> FleetPlan:
    """All GPUs are workers that share the responses."""
    return FleetPlan(setup.engine, setup.num_workers, dispatch, made, setup.drafters)


def _placed(setup: Setup, drafter: Drafter, options: SpecActorOptions) -> tuple[int, int]:
    """Algorithm 1: (window, groups). One profile per size: drafters on one device, verifiers as the baseline's."""
    cluster = Cluster(
        setup.num_gpus,
        setup.num_responses,
        {1: drafter.token},
        {setup.engine.num_gpus: setup.engine.step.for_requests_of(setup.mean_context_tokens)},
    )
    best = place(cluster, options.acceptance, options.max_window).best
    return best.window, best.num_groups


def _racer(
    setup: Setup, drafter: Drafter, window: int, options: SpecActorOptions
) -> Callable[[], Speculation]:
    return lambda: Decoupled(drafter, setup.row(drafter), window, options.max_window)


def inside(drafter: Drafter) -> Drafter:
    """The drafter as it runs inside the target's engine."""
    return drafter if drafter.engine_token is None else replace(drafter, token=drafter.engine_token)

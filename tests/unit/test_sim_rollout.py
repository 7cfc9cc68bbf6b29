"""Simulated rollouts: every response ends once, in every system, and the systems stand to each other as they must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.config import Variant
from paceline.errors import ConfigError
from paceline.planning.dispatch import DispatchSettings
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency, StepLatency
from paceline.planning.racing import assign_best_of_n, assign_fastest_of_n
from paceline.record import measure_tail
from paceline.sim.acceptance_model import AcceptanceModel, AcceptanceProcess
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.paceline_system import PacelineOptions, PacelineStage, paceline
from paceline.sim.rollout import FleetPlan, RolloutResult, simulate_rollout
from paceline.sim.speculation import Plain
from paceline.sim.step import Ageing, Phases, System, simulate_steps
from paceline.sim.systems import (
    SeerOptions,
    Setup,
    SpecActorOptions,
    TltOptions,
    ngram,
    rlhfuse,
    seer,
    specactor,
    tlt,
    vanilla,
    verl,
    verl_twice,
)
from paceline.sim.workload import LogNormalLengths, Workload, draw_workload, recorded_workload

CURVE = PiecewiseLatency(
    np.array([0.0, 128.0, 256.0, 512.0, 1024.0]), 1e-3 * np.array([13, 13.8, 16.8, 25, 41])
)
ENGINE = EngineCosts(4, StepLatency(CURVE, 2e-8), 3e-5, 400_000, kv_load_token_s=1e-8)
SMALL = Drafter("small", AffineLatency(0.002, 1e-5), AcceptanceProcess(0.65), tree_level=0.75)
LARGER = Drafter("larger", AffineLatency(0.003, 2e-5), AcceptanceProcess(0.7))
TREE = Drafter("tree", AffineLatency(0.0, 2e-6), AcceptanceProcess(0.4, 0.65), "free")
LOOKUP = Drafter("lookup", AffineLatency(0.0, 2e-6), AcceptanceProcess(0.3), "free")


def rollout_without_pool(variant: Variant, chunk_tokens: int = 512) -> RolloutResult:
    engine = replace(ENGINE, kv_load_token_s=None, prefill_token_s=1e-3)
    dispatch = DispatchSettings(variant=variant, chunk_tokens=chunk_tokens)
    return simulate_rollout(FleetPlan(engine, 3, dispatch, Plain), make_work())


def test_nothing_is_prefilled_twice_without_a_pool_where_nothing_moves() -> None:
    prompts = float(make_work().num_responses * 64)
    sticky, even = rollout_without_pool("sticky"), rollout_without_pool("even")
    assert sum(one.prefilled_tokens for one in sticky.counters) == prompts
    assert sum(one.prefilled_tokens for one in even.counters) > 2 * prompts
    assert sticky.rollout_s < even.rollout_s


def make_setup(num_workers: int = 4, engine: EngineCosts = ENGINE) -> Setup:
    return Setup(4 * num_workers, engine, 256, (SMALL, LARGER), TREE, LOOKUP)


def make_work(groups: int = 16, size: int = 16, seed: int = 1) -> Workload:
    return draw_workload(LogNormalLengths(800.0, 1.0), groups, size, 64, 8192, 0.7, seed)


STAGES: tuple[PacelineStage, ...] = ("divided", "budget", "helped", "single-path", "coupled", "full")


def all_systems(setup: Setup, chunk: int = 512) -> list[System]:
    spec, options, ours = (
        SpecActorOptions(0.65),
        SeerOptions(chunk_tokens=chunk),
        PacelineOptions(chunk_tokens=chunk),
    )
    return [
        verl(setup),
        verl_twice(setup),
        rlhfuse(setup),
        vanilla(setup, 3),
        *([ngram(setup, 3)] if setup.lookup else []),
        *(
            specactor(setup, spec, stage)
            for stage in ("naive", "decoupled", "reconfigured", "best-of-N", "full")
            if setup.num_workers > 1
        ),
        *(
            seer(setup, options, stage)
            for stage in ("divided", "context", "oracle", "no-adaptation", "no-group-context", "full")
            if setup.lookup or stage != "no-group-context"
        ),
        tlt(setup, TltOptions(batch_sizes=(1, 2, 4, 8))),
        tlt(setup, TltOptions(batch_sizes=(1, 2, 4, 8)), is_adaptive=False),
        *(paceline(setup, ours, stage) for stage in STAGES),
        *([paceline(setup, ours, "decoupled")] if setup.num_workers > 1 else []),
    ]


SYSTEMS = all_systems(make_setup())


def check(result: RolloutResult, work: Workload) -> None:
    assert (result.end_s > 0.0).all()
    assert result.end_s.max() == result.rollout_s
    assert result.tail_s == measure_tail(result.end_s.tolist()), "as records and bench have it"
    generated = sum(one.generated_tokens for one in result.counters)
    assert generated >= work.length_tokens.sum() * (1 - 1e-6)
    for one in result.counters:
        ends = [0.0, *(time_s for interval in one.intervals for time_s in interval)]
        assert ends == sorted(ends)
        assert ends[-1] <= result.rollout_s


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_response_ends_once(system: System) -> None:
    work = make_work()
    result = simulate_rollout(system.plan, work)
    check(result, work)
    if not result.num_racers:
        generated = sum(one.generated_tokens for one in result.counters)
        assert generated == pytest.approx(float(work.length_tokens.sum()), rel=1e-6)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_the_same_again_is_the_same(system: System) -> None:
    first, second = (simulate_rollout(system.plan, make_work(), 3) for _ in range(2))
    assert first.end_s.tolist() == second.end_s.tolist()


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=6),
    workers=st.integers(1, 6),
    kv=st.integers(330, 3000),
    chunk=st.integers(16, 400),
    refresh=st.sampled_from([4.0, 32.0, 512.0]),
    name=st.sampled_from([system.name for system in SYSTEMS]),
)
def test_any_workload_is_finished(
    lengths: list[list[int]], workers: int, kv: int, chunk: int, refresh: float, name: str
) -> None:
    """Few workers and many, chunks and racers in memory for hardly more than one response."""
    least = 2 if "SpecActor" in name or "decoupled" in name else 1
    setup = make_setup(max(workers, least), replace(ENGINE, kv_tokens=kv))
    system = next(one for one in all_systems(setup, chunk) if one.name == name)
    racing = system.plan.racing and replace(system.plan.racing, interval_s=0.05, deploy_s=0.01)
    plan = replace(system.plan, refresh_rounds=refresh, racing=racing)
    work = recorded_workload(lengths, [7] * len(lengths), 300)
    check(simulate_rollout(plan, work), work)


@settings(max_examples=60, deadline=None)
@example([[1], [1], [1]], 3, 3e-5, "SpecActor")
@example([[1], [1], [1]], 3, 3e-5, "Paceline, decoupled")
@given(
    lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=1), min_size=1, max_size=6),
    workers=st.integers(2, 4),
    prefill=st.sampled_from([0.0, 3e-5, 1e-3]),
    name=st.sampled_from([system.name for system in SYSTEMS]),
)
def test_idle_time_is_never_negative(
    lengths: list[list[int]], workers: int, prefill: float, name: str
) -> None:
    """Responses that end before the racers' workers have deployed a drafter and read the prompt."""
    engine = replace(ENGINE, prefill_token_s=prefill, kv_load_token_s=None)
    system = next(one for one in all_systems(make_setup(workers, engine), 64) if one.name == name)
    work = recorded_workload([*lengths, [1]], [64] * (len(lengths) + 1), 8)
    result = simulate_rollout(system.plan, work)
    check(result, work)
    assert 0.0 <= result.idle_share < 1.0
    assert all(0.0 <= one.busy_s <= result.rollout_s * (1 + 1e-9) for one in result.counters)


@pytest.mark.parametrize(
    "name", ["SpecActor", "SpecActor, best-of-N", "Paceline", "Paceline, decoupled", "TLT", "veRL"]
)
@pytest.mark.parametrize("groups", [1, 4])
def test_equal_responses_end_together(name: str, groups: int) -> None:
    """Ties everywhere: what ends on a worker that is only looked at must be told as well."""
    even = AcceptanceProcess(0.65, between=0.0, within=0.0)
    setup = replace(make_setup(4), models=(replace(SMALL, acceptance=even),), lookup=None)
    system = next(one for one in all_systems(setup, 64) if one.name == name)
    work = recorded_workload([[200, 200]] * groups, [7] * groups, 200)
    check(simulate_rollout(system.plan, work), work)


@pytest.mark.parametrize("name", ["SpecActor", "Paceline"])
def test_workers_that_never_had_work_race_too(name: str) -> None:
    system = next(one for one in SYSTEMS if one.name == name)
    result = simulate_rollout(system.plan, recorded_workload([[2000, 3000]], [7], 3000))
    assert result.num_racers > 0


def test_idle_from_the_start_is_idle() -> None:
    result = simulate_rollout(verl(make_setup(4)).plan, recorded_workload([[200]], [7], 200))
    assert result.idle_share == pytest.approx(0.75)


def test_one_worker_takes_what_its_steps_take() -> None:
    work = recorded_workload([[100, 200]], [10], 200)
    plan = verl(Setup(4, replace(ENGINE, prefill_token_s=0.0), 2)).plan
    two, one = float(CURVE.seconds(2)), float(CURVE.seconds(1))
    context = 2e-8 * (
        sum(2 * (10 + k + 0.5) for k in range(100)) + sum(10 + k + 0.5 for k in range(100, 200))
    )
    assert simulate_rollout(plan, work).rollout_s == pytest.approx(100 * two + 100 * one + context, rel=1e-9)


def test_more_workers_and_known_lengths_never_hurt_much() -> None:
    work, setup = make_work(40), make_setup(8)
    times = {s.name: simulate_rollout(s.plan, work).rollout_s for s in all_systems(setup)}
    assert times["veRL (2x)"] <= times["veRL"]
    assert times["Seer, oracle"] <= 1.05 * times["Seer, context"]
    assert times["Seer, context"] <= 1.05 * times["veRL"]
    assert times["Seer"] < times["Seer, context"]
    assert times["Paceline"] < times["Paceline, divided"]
    assert times["SpecActor"] <= times["SpecActor, reconfigured"]


def test_racers_only_help() -> None:
    work, setup = make_work(), make_setup()
    full = simulate_rollout(specactor(setup, SpecActorOptions(0.65)).plan, work)
    without = simulate_rollout(specactor(setup, SpecActorOptions(0.65), "reconfigured").plan, work)
    assert full.num_racers > 0
    assert full.rollout_s <= without.rollout_s
    assert (full.end_s <= without.end_s * 1.02 + 1.0).all()


def test_scarce_memory_preempts_bound_groups_and_not_divided_ones() -> None:
    setup = make_setup(2, replace(ENGINE, kv_tokens=40_000))
    bound = simulate_rollout(verl(setup).plan, make_work())
    divided = simulate_rollout(seer(setup, SeerOptions(chunk_tokens=512), "context").plan, make_work())
    assert bound.preemptions > 0
    assert divided.preemptions == 0


def test_idle_workers_train_the_drafter() -> None:
    result = simulate_rollout(tlt(make_setup(8), TltOptions(batch_sizes=(1, 2, 4, 8))).plan, make_work())
    assert 0.0 < result.training_s <= result.idle_share * result.rollout_s * 8 * (1 + 1e-9)


def test_acceptance_rises_with_siblings_and_repeats() -> None:
    model = AcceptanceModel((TREE.acceptance,), 4, 8, 0)
    ids, tokens = np.arange(8), np.full(8, 100.0)
    few, many = (model.rates(0, ids, tokens, np.full(8, n)) for n in (0.0, 30.0))
    assert (many > few).all()
    assert model.rates(0, ids[3:5], tokens[3:5], np.zeros(2)).tolist() == few[3:5].tolist()


def test_phases_and_ageing_make_a_step() -> None:
    work, setup = make_work(), make_setup()
    phases = Phases(prepare_s=5.0, learn_s=20.0)
    plain = simulate_steps(verl(setup), lambda step: work, phases, 1)[0]
    assert plain.step_s == pytest.approx(plain.rollout.rollout_s + 25.0)
    fused = simulate_steps(rlhfuse(setup), lambda step: work, phases, 1)[0]
    free_s = min(5.0, fused.rollout.idle_share * fused.rollout.rollout_s)
    assert fused.step_s == pytest.approx(plain.step_s - free_s)
    twice = simulate_steps(verl_twice(setup), lambda step: work, phases, 1)[0]
    assert twice.step_s == pytest.approx(twice.rollout.rollout_s + 12.5)


def test_a_drafter_ages_unless_it_is_trained() -> None:
    options = TltOptions(batch_sizes=(1, 2, 4, 8))
    work, setup = make_work(), replace(make_setup(8), ageing=Ageing(0.3, 1.0))
    trained = simulate_steps(tlt(setup, options), lambda step: work, Phases(), 4)
    static = simulate_steps(tlt(setup, options, is_adaptive=False), lambda step: work, Phases(), 4)
    assert trained[-1].rollout.rollout_s < static[-1].rollout.rollout_s


def test_paceline_drafts_where_the_plan_says() -> None:
    """Few requests on flat steps: drafting ahead. Many on steep ones: all GPUs verify."""
    flat = replace(
        make_setup(10), num_responses=40, models=(replace(SMALL, acceptance=AcceptanceProcess(0.9)),)
    )
    steep = replace(make_setup(10, replace(ENGINE, step=StepLatency(AffineLatency(0.01, 1e-3), 0.0))))
    options = PacelineOptions(chunk_tokens=512)
    ahead, inside = paceline(flat, options), paceline(steep, options)
    assert (ahead.plan.num_workers, inside.plan.num_workers) == (8, 10)
    assert "ahead on 1 more per engine" in ahead.note
    assert "instead: ahead" in inside.note
    for setup, planned, name in ((flat, ahead, "decoupled"), (steep, inside, "coupled")):
        forced = paceline(setup, options, "decoupled" if name == "decoupled" else "coupled")
        work = make_work(4)
        assert simulate_rollout(forced.plan, work).rollout_s == simulate_rollout(planned.plan, work).rollout_s


def test_no_drafter_drafts_ahead_that_cannot() -> None:
    attached = replace(make_setup(), models=(replace(SMALL, is_attached=True),))
    with pytest.raises(ConfigError, match="no drafter of the scenario can draft on devices of its own"):
        paceline(attached, PacelineOptions(chunk_tokens=512), "decoupled")


DEAR = replace(
    SMALL,
    token=AffineLatency(0.004, 0.00001),
    acceptance=replace(SMALL.acceptance, level=0.9),
    tree_level=None,
)


@pytest.mark.parametrize(("model", "tree", "helps"), [(SMALL, TREE, False), (DEAR, None, True)])
def test_free_workers_help_where_live_ones_would(model: Drafter, tree: Drafter | None, helps: bool) -> None:
    """Nobody drafts where suffix trees draft well enough; a model that costs the engine time drafts on free workers."""
    setup, options = Setup(16, ENGINE, 256, (model,), tree), PacelineOptions(chunk_tokens=512)
    budget, helped = (paceline(setup, options, stage) for stage in ("budget", "helped"))
    for seed in range(3):
        work = make_work(groups=4, seed=seed)
        alone, together = (simulate_rollout(system.plan, work, seed) for system in (budget, helped))
        assert bool(together.num_helps) == helps
        assert together.rollout_s <= (0.97 if helps else 1.001) * alone.rollout_s


def test_best_of_n_races_as_its_version_says() -> None:
    work, setup = make_work(), make_setup()
    first = specactor(setup, SpecActorOptions(0.65), "best-of-N")
    second = specactor(setup, SpecActorOptions(0.65))
    assert first.plan.racing is not None
    assert second.plan.racing is not None
    assert first.plan.racing.assign is assign_best_of_n
    assert second.plan.racing.assign is assign_fastest_of_n
    results = [simulate_rollout(one.plan, work) for one in (first, second)]
    assert all(one.num_racers > 0 for one in results)
    without = simulate_rollout(specactor(setup, SpecActorOptions(0.65), "reconfigured").plan, work)
    assert all(one.rollout_s <= without.rollout_s for one in results)


def test_ranks_that_wait_for_each_other_never_gain() -> None:
    ranks = replace(ENGINE, num_ranks=8)
    work = make_work()
    for build in (verl, lambda setup: seer(setup, SeerOptions(chunk_tokens=512), "context")):
        even = simulate_rollout(build(make_setup()).plan, work)
        waiting = simulate_rollout(build(make_setup(engine=ranks)).plan, work)
        check(waiting, work)
        assert waiting.rollout_s > even.rollout_s

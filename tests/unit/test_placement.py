"""Algorithm 1 against its own loops, written out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, EngineError
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency
from paceline.planning.placement import Cluster, Plan, place
from paceline.planning.window import Rules

MAX_WINDOW = 12


def draft_on(gpus: int) -> AffineLatency:
    return AffineLatency(0.002, 0.00002 / gpus)


def verify_on(gpus: int) -> AffineLatency:
    return AffineLatency(0.010 + 0.020 / gpus, 0.0004 / gpus)


def cluster_of(num_gpus: int, num_requests: int, drafts: list[int], verifiers: list[int]) -> Cluster:
    return Cluster(
        num_gpus, num_requests, {g: draft_on(g) for g in drafts}, {g: verify_on(g) for g in verifiers}
    )


def tau(p: float, w: int, rules: Rules, refill_rounds: float) -> float:
    if rules is Rules.PAPER:
        return sum(p**a * (1 - p) * (a + 1) / 2 for a in range(w)) + w * p**w
    return sum(p**a for a in range(w)) / ((1 - p**w) * (1 + refill_rounds) + p ** (w + 1))


def paper_stops(draft: AffineLatency, verify: AffineLatency, w: int) -> bool:
    by_slope = math.ceil(verify.per_token_s * (w + 1) / draft.per_token_s)
    return w > max(by_slope, math.ceil(verify.base_s / draft.base_s))


def exhaustive_search(cluster: Cluster, p: float, rules: Rules) -> dict[tuple[int, int, int], float]:
    """TGS of every (g_d, g_v, w), in the order of algorithm 1."""
    found = {}
    for g_v in sorted(cluster.verify):
        for g_d in range(1, g_v + 1):
            if g_d not in cluster.draft or g_d + g_v > cluster.num_gpus:
                continue
            groups = cluster.num_gpus // (g_d + g_v)
            b = math.ceil(cluster.num_requests / groups)
            if rules is Rules.PAPER:
                b = math.ceil((g_d + g_v) * cluster.num_requests / cluster.num_gpus)
            draft, verify = cluster.draft[g_d], cluster.verify[g_v]
            for w in range(1, MAX_WINDOW + 1):
                if rules is Rules.PAPER and paper_stops(draft, verify, w):
                    break
                draft_s, verify_s = w * float(draft.seconds(b)), float(verify.seconds(b * (w + 1)))
                round_s = max(draft_s, verify_s)
                refill = 1.0 if b > 1 else min(draft_s, verify_s) / round_s
                found[g_d, g_v, w] = tau(p, w, rules, refill) / round_s
    return found


BASES_S = st.floats(0.0005, 0.05)
SLOPES_S = st.floats(0.00001, 0.002)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    num_gpus = draw(st.integers(2, 24))
    sizes = st.integers(1, 12)
    drafter = st.builds(AffineLatency, BASES_S, SLOPES_S)
    verifier = st.builds(AffineLatency, BASES_S, st.just(0.0) | SLOPES_S)
    draft = draw(st.dictionaries(sizes, drafter, min_size=1, max_size=4))
    verify = draw(st.dictionaries(sizes, verifier, min_size=1, max_size=4))
    return Cluster(num_gpus, draw(st.integers(1, 400)), draft, verify)


@pytest.mark.parametrize("rules", list(Rules))
@given(cluster=clusters(), p=st.floats(0.0, 1.0))
@settings(max_examples=100)
def test_the_plan_is_that_of_an_exhaustive_search(rules: Rules, cluster: Cluster, p: float) -> None:
    everything = exhaustive_search(cluster, p, rules)
    if not everything:
        with pytest.raises(ConfigError, match="no group fits"):
            place(cluster, p, MAX_WINDOW, rules)
        return
    placement = place(cluster, p, MAX_WINDOW, rules, num_alternatives=100)
    plans = [placement.best, *placement.alternatives]
    assert placement.best.tokens_per_s == pytest.approx(max(everything.values()), rel=1e-6)
    for plan in plans:
        of_pair = {
            key: rate
            for key, rate in everything.items()
            if key[:2] == (plan.num_draft_gpus, plan.num_verify_gpus)
        }
        chosen = of_pair[plan.num_draft_gpus, plan.num_verify_gpus, plan.window]
        assert plan.tokens_per_s == pytest.approx(chosen, rel=1e-6)
        assert chosen == pytest.approx(max(of_pair.values()), rel=1e-6)
    assert len(plans) == len({key[:2] for key in everything})
    rates = [plan.tokens_per_s for plan in plans]
    assert rates == sorted(rates, reverse=True)


def test_a_plan_says_what_it_costs() -> None:
    plan = place(cluster_of(16, 1024, [1, 2], [4, 8]), 0.8, MAX_WINDOW).best
    gpus = plan.num_draft_gpus + plan.num_verify_gpus
    assert plan.num_groups == 16 // gpus
    assert plan.batch == math.ceil(1024 / plan.num_groups)
    assert plan.draft_s == pytest.approx(
        plan.window * float(draft_on(plan.num_draft_gpus).seconds(plan.batch))
    )
    verify_s = float(verify_on(plan.num_verify_gpus).seconds(plan.batch * (plan.window + 1)))
    assert plan.verify_s == pytest.approx(verify_s)
    assert plan.tokens_per_s == pytest.approx(
        tau(0.8, plan.window, Rules.PROTOCOL, 1.0) / max(plan.draft_s, plan.verify_s)
    )


def test_requests_cannot_run_on_a_part_of_a_group() -> None:
    """5 of 8 GPUs are one group of all requests, where the paper counts 1.6 groups."""
    cluster = cluster_of(8, 800, [1], [4])
    assert place(cluster, 0.8, MAX_WINDOW).best.batch == 800
    assert place(cluster, 0.8, MAX_WINDOW, Rules.PAPER).best.batch == 500


def test_equal_plans_the_first_enumerated_wins() -> None:
    same = AffineLatency(0.01, 0.0)
    cluster = Cluster(12, 100, dict.fromkeys((1, 2), same), dict.fromkeys((2, 4), same))
    best = place(cluster, 0.5, MAX_WINDOW).best
    assert (best.num_verify_gpus, best.num_draft_gpus) == (2, 1)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.9])
def test_the_bound_is_no_tighter_than_the_best_window(p: float) -> None:
    """Where verifying more tokens costs nothing, the best window is where the bound ends."""
    cluster = Cluster(5, 64, {1: AffineLatency(0.002, 0.0)}, {4: AffineLatency(0.02, 0.0)})
    assert place(cluster, p, 32).best.window == 10


def test_certain_drafts_use_the_longest_window_where_it_still_pays() -> None:
    cheap = Cluster(5, 1, {1: AffineLatency(0.0001, 0.0)}, {4: AffineLatency(0.02, 0.001)})
    assert place(cheap, 1.0, 32).best.window == 32


def test_measured_curves_are_planned_with_and_the_papers_bound_refuses_them() -> None:
    curve = PiecewiseLatency(np.array([0.0, 64.0, 1024.0]), np.array([0.02, 0.02, 0.1]))
    cluster = replace(cluster_of(8, 256, [1], [4]), verify={4: curve})
    plan: Plan = place(cluster, 0.8, MAX_WINDOW).best
    assert plan.verify_s == pytest.approx(float(curve.seconds(plan.batch * (plan.window + 1))))
    with pytest.raises(ConfigError, match=r"Rules\.PROTOCOL"):
        place(cluster, 0.8, MAX_WINDOW, Rules.PAPER)


def test_impossible_questions_are_refused() -> None:
    cluster = cluster_of(8, 64, [1], [4])
    with pytest.raises(ConfigError, match="no group fits 4 GPUs"):
        place(replace(cluster, num_gpus=4), 0.8, MAX_WINDOW)
    with pytest.raises(ConfigError, match="no group fits"):
        place(replace(cluster, draft={}), 0.8, MAX_WINDOW)
    with pytest.raises(ConfigError, match="at least 1 of both"):
        place(cluster, 0.8, 0)
    with pytest.raises(ConfigError, match="at least 1 of both"):
        place(replace(cluster, num_requests=0), 0.8, MAX_WINDOW)
    with pytest.raises(EngineError, match="not between 0 and 1"):
        place(cluster, 1.5, MAX_WINDOW)

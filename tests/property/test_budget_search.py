"""The marginal budget against exhaustive search, and what must hold for every policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetSettings
from paceline.planning.budget import (
    BudgetSnapshot,
    BudgetState,
    Climb,
    best_lengths,
    decide,
    fair_gains,
    fair_lengths,
    fair_weights,
    may_pay,
)
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time
from paceline.sim.speculation import fair_depths
from paceline.types import Float32Array, Float64Array

SETTINGS = BudgetSettings(min_gain=0.0, max_growth=4.0)
# Few distinct values, so that ties are common.
probabilities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.75, 0.9, 1.0])


@st.composite
def rows(draw: st.DrawFn, max_requests: int = 3, max_tokens: int = 4) -> Float32Array:
    """Path probabilities: products along each row, 0 beyond the draft."""
    shape = draw(st.integers(1, max_requests)), draw(st.integers(1, max_tokens))
    flat = draw(st.lists(probabilities, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.cumprod(np.array(flat, dtype=np.float32).reshape(shape), axis=1, dtype=np.float32)


@st.composite
def states(draw: st.DrawFn) -> BudgetState:
    """A budget that has measured every step size from 1 to 16, T arbitrary (not convex) before the fit."""
    model = StepTimeModel.initial()
    seconds = draw(st.lists(st.floats(0.001, 0.1), min_size=16, max_size=16))
    for _ in range(2):
        for tokens in range(16, 0, -1):
            model = update_measured_time(model, tokens, seconds[tokens - 1])
    return replace(BudgetState.initial(SETTINGS), decode_time=model)


def snapshot(path: Float32Array, room: int = 100, weight: tuple[float, ...] | None = None) -> BudgetSnapshot:
    weights = None if weight is None else np.array(weight[: len(path)])
    return BudgetSnapshot(len(path), 0, path, room, weights)


def rate(
    path: Float32Array,
    lengths: tuple[int, ...],
    state: BudgetState,
    weight: tuple[float, ...] | None = None,
) -> float:
    tokens = (1.0 + float(path[r, :n].sum(dtype=np.float64)) for r, n in enumerate(lengths))
    gain = sum(one * w for one, w in zip(tokens, weight or (1.0,) * len(path), strict=False))
    return gain / float(predict_s(state.decode_time, len(path) + sum(lengths)))


weights = st.none() | st.tuples(*(st.floats(0.25, 4.0) for _ in range(3)))


@given(rows(), states(), st.integers(0, 12), weights)
@settings(max_examples=200)
def test_marginal_equals_exhaustive_search(
    path: Float32Array, state: BudgetState, room: int, weight: tuple[float, ...] | None
) -> None:
    decision = tuple(decide(snapshot(path, room, weight), state, SETTINGS).tolist())
    choices = [c for c in product(*(range(path.shape[1] + 1) for _ in path)) if sum(c) <= room]
    best = max(choices, key=lambda choice: rate(path, choice, state, weight))
    plain = rate(path, (0,) * len(path), state)
    if rate(path, best, state) < plain * (
        1 + 1e-6
    ):  # for its sake the batch would be slower than without drafts
        assert rate(path, decision, state) >= plain * (1 - 1e-9)
        return
    assert sum(decision) <= room
    assert np.isclose(rate(path, decision, state, weight), rate(path, best, state, weight), rtol=1e-6)


def log_rate(path: Float32Array, lengths: tuple[int, ...], seconds: Float64Array) -> float:
    tokens = [1.0 + float(path[r, :n].sum(dtype=np.float64)) for r, n in enumerate(lengths)]
    return float(np.log(tokens).mean() - np.log(seconds[sum(lengths)]))


@st.composite
def step_times(draw: st.DrawFn) -> Float64Array:
    """Seconds of a step with 0 .. 12 draft tokens: rising, not convex."""
    return np.sort(draw(st.lists(st.floats(0.001, 0.1), min_size=13, max_size=13)))


@given(rows(), step_times())
@settings(max_examples=200)
def test_fair_lengths_equal_exhaustive_search(path: Float32Array, seconds: Float64Array) -> None:
    decision = tuple(fair_lengths(path, seconds).tolist())
    choices = product(*(range(path.shape[1] + 1) for _ in path))
    best = max(log_rate(path, choice, seconds) for choice in choices)
    assert np.isclose(log_rate(path, decision, seconds), best, rtol=1e-9, atol=1e-9)


def test_weights_settle_where_the_simulator_begins() -> None:
    acceptance = np.array([0.95, 0.9, 0.8, 0.6, 0.4, 0.3])
    path = acceptance[:, None] ** np.arange(1, 17)
    seconds = 0.02 + 0.001 * np.arange(path.size + 1)
    tokens, steps = np.zeros(len(path)), np.zeros(len(path), dtype=np.int64)
    spent_s = 0.0
    for _ in range(4000):
        lengths = best_lengths(path, seconds, weight=fair_weights(tokens, steps))
        tokens += 1.0 + np.where(np.arange(16) < lengths[:, None], path, 0.0).sum(axis=1)
        steps += 1
        spent_s += seconds[lengths.sum()]
    settled = float(np.log(tokens / spent_s).mean())
    fair = log_rate(path, tuple(fair_lengths(path, seconds)), seconds)
    greedy = log_rate(path, tuple(best_lengths(path, seconds)), seconds)
    assert abs(settled - fair) < 0.005 < fair - greedy


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_the_closed_form_of_a_fair_depth(acceptance: float, depth: int) -> None:
    gains = fair_gains(acceptance ** np.arange(1.0, 17.0)[None, :])[0]
    assert (np.diff(gains) < 0).all()
    cut = float(gains[depth - 1])
    if cut > 1e-12:
        assert fair_depths(cut, np.array([acceptance]))[0] == depth
        assert fair_depths(cut * 1.001, np.array([acceptance]))[0] == depth - 1


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 3000)), min_size=1, max_size=8))
def test_who_has_gained_less_weighs_more(counts: list[tuple[int, int]]) -> None:
    steps = np.array([count for count, _ in counts])
    tokens = steps + np.array([accepted for _, accepted in counts])
    weight = fair_weights(tokens, steps)
    assert (weight > 0).all()
    own, mean = tokens / steps, tokens.sum() / steps.sum()
    assert (weight[own < mean * (1 - 1e-9)] > 1).all()
    assert (weight[own > mean * (1 + 1e-9)] < 1).all()


def test_without_steps_all_weigh_the_same() -> None:
    assert fair_weights(np.zeros(3, np.int64), np.zeros(3, np.int64)).tolist() == [1.0, 1.0, 1.0]


@given(rows(max_requests=8, max_tokens=8), states(), st.none() | st.tuples(*(st.floats(0.2, 9.0),) * 8))
@settings(max_examples=250)
def test_marginal_never_expects_less_than_no_drafts(
    path: Float32Array, state: BudgetState, weight: tuple[float, ...] | None
) -> None:
    decision = tuple(decide(snapshot(path, weight=weight), state, BudgetSettings()).tolist())
    assert rate(path, decision, state) >= rate(path, (0,) * len(path), state) * (1 - 1e-9)


@given(rows(), states(), st.data())
@settings(max_examples=150)
def test_a_chosen_token_that_becomes_likelier_stays_chosen(
    path: Float32Array, state: BudgetState, data: st.DataObject
) -> None:
    before = decide(snapshot(path), state, SETTINGS)
    chosen = [(r, j) for r, length in enumerate(before) for j in range(length)]
    if not chosen:
        return
    request, position = data.draw(st.sampled_from(chosen))
    ceiling = path[request, position - 1] if position else 1.0
    raised = path.copy()
    raised[request, position] += (ceiling - path[request, position]) * data.draw(st.floats(0.01, 1.0))
    assert decide(snapshot(raised), state, SETTINGS)[request] > position


@given(
    rows(max_requests=8, max_tokens=8),
    states(),
    st.integers(0, 40),
    st.sampled_from(["marginal", "bandit", "thresholds", "fixed", "off"]),
)
@settings(max_examples=200)
def test_every_policy_keeps_to_drafts_and_room(
    path: Float32Array, state: BudgetState, room: int, policy: str
) -> None:
    chosen = BudgetSettings(policy=policy)  # type: ignore[arg-type]
    decision = decide(
        snapshot(path, room), replace(BudgetState.initial(chosen), decode_time=state.decode_time), chosen
    )
    assert decision.shape == (len(path),)
    assert (decision >= 0).all()
    assert (decision <= (path > 0).sum(axis=1)).all()
    assert decision.sum() <= room


@given(rows(max_requests=8, max_tokens=8), states(), st.integers(1, 40))
@settings(max_examples=150)
def test_no_token_left_out_is_likelier_than_one_taken(
    path: Float32Array, state: BudgetState, room: int
) -> None:
    decision = decide(snapshot(path, room), state, SETTINGS)
    taken = np.arange(path.shape[1]) < decision[:, None]
    if taken.any() and not taken.all():
        assert path[taken].min() >= path[~taken].max()


@st.composite
def histories(draw: st.DrawFn) -> BudgetState:
    """A measured budget that may distrust the drafts, and may have to measure T again."""
    state = draw(states())
    expected, kept = draw(st.floats(0.0, 500.0)), draw(st.floats(0.0, 1.2))
    since = draw(st.sampled_from([0, 10, 300]))
    return replace(
        state,
        num_steps=1000,
        last_drafted_step=1000 - since,
        climb=draw(st.sampled_from([None, Climb(), Climb(0, 6), Climb(6, 9), Climb(6, 9, is_repeated=True)])),
        expected_tokens=expected,
        accepted_tokens=expected * kept,
    )


@given(
    rows(max_requests=8, max_tokens=8),
    histories(),
    st.tuples(st.integers(0, 40), st.integers(0, 8)),
    st.sampled_from(["marginal", "marginal", "marginal", "bandit", "thresholds", "fixed", "off"]),
    st.sampled_from([0.0, 0.01]),
    st.none() | st.tuples(*(st.floats(0.2, 9.0),) * 8),
)
@settings(max_examples=600)
def test_what_is_said_not_to_pay_would_not_have_been_taken(
    acceptance: Float32Array,
    history: BudgetState,
    sizes: tuple[int, int],
    policy: str,
    min_gain: float,
    weight: tuple[float, ...] | None,
) -> None:
    chosen = BudgetSettings(policy=policy, min_gain=min_gain, max_growth=4.0)  # type: ignore[arg-type]
    state = replace(history, bandit=BudgetState.initial(chosen).bandit, prefill_time=history.decode_time)
    (room, others), width = sizes, acceptance.shape[1]
    weights = None if weight is None else np.array(weight[: len(acceptance)])
    path = np.cumprod(acceptance, axis=1, dtype=np.float32)
    step = BudgetSnapshot(len(path), others, path, room, weights)
    highest = np.cumprod(np.full(width + 1, acceptance.max(), np.float32))  # a draft might have been longer
    ceiling = replace(step, path_probability=np.tile(highest, (len(path), 1)))
    if decide(step, state, chosen).any():
        assert may_pay(ceiling, state, chosen)

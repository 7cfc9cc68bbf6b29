"""The marginal budget against exhaustive search, and what must hold for every policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetSettings
from paceline.planning.budget import BudgetSnapshot, BudgetState, decide
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time
from paceline.types import Float32Array

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
    for tokens in range(1, 17):
        seconds = draw(st.floats(0.001, 0.1))
        for _ in range(2):
            model = update_measured_time(model, tokens, seconds)
    return replace(BudgetState.initial(SETTINGS), decode_time=model)


def snapshot(path: Float32Array, room: int = 100) -> BudgetSnapshot:
    return BudgetSnapshot(len(path), 0, path, room)


def rate(path: Float32Array, lengths: tuple[int, ...], state: BudgetState) -> float:
    gain = sum(1.0 + float(path[r, :n].sum(dtype=np.float64)) for r, n in enumerate(lengths))
    return gain / float(predict_s(state.decode_time, len(path) + sum(lengths)))


@given(rows(), states(), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_marginal_equals_exhaustive_search(path: Float32Array, state: BudgetState, room: int) -> None:
    decision = tuple(decide(snapshot(path, room), state, SETTINGS).tolist())
    choices = product(*(range(path.shape[1] + 1) for _ in path))
    best = max(rate(path, choice, state) for choice in choices if sum(choice) <= room)
    assert sum(decision) <= room
    assert np.isclose(rate(path, decision, state), best, rtol=1e-6)


@given(rows(max_requests=8, max_tokens=8), states())
@settings(max_examples=150, deadline=None)
def test_marginal_never_expects_less_than_no_drafts(path: Float32Array, state: BudgetState) -> None:
    decision = tuple(decide(snapshot(path), state, BudgetSettings()).tolist())
    assert rate(path, decision, state) >= rate(path, (0,) * len(path), state) * (1 - 1e-9)


@given(rows(), states(), st.data())
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=150, deadline=None)
def test_no_token_left_out_is_likelier_than_one_taken(
    path: Float32Array, state: BudgetState, room: int
) -> None:
    decision = decide(snapshot(path, room), state, SETTINGS)
    taken = np.arange(path.shape[1]) < decision[:, None]
    if taken.any() and not taken.all():
        assert path[taken].min() >= path[~taken].max()

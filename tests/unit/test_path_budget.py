"""Which alternative paths are worth a row: by example, against exhaustive search, and never in a large batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from paceline.config import BudgetSettings
from paceline.planning.budget import BudgetState
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time
from paceline.planning.paths import PathChoice, PathSnapshot, PathTrust, may_pay, shared_prefix, update_trust
from paceline.planning.paths import choose_paths as choose_trusting

TRUST = PathTrust()
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
FLAT = BudgetSettings(max_growth=4.0, min_gain=0.0)


def choose_paths(
    given: PathSnapshot, state: BudgetState, settings: BudgetSettings, trust: PathTrust = TRUST
) -> PathChoice:
    return choose_trusting(given, state, settings, trust)


def flat_s(tokens: int) -> float:
    return 0.010


def linear_s(tokens: int) -> float:
    return 0.001 * tokens


def knee_s(tokens: int) -> float:
    return 0.014 + 0.001 * tokens


def state_with(time_s: Callable[[int], float]) -> BudgetState:
    model = StepTimeModel.initial()
    for tokens in SIZES:
        for _ in range(3):
            model = update_measured_time(model, tokens, time_s(tokens))
    return replace(BudgetState.initial(FLAT), decode_time=model)


def snapshot(
    paths: list[tuple[int, list[int], list[float]]],
    *,
    requests: int = 1,
    drafts: int = 4,
    accepted: float = 1.0,
    covered: list[int] | None = None,
    rows: int = 8,
    context: int = 0,
) -> PathSnapshot:
    """Candidates given as (owner, tokens, path probabilities)."""
    width = max(len(tokens) for _, tokens, _ in paths)
    tokens = np.full((len(paths), width), -5, dtype=np.int32)
    probability = np.zeros((len(paths), width), dtype=np.float32)
    for row, (_, ids, chances) in enumerate(paths):
        tokens[row, : len(ids)] = ids
        probability[row, : len(ids)] = chances
    return PathSnapshot(
        num_requests=requests,
        num_other_tokens=0,
        num_draft_tokens=drafts,
        expected_accepted=accepted,
        owners=np.array([owner for owner, _, _ in paths], dtype=np.int64),
        tokens=tokens,
        path_probability=probability,
        limits=np.array([len(ids) for _, ids, _ in paths], dtype=np.int32),
        covered=np.array(covered or [0] * len(paths), dtype=np.int32),
        contexts=np.full(len(paths), context, dtype=np.int64),
        max_rows=rows,
    )


def test_a_flat_step_time_takes_every_path_whole() -> None:
    made = choose_paths(snapshot([(0, [1, 2], [0.3, 0.2]), (0, [7], [0.2])]), state_with(flat_s), FLAT)
    assert made.candidates.tolist() == [0, 1]
    assert made.lengths.tolist() == [2, 1]


def test_a_shared_beginning_is_gained_once() -> None:
    paths = [(0, [1, 2, 3], [0.4, 0.3, 0.2]), (0, [1, 2, 9], [0.4, 0.3, 0.1]), (1, [1, 2], [0.2, 0.1])]
    made = choose_paths(snapshot(paths, requests=2), state_with(flat_s), FLAT)
    assert made.candidates.tolist() == [0, 2, 1]
    assert made.covered.tolist() == [0, 0, 2]


def test_what_the_draft_verifies_is_worth_nothing() -> None:
    made = choose_paths(snapshot([(0, [1, 2], [0.9, 0.8])], covered=[2]), state_with(flat_s), FLAT)
    assert not len(made.candidates)


def test_an_alternative_must_pay_for_its_tokens_and_the_repeated_one() -> None:
    likely, unlikely = [(0, [1], [0.5])], [(0, [1], [0.1])]
    state = state_with(knee_s)
    # 2 tokens in 19 ms; one alternative of one token makes it 21 ms: worth it from 0.21 expected tokens on.
    assert len(choose_paths(snapshot(likely), state, FLAT).candidates) == 1
    assert len(choose_paths(snapshot(unlikely), state, FLAT).candidates) == 0


def test_broken_promises_are_believed_less_and_forgiven() -> None:
    paths, state = [(0, [1], [0.4])], state_with(knee_s)
    assert len(choose_paths(snapshot(paths), state, FLAT).candidates) == 1
    trust = TRUST
    for _ in range(100):
        trust = update_trust(trust, promised=0.4, gained=0.1)
    assert 0.25 < trust.worth < 0.4
    assert not len(choose_paths(snapshot(paths), state, FLAT, trust).candidates)
    for _ in range(3000):
        trust = update_trust(trust, promised=0.0, gained=0.0)
    assert trust.worth > 0.95
    assert update_trust(TRUST, promised=1.0, gained=9.0).worth == 1.0


def test_a_compute_bound_batch_takes_none() -> None:
    state = state_with(linear_s)
    paths = [(r, [1, 2], [0.45, 0.4]) for r in range(32)]
    made = choose_paths(snapshot(paths, requests=32, drafts=0, accepted=0.0), state, FLAT)
    assert not len(made.candidates)
    drafts = np.full((32, 2), 0.5, dtype=np.float32)
    lengths = np.full(32, 1, dtype=np.int32)
    assert not may_pay(drafts, lengths, 0, 16.0, state, FLAT)
    assert may_pay(drafts[:1], lengths[:1], 0, 0.5, state_with(flat_s), FLAT)


def test_steps_do_not_outgrow_what_was_measured() -> None:
    model = StepTimeModel.initial()
    for _ in range(4):
        model = update_measured_time(model, 6, 0.010)
    state = replace(BudgetState.initial(FLAT), decode_time=model)
    settings = BudgetSettings(max_growth=1.5)
    paths = [(0, [i, 1, 2, 3, 4, 5], [0.9] * 6) for i in range(4)]
    made = choose_paths(snapshot(paths, drafts=5), state, settings)
    assert int((made.lengths + 1).sum()) <= 3
    assert len(made.candidates) == 1


def test_small_gains_are_left() -> None:
    settings = BudgetSettings(max_growth=4.0, min_gain=0.2)
    assert not len(choose_paths(snapshot([(0, [1], [0.3])]), state_with(flat_s), settings).candidates)
    assert len(choose_paths(snapshot([(0, [1], [0.5])]), state_with(flat_s), settings).candidates)


def test_rows_are_bounded() -> None:
    paths = [(0, [i], [0.1 + 0.01 * i]) for i in range(6)]
    made = choose_paths(snapshot(paths, rows=2), state_with(flat_s), FLAT)
    assert made.candidates.tolist() == [5, 4]


def test_the_other_policies() -> None:
    paths = [(0, [1, 2, 3], [0.6, 0.5, 0.2]), (0, [1, 4], [0.6, 0.3]), (1, [8, 9], [0.1, 0.1])]
    state = state_with(flat_s)

    def choose(**fields: object) -> tuple[list[int], list[int]]:
        settings = BudgetSettings.model_validate(fields)
        made = choose_paths(snapshot(paths, requests=2, drafts=3), state, settings)
        return made.candidates.tolist(), made.lengths.tolist()

    assert choose(policy="off") == ([], [])
    assert choose(policy="bandit") == ([], [])  # of one path each
    assert choose(policy="fixed", fixed_tokens=2) == ([0, 1, 2], [2, 2, 2])
    assert choose(policy="fixed", fixed_tokens=1) == ([0, 2], [1, 1])
    limits = {"threshold_batch_tokens": 6, "threshold_min_probability": 0.25}
    assert choose(policy="thresholds", **limits) == ([0], [2])
    limits["threshold_batch_tokens"] = 7
    assert choose(policy="thresholds", **limits) == ([0, 1], [2, 2])


def test_the_bandits_paths_take_what_the_drafts_left() -> None:
    paths = [(0, [1, 2, 3], [0.6, 0.5, 0.2]), (0, [1, 4], [0.6, 0.3]), (1, [8, 9], [0.1, 0.1])]

    def choose(arm: tuple[int, int, int]) -> tuple[list[int], list[int]]:
        settings = BudgetSettings(policy="bandit", bandit_strategies=(arm,), bandit_batch_sizes=(1,))
        state = BudgetState.initial(settings)
        pays = may_pay(np.full((2, 2), 0.5, np.float32), np.array([2, 1]), 0, 1.0, state, settings)
        made = choose_paths(snapshot(paths, requests=2, drafts=3), state, settings, PathTrust())
        assert pays == (arm[1] > 1)
        return made.candidates.tolist(), made.lengths.tolist()

    assert choose((4, 1, 4)) == ([], [])
    assert choose((4, 2, 4)) == ([0, 2], [3, 2])
    assert choose((2, 3, 4)) == ([0, 1, 2], [2, 2, 1])
    assert choose((4, 3, 1)) == ([], [])


def test_shared_prefix() -> None:
    one = np.array([[1, 2, 3], [1, 2, 3], [4, 2, 3]], dtype=np.int32)
    other = np.array([[1, 2, 9, 9], [1, 2, 3, 9], [1, 2, 3, 9]], dtype=np.int32)
    assert shared_prefix(one, other).tolist() == [2, 3, 0]


@pytest.mark.parametrize("seed", range(20))
def test_against_exhaustive_search(seed: int) -> None:
    """Where T is affine, taking rows one by one comes within a hundredth of the best set of all."""
    random = np.random.default_rng(seed)
    paths = []
    for owner in range(2):
        for path in range(2):
            chances = np.cumprod(random.uniform(0.2, 0.9, 3)) * 0.6
            paths.append((owner, [10 * path, *random.integers(0, 5, 2).tolist()], chances.tolist()))
    given = snapshot(paths, requests=2, drafts=2, accepted=0.8)
    state = state_with(knee_s)
    made = choose_paths(given, state, FLAT)

    def rate(lengths: tuple[int, ...]) -> float:
        gained = sum(sum(paths[i][2][:length]) for i, length in enumerate(lengths))
        tokens = 4 + sum(length + 1 for length in lengths if length)
        return (2 + 0.8 + gained) / float(predict_s(state.decode_time, tokens))

    found = [0] * len(paths)
    for candidate, length in zip(made.candidates.tolist(), made.lengths.tolist(), strict=True):
        found[candidate] = length
    assert rate(tuple(found)) >= 0.99 * max(map(rate, product(range(4), repeat=len(paths))))


def test_a_row_pays_for_the_context_that_it_reads() -> None:
    model = StepTimeModel.initial()
    for tokens in SIZES:
        for context in (0, 10_000) * 4:
            model = update_measured_time(model, tokens, 0.010 + 1e-6 * context, context)
    state = replace(BudgetState.initial(FLAT), decode_time=model)
    paths = [(0, [1, 2], [0.3, 0.2])]
    assert len(choose_paths(snapshot(paths), state, FLAT).candidates) == 1
    assert not len(choose_paths(snapshot(paths, context=50_000), state, FLAT).candidates)

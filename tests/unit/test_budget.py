"""The draft budget: each policy by example, the exploration rules, the closed loop against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from paceline.config import BudgetSettings
from paceline.errors import EngineError
from paceline.planning.acceptance import AcceptanceTable, estimate, update_acceptance
from paceline.planning.budget import (
    BudgetSnapshot,
    BudgetState,
    Climb,
    decide,
    draft_depth,
    expected_accepted,
    may_pay,
    update,
)
from paceline.planning.latency import StepTimeModel, predict_s, update_measured_time
from paceline.types import StepObservation


def snapshot(rows: list[list[float]], room: int = 1000, other: int = 0) -> BudgetSnapshot:
    return BudgetSnapshot(
        num_requests=len(rows),
        num_other_tokens=other,
        path_probability=np.array(rows, dtype=np.float32),
        max_total_draft_tokens=room,
    )


def timed(time_s: Callable[[int], float], sizes: Iterable[int]) -> StepTimeModel:
    model = StepTimeModel.initial()
    for _ in range(4):
        for tokens in sizes:
            model = update_measured_time(model, tokens, time_s(tokens))
    return model


def state_with(
    settings: BudgetSettings,
    time_s: Callable[[int], float],
    sizes: Iterable[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
) -> BudgetState:
    return replace(BudgetState.initial(settings), decode_time=timed(time_s, sizes))


def lengths(
    rows: list[list[float]], state: BudgetState, settings: BudgetSettings, **more: object
) -> list[int]:
    decision = decide(snapshot(rows, **more), state, settings)  # type: ignore[arg-type]
    assert decision.dtype == np.int32
    return decision.tolist()


MARGINAL = BudgetSettings()
AFFINE = state_with(MARGINAL, lambda n: 0.014 + 0.001 * n)
LEVEL = state_with(MARGINAL, lambda n: 0.020)
COMPUTE_BOUND = state_with(MARGINAL, lambda n: 0.001 * n)


def test_marginal_gives_tokens_where_they_are_likely() -> None:
    rows = [[0.95, 0.9, 0.86, 0.8], [0.05, 0.01, 0.0, 0.0]]
    assert lengths(rows, AFFINE, MARGINAL) == [4, 0]


def test_marginal_takes_everything_when_tokens_are_free() -> None:
    assert lengths([[0.3, 0.1, 0.01], [0.2, 0.0, 0.0]], LEVEL, MARGINAL) == [3, 1]


def test_marginal_takes_nothing_when_tokens_cost_their_share() -> None:
    assert lengths([[0.9, 0.8], [0.9, 0.8]], COMPUTE_BOUND, MARGINAL) == [0, 0]


def test_nothing_can_pay_where_a_token_costs_its_share_even_if_it_is_right() -> None:
    linear = state_with(MARGINAL, lambda n: 0.001 * n)
    cheap = state_with(MARGINAL, lambda n: 0.010 + 0.0001 * n)
    sure, likely = snapshot([[1.0, 1.0, 1.0]] * 4), snapshot([[0.1, 0.01, 0.001]] * 4)
    assert not may_pay(sure, linear, MARGINAL)
    assert may_pay(sure, cheap, MARGINAL)
    assert may_pay(likely, cheap, MARGINAL)
    assert not may_pay(snapshot([[1.0]] * 4, room=0), cheap, MARGINAL)
    assert not may_pay(sure, BudgetState.initial(MARGINAL), MARGINAL), (
        "E1: the step without drafts comes first"
    )
    rested = replace(linear, num_steps=MARGINAL.refresh_steps, last_drafted_step=0)
    assert may_pay(sure, rested, MARGINAL), "E4: they are tried again"


def test_marginal_sees_past_a_dear_token_to_a_cheap_plateau() -> None:
    def stairs(tokens: int) -> float:
        return 0.010 if tokens <= 1 else 0.030

    state = state_with(MARGINAL, stairs, (1, 2, 3, 4, 6, 8))
    assert lengths([[0.95, 0.9]], state, MARGINAL) == [0]
    assert lengths([[0.95, 0.9, 0.85, 0.8]], state, MARGINAL) == [4]


def test_marginal_breaks_ties_by_request_then_position() -> None:
    rows = [[0.8, 0.8, 0.0], [0.8, 0.8, 0.8]]
    assert lengths(rows, LEVEL, MARGINAL, room=3) == [2, 1]


def test_marginal_leaves_gains_below_the_floor() -> None:
    settings = BudgetSettings(min_gain=0.2)
    assert lengths([[0.15]], LEVEL, MARGINAL) == [1]
    assert lengths([[0.15]], LEVEL, settings) == [0]


def test_e1_nothing_is_verified_before_the_baseline_was_measured_twice() -> None:
    state = BudgetState.initial(MARGINAL)
    for _ in range(2):
        assert lengths([[0.99, 0.99]], state, MARGINAL) == [0]
        state = update(state, StepObservation(1, 0, 0, 0, 0.015), MARGINAL)
    assert lengths([[0.99, 0.99]], state, MARGINAL) == [1]


def test_e1_the_baseline_is_measured_again() -> None:
    settings = BudgetSettings(refresh_steps=32)
    state = state_with(settings, lambda n: 0.020)
    rows = [[0.9] * 16]
    chosen = []
    for _ in range(200):
        length = lengths(rows, state, settings)[0]
        chosen.append(length)
        state = update(state, StepObservation(1, length, 0, 0, 0.020), settings)
    assert 5 <= chosen.count(0) <= 8
    assert max(chosen) == 16


def plain_steps(batch: int, num_steps: int, slow_steps: int = 0) -> tuple[list[int], BudgetState]:
    """Steps without drafts, where these pay; the first ones took three times as long."""
    state, plain = BudgetState.initial(MARGINAL), []
    for now in range(num_steps):
        drafted = sum(lengths([[0.9] * 8] * batch, state, MARGINAL))
        if not drafted:
            plain.append(now)
        seconds = (0.030 + 0.001 * (batch + drafted)) * (3.0 if now < slow_steps else 1.0)
        state = update(state, StepObservation(batch, drafted, 0, 0, seconds), MARGINAL)
    return plain, state


@pytest.mark.parametrize("batch", [1, 8, 16, 100])
def test_e1_the_baseline_is_renewed_the_sooner_the_less_was_measured(batch: int) -> None:
    plain, _ = plain_steps(batch, 2000)
    assert plain[:2] == [0, 1]
    assert plain[2] <= 16, "an engine's first steps may be slow"
    assert all(later >= 1.5 * earlier for earlier, later in pairwise(plain[2:]) if later < 256)
    assert len([step for step in plain if step >= 600]) <= 1400 // MARGINAL.refresh_steps + 1


def test_e1_slow_first_steps_are_soon_no_reference_any_more() -> None:
    _, state = plain_steps(8, 64, slow_steps=4)
    assert float(predict_s(state.decode_time, 8)) == pytest.approx(0.038, rel=0.01)


def test_a_drafter_drafts_no_more_than_can_be_verified() -> None:
    state = BudgetState.initial(MARGINAL)
    assert draft_depth(state, MARGINAL, 8, 8) == 0, "E1: one step has been measured then"
    assert draft_depth(state, MARGINAL, 8) == 0, "the first prefill"
    state = update(state, StepObservation(8, 0, 0, 0, 0.020), MARGINAL)
    assert draft_depth(state, MARGINAL, 8, 8) == 1, "E2: 4 tokens"
    assert draft_depth(state, MARGINAL, 8, 200) == 0, "such a step says nothing of 8 tokens"
    assert draft_depth(state, MARGINAL, 8) == MARGINAL.max_draft_tokens, (
        "prefill comes, which may be for long"
    )
    state = update(state, StepObservation(8, 0, 0, 0, 0.020), MARGINAL)
    state = update(state, StepObservation(8, 24, 0, 0, 0.025), MARGINAL)
    assert draft_depth(state, MARGINAL, 8, 8) == 5, "48 tokens at most, 40 of them drafted"
    assert draft_depth(state, MARGINAL, 1, 32) == 0, "nothing near 1 was measured"
    fixed = BudgetSettings(policy="fixed", fixed_tokens=3)
    assert draft_depth(BudgetState.initial(fixed), fixed, 8, 8) == 3


def test_e2_a_step_grows_by_the_factor_at_most() -> None:
    state = BudgetState.initial(MARGINAL)
    rows, sizes = [[0.99] * 16] * 8, []
    for _ in range(10):
        drafted = sum(lengths(rows, state, MARGINAL))
        sizes.append(8 + drafted)
        state = update(state, StepObservation(8, drafted, 0, 0, 0.020), MARGINAL)
    assert sizes[:5] == [8, 8, 12, 18, 27]
    assert all(later <= 1.5 * max(sizes[: i + 1]) for i, later in enumerate(sizes[1:]))
    assert sizes[-1] == 8 + 128


def test_e4_speculation_is_probed_again_after_a_long_rest() -> None:
    settings = BudgetSettings(refresh_steps=32)
    slow = replace(state_with(settings, lambda n: 0.010 * n), climb=None)
    rows, chosen = [[0.9] * 8] * 8, []
    for _ in range(100):
        drafted = sum(lengths(rows, slow, settings))
        chosen.append(drafted)
        slow = update(slow, StepObservation(8, drafted, 0, 0, 0.010 * (8 + drafted)), settings)
    assert 2 <= sum(drafted > 0 for drafted in chosen) <= 4
    assert max(chosen) <= 4


def drafting_at_any_price(
    batch: int, acceptance: Callable[[int], float], drafting: Callable[[int], int], steps: int, **seen: Any
) -> tuple[list[float], BudgetState]:
    """Tokens per second of each step where a step with drafts takes a third longer, however many they are.

    acceptance, drafting: by step; how many requests have drafts. seen: of the first three steps.
    """
    state, speeds = BudgetState.initial(MARGINAL), []
    for step in range(steps):
        own = [acceptance(step) ** place for place in range(1, 9)]
        rows = [own if row < drafting(step) else [0.0] * 8 for row in range(batch)]
        drafts = lengths(rows, state, MARGINAL)
        tokens = batch + sum(sum(row[:count]) for row, count in zip(rows, drafts, strict=True))
        time_s = 0.0035 + (0.0012 if sum(drafts) else 0.0)
        done = StepObservation(batch, sum(drafts), round(tokens) - batch, 0, time_s)
        state = update(state, replace(done, **seen) if step < 3 else done, MARGINAL)
        speeds.append(tokens / time_s)
    return speeds, state


@pytest.mark.parametrize("batch", [8, 64, 128])
@pytest.mark.parametrize("acceptance", [0.5, 0.6])
def test_e5_a_cost_of_any_draft_hides_no_gain(batch: int, acceptance: float) -> None:
    """Half a token each does not pay for a third of a step, and six do."""
    speeds, _ = drafting_at_any_price(batch, lambda step: acceptance, lambda step: batch, 40)
    best = batch * sum(acceptance**place for place in range(9)) / 0.0047
    assert sum(speeds[20:]) / 20 > 0.9 * best > 1.05 * batch / 0.0035


@pytest.mark.parametrize(
    ("acceptance", "drafting", "seen"),
    [
        (lambda step: 0.6, lambda step: 4 if step < 20 else 64, {}),
        (lambda step: 0.6, lambda step: 4 * min(step, 16), {}),
        (lambda step: 0.4 if step < 50 else 0.6, lambda step: 64, {}),
        (lambda step: 0.1 if 50 <= step < 350 else 0.6, lambda step: 64, {}),
        (lambda step: 0.6, lambda step: 64, {"num_prefill_tokens": 512}),
        (lambda step: 0.6, lambda step: 64, {"is_typical": False}),
    ],
    ids=[
        "few drafts at first",
        "more from step to step",
        "better later",
        "a hard passage",
        "prefill",
        "untypical",
    ],
)
def test_e5_whatever_comes_first(
    acceptance: Callable[[int], float], drafting: Callable[[int], int], seen: dict[str, Any]
) -> None:
    """A gain is found again within some 150 steps, whenever it is there."""
    speeds, _ = drafting_at_any_price(64, acceptance, drafting, 520, **seen)
    best = 64 * sum(0.6**place for place in range(9)) / 0.0047
    assert sum(speeds[500:]) / 20 > 0.9 * best


def test_e5_nothing_is_concluded_from_steps_of_untypical_time() -> None:
    state, rows = BudgetState.initial(MARGINAL), [[0.9] * 8] * 64
    for _ in range(2):
        state = update(state, StepObservation(64, 0, 0, 0, 0.0035), MARGINAL)
    for _ in range(5):
        drafted = sum(lengths(rows, state, MARGINAL))
        assert drafted == 32
        state = update(state, StepObservation(64, drafted, 0, 0, 0.004, is_typical=False), MARGINAL)


def test_e5_where_steps_overlap_each_size_is_taken_twice() -> None:
    """A step is decided before the one under way has been measured."""
    state, rows, sizes = BudgetState.initial(MARGINAL), [[0.9] * 8] * 8, []
    under_way = StepObservation(8, 0, 0, 0, 0.0035)
    for _ in range(8):
        drafted = sum(lengths(rows, state, MARGINAL))
        state = update(state, under_way, MARGINAL)
        under_way = StepObservation(8, drafted, 0, 0, 0.0047 if drafted else 0.0035)
        sizes.append(drafted)
    assert sizes == [0, 0, 4, 4, 10, 10, 19, 19]


def test_e5_it_ends_where_tokens_cost_their_share() -> None:
    """What is explored: larger by a factor from step to step, then given up."""
    state, rows, seen = BudgetState.initial(MARGINAL), [[0.9] * 8] * 8, []
    for _ in range(8):
        drafted = sum(lengths(rows, state, MARGINAL))
        state = update(state, StepObservation(8, drafted, 0, 0, 0.010 * (8 + drafted)), MARGINAL)
        seen.append((drafted, state.climb))
    assert seen[:3] == [(0, Climb()), (0, Climb()), (4, Climb(0, 12))]
    assert seen[3:] == [(10, Climb(12, 18)), *[(0, None)] * 4]


def test_steps_with_prefill_have_their_own_model() -> None:
    state = update(AFFINE, StepObservation(2, 0, 0, 500, 9.0), MARGINAL)
    assert state.decode_time is AFFINE.decode_time
    rows = [[0.9, 0.8], [0.9, 0.8]]
    assert lengths(rows, state, MARGINAL, other=500) == [0, 0]
    state = update(state, StepObservation(2, 0, 0, 500, 9.0), MARGINAL)
    assert lengths(rows, state, MARGINAL, other=500) == [2, 2]


def test_empty_steps_teach_nothing() -> None:
    assert update(AFFINE, StepObservation(0, 0, 0, 0, 0.0), MARGINAL) is AFFINE


def test_fixed_length_as_far_as_drafts_and_room_reach() -> None:
    settings = BudgetSettings(policy="fixed", fixed_tokens=2)
    rows = [[0.9, 0.8, 0.7], [0.9, 0.0, 0.0], [0.9, 0.5, 0.4]]
    assert lengths(rows, AFFINE, settings) == [2, 1, 2]
    assert lengths(rows, AFFINE, settings, room=4) == [2, 1, 1]
    assert lengths(rows, AFFINE, settings, room=2) == [1, 1, 0]


def test_thresholds_share_the_batch_limit_and_filter() -> None:
    settings = BudgetSettings(
        policy="thresholds",
        threshold_request_tokens=3,
        threshold_batch_tokens=4,
        threshold_min_probability=0.5,
    )
    row = [0.9, 0.8, 0.7, 0.6]
    assert lengths([row], AFFINE, settings) == [3]
    assert lengths([row, row], AFFINE, settings) == [2, 2]
    assert lengths([row] * 5, AFFINE, settings) == [0] * 5
    assert lengths([[0.9, 0.4, 0.2, 0.1]], AFFINE, settings) == [1]


def test_bandit_verifies_the_likeliest_tokens_within_its_depth() -> None:
    settings = BudgetSettings(
        policy="bandit", bandit_strategies=((3, 1, 2), (0, 1, 0)), bandit_batch_sizes=(1, 8)
    )
    state = BudgetState.initial(settings)
    rows = [[0.9, 0.9, 0.9, 0.9], [0.5, 0.4, 0.3, 0.2]]
    assert lengths(rows, state, settings) == [3, 1]
    assert lengths(rows * 4, state, settings) == [0] * 8


def test_bandit_learns_from_decode_steps_alone() -> None:
    settings = BudgetSettings(policy="bandit")
    state = BudgetState.initial(settings)
    assert update(state, StepObservation(2, 4, 2, 64, 0.1), settings).bandit.trials == state.bandit.trials
    [trial] = update(state, StepObservation(2, 4, 2, 0, 0.1), settings).bandit.trials[0][0]
    assert (trial.reward, trial.verified) == (40.0, 2.0)


def test_the_bandits_reward_has_drafting_time_in_it() -> None:
    settings = BudgetSettings(policy="bandit")
    state = update(BudgetState.initial(settings), StepObservation(2, 4, 2, 0, 0.1, draft_s=0.06), settings)
    [trial] = state.bandit.trials[0][0]
    assert trial.reward == pytest.approx(4 / 0.16)


@pytest.mark.parametrize(
    ("accepted", "draft_s", "threshold"),
    [(12, 0.0, 41), (4, 0.0, 8), (12, 0.1, 8)],
    ids=["pays", "wrong", "dear"],
)
def test_the_bandits_threshold_follows_measured_times(accepted: int, draft_s: float, threshold: int) -> None:
    """Steps of n tokens take 14 + n ms: two drafts for each of 8 requests take 16 ms and bring 1.5 or 0.5 tokens."""
    settings = BudgetSettings(policy="bandit", bandit_elastic_threshold=32, bandit_epsilon=0.0)
    state = state_with(settings, lambda n: 0.014 + 0.001 * n, (1, 2, 4, 8, 16, 24, 32, 40, 64, 96))
    for batch in (8, 20):
        tokens = accepted * batch // 8
        seen = StepObservation(batch, 2 * batch, tokens, 0, 0.014 + 0.003 * batch, draft_s=draft_s)
        state = update(state, seen, settings)
    for batch in (40, 8):
        state = update(state, StepObservation(batch, 0, 0, 0, 0.014 + 0.001 * batch), settings)
    assert state.bandit.elastic_threshold == threshold


def test_a_drafter_is_told_the_depth_of_the_step_to_come() -> None:
    settings = BudgetSettings(
        policy="bandit", bandit_strategies=((12, 1, 9), (3, 1, 2)), bandit_batch_sizes=(1, 5)
    )
    state = BudgetState.initial(settings)
    assert [draft_depth(state, settings, batch) for batch in (4, 5, 32)] == [12, 3, 0]
    assert draft_depth(AFFINE, MARGINAL, 4) == MARGINAL.max_draft_tokens


@pytest.mark.parametrize("policy", ["marginal", "bandit", "thresholds", "fixed", "off"])
def test_no_policy_exceeds_a_limit(policy: str) -> None:
    settings = BudgetSettings(
        policy=policy,  # type: ignore[arg-type]
        max_draft_tokens=3,
        bandit_strategies=((3, 1, 2),),
        bandit_batch_sizes=(1,),
    )
    state = state_with(settings, lambda n: 0.020)
    rows = [[0.9] * 8, [0.9] * 2 + [0.0] * 6, [0.0] * 8]
    for room in (0, 1, 4, 100):
        decision = lengths(rows, state, settings, room=room)
        assert sum(decision) <= room
        assert all(length <= limit for length, limit in zip(decision, (3, 2, 0), strict=True))
    assert (policy == "off") == (sum(decision) == 0)


def test_an_empty_batch_is_an_empty_decision() -> None:
    empty = BudgetSnapshot(0, 0, np.zeros((0, 16), dtype=np.float32), 100)
    for policy in ("marginal", "bandit", "thresholds", "fixed", "off"):
        settings = BudgetSettings(policy=policy)  # type: ignore[arg-type]
        assert decide(empty, BudgetState.initial(settings), settings).shape == (0,)


def test_arrays_must_fit_the_batch() -> None:
    with pytest.raises(EngineError, match="one row per decoding request"):
        decide(replace(snapshot([[0.5]]), num_requests=2), AFFINE, MARGINAL)


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "clever"},
        {"max_draft_tokens": 129},
        {"max_growth": 1.0},
        {"bandit_batch_sizes": (1, 4)},
        {"bandit_batch_sizes": (1, 4, 4, 33)},
        {"bandit_strategies": ((2, 0, 4),), "bandit_batch_sizes": (1,)},
        {"policy": "bandit", "bandit_strategies": ((33, 1, 4),), "bandit_batch_sizes": (1,)},
        {"unknown": 1},
    ],
)
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BudgetSettings.model_validate(bad)


@dataclass
class Engine:
    """A simulated engine: noisy step times, acceptance estimates learned from what was verified."""

    time_s: Callable[[int], float]
    acceptance: tuple[float, ...]  # true acceptance of each kind of request
    settings: BudgetSettings
    overrating: float = 0.0  # added to every calibrated estimate
    seed: int = 0

    def tokens_per_s(self, batch: int, steps: int) -> float:
        """Expected tokens per second of `steps` steps, exploration and learning included."""
        drafts, clock = np.random.default_rng(self.seed), np.random.default_rng(self.seed + 1)
        truth = np.array(self.acceptance)
        table = AcceptanceTable.initial(np.full(len(truth), 0.6))
        state = BudgetState.initial(self.settings)
        tokens = seconds = 0.0
        for _ in range(steps):
            kinds = drafts.integers(0, len(truth), size=batch).astype(np.int32)
            rated = np.minimum(estimate(table)[kinds] + self.overrating, 0.99)
            path = np.cumprod(np.repeat(rated[:, None], 16, axis=1), axis=1, dtype=np.float32)
            offer = BudgetSnapshot(batch, 0, path, 4096)
            verified = decide(offer, state, self.settings)
            hits = np.cumprod(drafts.random((batch, 16)) < truth[kinds, None], axis=1).sum(axis=1)
            accepted = np.minimum(hits, verified)
            told = np.minimum(verified, accepted + 1)
            table = update_acceptance(table, kinds, accepted, told)
            used, gained = int(verified.sum()), int(accepted.sum())
            true_s = self.time_s(batch + used)
            pause = 4.0 if clock.random() < 0.01 else 1.0
            measured_s = true_s * float(clock.lognormal(0.0, 0.05)) * pause
            step = StepObservation(batch, used, gained, 0, measured_s)
            state = update(state, step, self.settings, expected_accepted(offer, verified))
            tokens, seconds = tokens + batch + gained, seconds + true_s
        return tokens / seconds


TIMES: dict[str, Callable[[int], float]] = {
    "small model on a core": lambda n: 0.014 + 0.00097 * n,
    "memory-bound, then compute-bound": lambda n: 0.020 + 0.00008 * max(0, n - 256),
    "compute-bound": lambda n: 0.001 + 0.001 * n,
}


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("acceptance", [(0.0,), (0.3, 0.9), (0.6, 0.8)])
def test_never_slower_than_plain_decoding_by_three_per_cent(
    batch: int, time: str, acceptance: tuple[float, ...]
) -> None:
    speed = Engine(TIMES[time], acceptance, MARGINAL).tokens_per_s(batch, steps=300)
    plain = batch / TIMES[time](batch)
    assert speed >= 0.97 * plain


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.6), (8, 1.2), (32, 1.02)])
def test_faster_than_plain_decoding_where_drafts_are_good(batch: int, gain: float) -> None:
    time_s = TIMES["small model on a core"]
    assert Engine(time_s, (0.3, 0.9), MARGINAL).tokens_per_s(batch, steps=300) >= gain * batch / time_s(batch)


@pytest.mark.parametrize("batch", [1, 16, 64, 128])
@pytest.mark.parametrize("time", TIMES)
def test_overrated_drafts_do_not_slow_it_down(batch: int, time: str) -> None:
    speed = Engine(TIMES[time], (0.3, 0.9), MARGINAL, overrating=0.1).tokens_per_s(batch, steps=300)
    assert speed >= 0.97 * batch / TIMES[time](batch)


def test_confidence_falls_with_broken_promises_and_comes_back() -> None:
    state = AFFINE
    assert state.confidence == 1.0
    for _ in range(20):
        state = update(state, StepObservation(4, 20, 5, 0, 0.03), MARGINAL, expected_tokens=15.0)
    assert state.confidence < 0.5
    rows = [[0.6, 0.3]] * 16
    assert sum(lengths(rows, AFFINE, MARGINAL)) > sum(lengths(rows, state, MARGINAL))
    for _ in range(500):
        state = update(state, StepObservation(4, 0, 0, 0, 0.02), MARGINAL, expected_tokens=0.0)
    assert state.confidence > 0.9
    kept = [update(AFFINE, StepObservation(4, 9, accepted, 0, 0.03), MARGINAL) for accepted in (0, 9)]
    assert [state.confidence for state in kept] == [1.0, 1.0]


def test_expected_accepted_sums_what_is_verified() -> None:
    offer = snapshot([[0.5, 0.25], [0.75, 0.5]])
    assert expected_accepted(offer, np.array([2, 1], dtype=np.int32)) == pytest.approx(1.5)

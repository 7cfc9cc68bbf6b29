"""TLT's bucketed epsilon-greedy bandit (BEG-MAB; TLT 5.2, algorithm 1), with the paper's notation.

    Initialize(S, T, epsilon, w)
        strategies S are grouped by Tokens_to_Verify into S_1..S_m, descending;
        batch sizes fall into buckets B_i = [t_i, t_(i+1) - 1], B_m = [t_m, inf); B_i -> S_i
    Record(elapsed_time, accept_lens, batch_size)
        a = sum(accept_lens) / batch_size + 1;  r_s = a x batch_size / elapsed_time;
        append r_s to R_s, a deque of length w
    SelectStrategy(batch_size)
        V = the S_i of the batch's bucket; its only member, or with probability epsilon a uniformly random
        one, else argmax over V of Median(R_s)

Differs: (1) requests draft one path each, so a strategy is (Draft_Depth, Tokens_to_Verify) without topK, and
Tokens_to_Verify is the mean per request: the likeliest Tokens_to_Verify x batch draft tokens of the step are
verified. (2) The paper leaves the median of an empty deque open; here it is infinite, so each strategy is
tried once, in order. (3) u comes from a counter in the state, so that selection is a pure function of (state,
batch size); recording works out for itself which strategy was played. Ties go to the strategy named first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeVar

from paceline.errors import ConfigError

_MASK = (1 << 64) - 1

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One arm."""

    draft_depth: int
    """Longest draft per request, tokens."""
    tokens_to_verify: int
    """Draft tokens verified per request, mean over the batch."""


@dataclass(frozen=True, slots=True)
class BanditState:
    """Groups, thresholds and the rewards seen. Make one with `initialize`."""

    groups: tuple[tuple[Strategy, ...], ...]  # S_1..S_m
    thresholds: tuple[int, ...]  # t_1..t_m, ascending; smaller batches fall into the first bucket
    epsilon: float
    window: int
    seed: int
    step: int
    rewards: tuple[
        tuple[tuple[float, ...], ...], ...
    ]  # R_s, oldest first, per group and strategy; tokens per second
    medians: tuple[tuple[float, ...], ...]  # Median(R_s), inf while R_s is empty


def initialize(
    strategies: tuple[Strategy, ...], thresholds: tuple[int, ...], epsilon: float, window: int, seed: int
) -> BanditState:
    """Lines 1-6. Raises ConfigError unless there is one threshold per distinct tokens_to_verify,
    ascending."""
    levels = sorted({strategy.tokens_to_verify for strategy in strategies}, reverse=True)
    groups = tuple(tuple(s for s in strategies if s.tokens_to_verify == level) for level in levels)
    if len(groups) != len(thresholds) or list(thresholds) != sorted(set(thresholds)):
        raise ConfigError(
            f"bandit thresholds {list(thresholds)} do not fit the {len(groups)} distinct values of tokens "
            f"to verify {levels}: name one ascending batch size for each"
        )
    return BanditState(
        groups=groups,
        thresholds=thresholds,
        epsilon=epsilon,
        window=window,
        seed=seed,
        step=0,
        rewards=tuple(tuple(() for _ in group) for group in groups),
        medians=tuple(tuple(math.inf for _ in group) for group in groups),
    )


def select_strategy(state: BanditState, batch_size: int) -> Strategy:
    """Lines 11-19: the strategy for a step over `batch_size` requests."""
    bucket, arm = _select(state, batch_size)
    return state.groups[bucket][arm]


def record(state: BanditState, batch_size: int, num_accepted: int, elapsed_s: float) -> BanditState:
    """Lines 7-10 for the strategy that `select_strategy(state, batch_size)` chose.

    num_accepted: accepted draft tokens of the step, bonus tokens not counted (sum of accept_lens).
    elapsed_s: of the step and of making its drafts.
    """
    bucket, arm = _select(state, batch_size)
    accept_length = num_accepted / batch_size + 1.0
    reward = accept_length * batch_size / elapsed_s
    window = (*state.rewards[bucket][arm], reward)[-state.window :]
    arms = _replaced(state.rewards[bucket], arm, window)
    medians = _replaced(state.medians[bucket], arm, _median(window))
    return BanditState(
        groups=state.groups,
        thresholds=state.thresholds,
        epsilon=state.epsilon,
        window=state.window,
        seed=state.seed,
        step=state.step + 1,
        rewards=_replaced(state.rewards, bucket, arms),
        medians=_replaced(state.medians, bucket, medians),
    )


def _select(state: BanditState, batch_size: int) -> tuple[int, int]:
    bucket = max(bisect_right(state.thresholds, batch_size) - 1, 0)
    size = len(state.groups[bucket])
    if size == 1:
        return bucket, 0
    if _uniform(state.seed, 2 * state.step) < state.epsilon:
        return bucket, int(_uniform(state.seed, 2 * state.step + 1) * size)
    medians = state.medians[bucket]
    return bucket, medians.index(max(medians))


def _uniform(seed: int, counter: int) -> float:
    """Uniform in [0, 1) from (seed, counter): the SplitMix64 output function (Steele, Lea, Flood 2014)."""
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return ((z ^ z >> 31) >> 11) * 2.0**-53


def _median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def _replaced(items: tuple[_Item, ...], index: int, item: _Item) -> tuple[_Item, ...]:
    return (*items[:index], item, *items[index + 1 :])

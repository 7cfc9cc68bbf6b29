"""TLT's bucketed epsilon-greedy bandit (BEG-MAB; TLT 5.2, algorithm 1), with the paper's notation.

    Initialize(S, T, epsilon, w)
        strategies S are grouped by Tokens_to_Verify into S_1..S_m, descending;
        batch sizes fall into buckets B_i = [t_i, t_(i+1) - 1], B_m = [t_m, inf); B_i -> S_i
    Record(elapsed_time, accept_lens, batch_size)
        a = sum(accept_lens) / batch_size + 1;  r_s = a x batch_size / elapsed_time;
        append r_s to R_s and a to A_s, deques of length w
    SelectStrategy(batch_size)
        V = the S_i of the batch's bucket; its only member, or with probability epsilon a uniformly random
        one, else argmax over V of Median(R_s)

and the elastic threshold of 5.1: drafts are made only while fewer requests run than that.

Differs:
* Tokens_to_Verify is the mean per request: the likeliest Tokens_to_Verify x batch draft tokens of the step are
  verified. topK is the number of draft paths of a request (TLT: of choices at each node of a tree); the tuner of the
  paper holds it fixed.
* The median of an empty deque, which the paper leaves open, is infinite: each strategy is tried, in order.
* A step's strategy is chosen one step before, because a model drafter drafts for a step at the end of the one before,
  and only as deep as the strategy says. Where the batch falls into another bucket meanwhile, the new bucket's strategy
  verifies what the old one's depth has drafted.
* The threshold is measured (`move_threshold`), where the paper sets 32. The step that explores drafts above it too, as
  nothing would be learned there otherwise, but not above the one that was set.
* u comes from a counter in the state, so that selection is a pure function of (state, batch size); recording works out
  for itself which strategy was played.

Ties go to the strategy named first.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from paceline.errors import ConfigError

_MASK = (1 << 64) - 1

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One arm."""

    draft_depth: int
    """Longest draft per request, tokens."""
    top_k: int
    """Most draft paths per request."""
    tokens_to_verify: int
    """Draft tokens verified per request, mean over the batch."""


NO_DRAFTS = Strategy(0, 1, 0)
"""What is played at and above the elastic threshold."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a strategy in one step."""

    reward: float
    """r_s, tokens per second."""
    accept_length: float
    """a: tokens per request."""
    verified: float
    """Draft tokens per request, which may be fewer than the strategy asks for."""
    draft_s: float
    """Time of making the drafts, per request."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategies of a step, whatever its batch size will be."""

    arms: tuple[int, ...]
    """Index of the strategy in each group."""
    explores: bool


@dataclass(frozen=True, slots=True)
class BanditState:
    """Groups, thresholds and what was seen. Make one with `initialize`."""

    groups: tuple[tuple[Strategy, ...], ...]  # S_1..S_m
    thresholds: tuple[int, ...]  # t_1..t_m, ascending; smaller batches fall into the first bucket
    epsilon: float
    window: int
    seed: int
    first_threshold: int
    """The elastic threshold as it was set."""
    elastic_threshold: int
    """Batch size from which on there are no drafts."""
    step: int
    now: Choice
    """Of the coming step."""
    ahead: Choice
    """Of the one after it."""
    trials: tuple[tuple[tuple[Trial, ...], ...], ...]  # oldest first, per group and strategy
    medians: tuple[tuple[float, ...], ...]  # Median(R_s), inf while R_s is empty


def initialize(
    strategies: tuple[Strategy, ...],
    thresholds: tuple[int, ...],
    epsilon: float,
    window: int,
    seed: int,
    elastic_threshold: int = sys.maxsize,
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
    medians = tuple(tuple(math.inf for _ in group) for group in groups)
    return BanditState(
        groups=groups,
        thresholds=thresholds,
        epsilon=epsilon,
        window=window,
        seed=seed,
        first_threshold=elastic_threshold,
        elastic_threshold=elastic_threshold,
        step=0,
        now=_choose(seed, 0, epsilon, medians),
        ahead=_choose(seed, 1, epsilon, medians),
        trials=tuple(tuple(() for _ in group) for group in groups),
        medians=medians,
    )


def select_strategy(state: BanditState, batch_size: int) -> Strategy:
    """Lines 11-19: the strategy for the coming step over `batch_size` requests."""
    return _strategy(state, state.now, batch_size)


def select_ahead(state: BanditState, batch_size: int) -> Strategy:
    """The strategy for the step after the coming one, should it be over `batch_size` requests."""
    return _strategy(state, state.ahead, batch_size)


def record(
    state: BanditState,
    batch_size: int,
    num_accepted: int,
    elapsed_s: float,
    num_verified: int = 0,
    draft_s: float = 0.0,
) -> BanditState:
    """Lines 7-10 for the strategy that `select_strategy(state, batch_size)` chose.

    num_accepted: accepted draft tokens of the step, bonus tokens not counted (sum of accept_lens). num_verified: its
    draft tokens. elapsed_s: of the step and of making its drafts, which is `draft_s` of it.
    """
    if not _drafts(state, state.now, batch_size):
        return skip(state)
    bucket = _bucket(state, batch_size)
    arm = state.now.arms[bucket]
    accept_length = num_accepted / batch_size + 1.0
    reward = accept_length * batch_size / elapsed_s
    trial = Trial(reward, accept_length, num_verified / batch_size, draft_s / batch_size)
    window = (*state.trials[bucket][arm], trial)[-state.window :]
    middle = median(trial.reward for trial in window)
    return skip(
        replace(
            state,
            trials=_replaced(state.trials, bucket, _replaced(state.trials[bucket], arm, window)),
            medians=_replaced(state.medians, bucket, _replaced(state.medians[bucket], arm, middle)),
        )
    )


def skip(state: BanditState) -> BanditState:
    """Go on to the next step; from this one nothing is learned."""
    step = state.step + 1
    ahead = _choose(state.seed, step + 1, state.epsilon, state.medians)
    return replace(state, step=step, now=state.ahead, ahead=ahead)


def typical_trial(state: BanditState, batch_size: int) -> Trial | None:
    """Medians of the best strategy that was tried in the batch's bucket; None before there was one."""
    bucket = _bucket(state, batch_size)
    tried = [(m, -arm) for arm, m in enumerate(state.medians[bucket]) if m < math.inf]
    if not tried:
        return None
    seen = state.trials[bucket][-max(tried)[1]]
    return Trial(
        median(trial.reward for trial in seen),
        median(trial.accept_length for trial in seen),
        median(trial.verified for trial in seen),
        median(trial.draft_s for trial in seen),
    )


def move_threshold(state: BanditState, batch_size: int, pays: bool) -> BanditState:
    """The elastic threshold, now that drafts are known to pay, or not to, at this batch size."""
    threshold = state.elastic_threshold
    threshold = max(threshold, batch_size + 1) if pays else min(threshold, batch_size)
    return state if threshold == state.elastic_threshold else replace(state, elastic_threshold=threshold)


def _choose(seed: int, step: int, epsilon: float, medians: tuple[tuple[float, ...], ...]) -> Choice:
    explores = _uniform(seed, 2 * step) < epsilon
    if explores:
        u = _uniform(seed, 2 * step + 1)
        return Choice(tuple(int(u * len(group)) for group in medians), True)
    return Choice(tuple(group.index(max(group)) for group in medians), False)


def _strategy(state: BanditState, choice: Choice, batch_size: int) -> Strategy:
    if not _drafts(state, choice, batch_size):
        return NO_DRAFTS
    bucket = _bucket(state, batch_size)
    return state.groups[bucket][choice.arms[bucket]]


def _drafts(state: BanditState, choice: Choice, batch_size: int) -> bool:
    threshold = state.elastic_threshold
    return batch_size < (max(threshold, state.first_threshold) if choice.explores else threshold)


def _bucket(state: BanditState, batch_size: int) -> int:
    return max(bisect_right(state.thresholds, batch_size) - 1, 0)


def _uniform(seed: int, counter: int) -> float:
    """Uniform in [0, 1) from (seed, counter): the SplitMix64 output function (Steele, Lea, Flood 2014)."""
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return ((z ^ z >> 31) >> 11) * 2.0**-53


def _replaced(items: tuple[_Item, ...], index: int, item: _Item) -> tuple[_Item, ...]:
    return (*items[:index], item, *items[index + 1 :])

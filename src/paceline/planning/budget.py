"""The draft budget: which of the proposed draft tokens does this engine step verify?

One interface over five policies: `decide(snapshot, state, settings) -> lengths`, `update(state, observation,
settings) -> state`, once per engine step each, called by the engine's scheduler and by the simulator. `may_pay` says
beforehand whether drafts can be taken at all.
Invariants: a decision is a draft length per request, so with a token everything before it in its draft is
verified too; it never exceeds the draft, `settings.max_draft_tokens` or `snapshot.max_total_draft_tokens`;
nothing here changes which tokens are sampled.

`marginal` (goes beyond Seer 4.4, TurboSpec and TLT 5.2). A set S of draft tokens in a step of B requests
yields B + sum of P_i tokens, P_i the path probability, in T(B + |S|) seconds. P falls along every draft, so
the best set of n tokens is the n likeliest, whatever T is, and is closed under prefixes. T need not be convex
(tiles, kernels), so the ratio is computed for every n and its maximum taken: O(N log N) for N proposed
tokens, vectorised.

A rollout ends with its last response, so `BudgetSettings.fair` weighs the tokens of request i with 1 / R_i, R_i its
tokens per step in this engine so far (since its chunk began): proportional fairness (Kelly 1997; the gradient rule of
Kushner and Whiting 2004). Over long chunks, where acceptance stays as it is, that settles at the set with the greatest
sum of log(tokens_i / T), `fair_lengths`; in short ones the weights hardly move. The batch as a whole never expects less
than without drafts. Further paths (`paths.py`) and a model drafter's worth are judged by the plain sum.

T is learned from the very steps the policy chooses, so it explores, at a bounded cost:
    E1 baseline   while no step of about B tokens (B/2 .. 3B/2) was measured twice, nothing is verified, and
                  again when the last is `refresh_steps` ago: the reference "no drafts" is always measured. It is
                  renewed sooner, too, when it is older than half of all that was measured, but for a climb (E5): an
                  engine's first steps may be slow
    E2 trust      a step exceeds the largest measured one at most `max_growth` times: T is learned outwards
    E3 optimism   beyond what was measured T rises slowly (UNKNOWN_SLOPE): larger steps are tried
    E4 probe      after `refresh_steps` steps without drafts, one step forgets what is known above B tokens
                  (E3 from there, up to `max_growth` x B tokens): a T once measured too high is corrected
    E5 outwards   the first drafts, and the first after STALE_STEPS steps without, go on in larger steps while more
                  would pay, `max_growth` times as far each: by E3 from the first of them, with half the slope, and by
                  the slope between the last two afterwards. Where every step with drafts costs something extra, however
                  few they are (the host, a kernel), one short step alone says that none pays
E1 and E4 cost at most about one step's difference in `refresh_steps` steps, 0.2 % at the defaults; E2 and E3 a few
steps per doubling of the step size, once. Where tokens cost their share E5 costs a step of `max_growth`^2 x B tokens in
STALE_STEPS steps, two where steps overlap, and noise may take it a step further.

The probabilities are a drafter's estimates: if fewer tokens are accepted than promised, all are scaled down
(`BudgetState.confidence`), which matters at large batch, where a draft has little to gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config import BudgetSettings
from paceline.errors import EngineError
from paceline.planning import bandit
from paceline.planning.latency import (
    KNOTS,
    STALE_STEPS,
    UNKNOWN_SLOPE,
    StepTimeModel,
    after_model,
    at_context,
    largest_known_tokens,
    nearest_knot,
    observations_between,
    predict_s,
    update_step_time,
)
from paceline.types import Float32Array, Float64Array, Int32Array, StepObservation

_BASELINE_OBSERVATIONS = 2
_FIRST_PATIENCE = 4  # E1, steps
_FAIR_STEPS = 32.0
_TRUSTED_TOKENS = 32.0  # promised tokens that are believed before any evidence counts
_FURTHER_SLOPE = UNKNOWN_SLOPE / 2  # what any draft costs has been measured, so the rest rises less
_CONFIDENCE_DECAY = 0.99  # per step, drafts or not, so that lost confidence comes back and is tried again


class Climb(NamedTuple):
    """E5: steps with drafts, each larger than the one before. Sizes differ if their knots of the step-time model do."""

    before: int = 0
    """Tokens of the step before the last, 0: there was none."""
    last: int = 0
    """Tokens of the last step, 0: the next drafts begin it."""
    is_repeated: bool = False
    """Whether the last size was taken twice."""


FIRST_CLIMB = Climb()


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """One engine step, as the budget sees it."""

    num_requests: int
    """Decoding requests (batch size)."""
    num_other_tokens: int
    """Prefill tokens in the same step."""
    path_probability: (
        Float32Array  # [num_requests, max_draft_tokens] non-increasing along a row, 0 beyond the draft
    )
    max_total_draft_tokens: int
    """Draft tokens the step has room for (the engine's token budget)."""
    weight: Float64Array | None = (
        None  # [num_requests] `marginal`: what its tokens count (`fair_weights`), None: 1
    )


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What the policies have learned; each uses its own part."""

    decode_time: StepTimeModel
    """T(n) of steps that only decode."""
    prefill_time: StepTimeModel
    """T(n) of steps that also contain prefill tokens, over all tokens of the step."""
    bandit: bandit.BanditState
    num_steps: int
    last_drafted_step: int
    """Value of num_steps after the last step with draft tokens that T(n) was learned from, 0 = none."""
    expected_tokens: float
    """Accepted tokens that the path probabilities promised, decayed."""
    accepted_tokens: float
    """Accepted tokens that came of them, decayed."""
    climb: Climb | None = FIRST_CLIMB
    """E5; None: steps are as large as pays by what is known."""

    @property
    def confidence(self) -> float:
        """What promised tokens are worth, at most 1: guards `marginal` against overrated drafts."""
        ratio = (self.accepted_tokens + _TRUSTED_TOKENS) / (self.expected_tokens + _TRUSTED_TOKENS)
        return min(ratio, 1.0)

    def at_context(self, num_context_tokens: int, has_model_drafts: bool = False) -> BudgetState:
        """The state for a decision over requests of so many tokens in all (`latency.at_context`); not to be updated.

        has_model_drafts: a model has drafted for the step.
        """
        times = [at_context(model, num_context_tokens) for model in (self.decode_time, self.prefill_time)]
        decode_time, prefill_time = map(after_model, times) if has_model_drafts else times
        return replace(self, decode_time=decode_time, prefill_time=prefill_time)

    @classmethod
    def initial(cls, settings: BudgetSettings) -> BudgetState:
        """The state of a new engine."""
        return cls(
            decode_time=StepTimeModel.initial(),
            prefill_time=StepTimeModel.initial(),
            bandit=bandit.initialize(
                strategies=tuple(bandit.Strategy(*pair) for pair in settings.bandit_strategies),
                thresholds=settings.bandit_batch_sizes,
                epsilon=settings.bandit_epsilon,
                window=settings.bandit_window,
                seed=settings.bandit_seed,
                elastic_threshold=settings.bandit_elastic_threshold,
            ),
            num_steps=0,
            last_drafted_step=0,
            expected_tokens=0.0,
            accepted_tokens=0.0,
        )


def decide(snapshot: BudgetSnapshot, state: BudgetState, settings: BudgetSettings) -> Int32Array:
    """Draft tokens to verify of each request, [num_requests] int32.

    Among equally likely tokens the earlier request goes first, then the earlier position; among equally good
    numbers of tokens the smallest wins. Raises EngineError if the arrays do not fit the batch.
    """
    _check(snapshot)
    probability = snapshot.path_probability[:, : settings.max_draft_tokens]
    room = min(snapshot.max_total_draft_tokens, probability.size)
    if room <= 0 or settings.policy == "off" or not probability.any():
        return np.zeros(snapshot.num_requests, dtype=np.int32)
    if settings.policy == "marginal":
        seconds = _allowed_s(snapshot, probability.size, state, settings)
        return best_lengths(probability * state.confidence, seconds, settings.min_gain, snapshot.weight)
    if settings.policy == "bandit":
        return _decide_bandit(snapshot, probability, room, state)
    if settings.policy == "thresholds":
        return _decide_thresholds(snapshot, probability, room, settings)
    return _even_lengths((probability > 0).sum(axis=1), settings.fixed_tokens, room)


def may_pay(ceiling: BudgetSnapshot, state: BudgetState, settings: BudgetSettings) -> bool:
    """Whether `decide` could take anything, before drafts are made: an upper bound, so False is certain.

    ceiling: the step, with path probabilities that no token of its drafts exceeds. Raises EngineError as `decide` does.
    """
    if settings.policy != "marginal":
        return bool(decide(ceiling, state, settings).any())
    _check(ceiling)
    value = ceiling.path_probability[:, : settings.max_draft_tokens] * state.confidence
    seconds = _allowed_s(ceiling, value.size, state, settings)
    sure = float(ceiling.num_requests)
    if ceiling.weight is not None:  # where the weighted drafts do not pay, no others are taken
        value, sure = value * ceiling.weight[:, None], float(ceiling.weight.sum())
    values = _best_first(value, seconds)
    values = values[values > 0]
    return bool(len(values)) and _best_count(sure, values, seconds[: len(values) + 1], settings.min_gain) > 0


def draft_depth(
    state: BudgetState, settings: BudgetSettings, num_requests: int, num_coming_tokens: int | None = None
) -> int:
    """Longest draft of a drafter whose drafts are for the step after the coming one, if it has so many requests.

    num_coming_tokens: of the coming step, if it is known to do nothing but decode. `marginal` verifies nothing, or
    little, where T is not known (E1, E2): levels that could not be verified are not drafted.
    """
    if settings.policy == "bandit":
        return bandit.select_ahead(state.bandit, num_requests).draft_depth
    if settings.policy == "fixed":
        return min(settings.fixed_tokens, settings.max_draft_tokens)
    if settings.policy != "marginal":
        return settings.max_draft_tokens
    if num_coming_tokens is None:
        times = state.decode_time, state.prefill_time
        return settings.max_draft_tokens if any(model.num_observations for model in times) else 0
    room = _room_after(num_coming_tokens, num_requests, state, settings)
    return min(-(-room // num_requests), settings.max_draft_tokens)


def fair_weights(num_tokens: NDArray[np.number], num_steps: NDArray[np.integer]) -> Float64Array:
    """What a token of each request counts [num_requests]: tokens per step of all over its own, both so far.

    num_tokens, num_steps: [num_requests] generated, and the steps that took. Few steps say little: every request begins
    with `_FAIR_STEPS` at the rate of all.
    """
    rate = max(float(num_tokens.sum()), 1.0) / max(float(num_steps.sum()), 1.0)
    own = (num_tokens + _FAIR_STEPS * rate) / (num_steps + _FAIR_STEPS)
    return np.asarray(rate / own, dtype=np.float64)


def best_lengths(
    path_probability: NDArray[np.floating],
    seconds: Float64Array,
    min_gain: float = 0.0,
    weight: Float64Array | None = None,
) -> Int32Array:
    """`marginal` where step times are known: the draft lengths [num_requests] with the best expected rate.

    path_probability: [num_requests, max_draft_tokens], non-increasing along a row. seconds: [num_tokens + 1] time of
    the step that verifies the 0, 1, .. best draft tokens. weight: [num_requests] what its tokens count, None: 1;
    drafts that would make the batch as a whole slower than none are not taken for its sake.
    """
    if weight is None:
        return _best_weighted(path_probability, float(len(path_probability)), seconds, min_gain)
    lengths = _best_weighted(path_probability * weight[:, None], float(weight.sum()), seconds, min_gain)
    taken = np.arange(path_probability.shape[1]) < lengths[:, None]
    tokens = len(lengths) + float(path_probability.sum(where=taken, dtype=np.float64))
    plain = len(lengths) * seconds[int(lengths.sum())] / seconds[0]
    if not taken.any() or tokens >= plain * (1.0 + min_gain):
        return lengths
    return best_lengths(path_probability, seconds, min_gain)


def _best_weighted(
    value: NDArray[np.floating], sure: float, seconds: Float64Array, min_gain: float
) -> Int32Array:
    """Lengths with the most value per second. value: of each token. sure: what the step is worth without drafts."""
    values = _best_first(value, seconds)
    if not len(values):
        return np.zeros(len(value), dtype=np.int32)
    return _take_best(value, values, _best_count(sure, values, seconds[: len(values) + 1], min_gain))


def fair_lengths(
    path_probability: NDArray[np.floating], seconds: Float64Array, min_gain: float = 0.0
) -> Int32Array:
    """Where `best_lengths` with `fair_weights` settles if acceptance stays: the greatest sum of log rates.

    Arguments as there. In place of weights every token counts the growth of log(expected tokens) that it brings to its
    request.
    """
    value = fair_gains(path_probability)
    values = _best_first(value, seconds)
    if not len(values):
        return np.zeros(len(value), dtype=np.int32)
    log_rate = np.cumsum(values) / len(value) - np.log(seconds[1 : len(values) + 1])
    best = int(log_rate.argmax())
    pays = log_rate[best] > np.log1p(min_gain) - np.log(seconds[0]) and values[best] > 0
    return _take_best(value, values, best + 1 if pays else 0)


def fair_gains(path_probability: NDArray[np.floating]) -> Float64Array:
    """What each draft token adds to log(1 + expected accepted tokens) of its request. Same shape, falls along a row."""
    path = np.asarray(path_probability, dtype=np.float64)
    return np.asarray(np.log1p(path / (1.0 + np.cumsum(path, axis=1) - path)))


def expected_accepted(snapshot: BudgetSnapshot, lengths: Int32Array) -> float:
    """Accepted tokens that the path probabilities promise if `lengths` [num_requests] are verified."""
    taken = np.arange(snapshot.path_probability.shape[1]) < lengths[:, None]
    return float(snapshot.path_probability.sum(where=taken, dtype=np.float64))


def update(
    state: BudgetState,
    observation: StepObservation,
    settings: BudgetSettings,
    expected_tokens: float | None = None,
) -> BudgetState:
    """The state after one measured step; to be called once per decision, in order. Empty steps are ignored.

    expected_tokens: `expected_accepted` of the decision; None leaves the confidence in the estimates alone.

    Steps with prefill tokens teach only the prefill model, so they disturb neither T(n) nor the bandit's
    rewards; steps of untypical time teach neither.
    """
    if observation.num_tokens == 0:
        return state
    decode_time, prefill_time, arms = state.decode_time, state.prefill_time, state.bandit
    now, last, climb = state.num_steps + 1, state.last_drafted_step, state.climb
    if observation.num_prefill_tokens > 0 or not observation.is_typical:
        if observation.is_typical:
            prefill_time = update_step_time(prefill_time, observation)
        if settings.policy == "bandit":
            arms = bandit.skip(arms)
    else:
        decode_time = update_step_time(decode_time, observation)
        climb = _next_climb(state, observation)
        last = now if observation.num_draft_tokens else last
        if settings.policy == "bandit":
            elapsed_s = observation.step_s + observation.draft_s
            arms = bandit.record(
                arms,
                observation.num_requests,
                observation.num_accepted_tokens,
                elapsed_s,
                observation.num_draft_tokens,
                observation.draft_s,
            )
            arms = _judge_drafts(arms, observation, decode_time, settings)
    expected, accepted = state.expected_tokens * _CONFIDENCE_DECAY, state.accepted_tokens * _CONFIDENCE_DECAY
    if expected_tokens is not None:
        expected, accepted = expected + expected_tokens, accepted + observation.num_accepted_tokens
    return BudgetState(decode_time, prefill_time, arms, now, last, expected, accepted, climb)


def _allowed_s(
    snapshot: BudgetSnapshot, num_proposed: int, state: BudgetState, settings: BudgetSettings
) -> Float64Array:
    """`marginal`: time of the step with 0, 1, .. of the proposed tokens, as many as E1 to E5 and the room allow."""
    base = snapshot.num_requests + snapshot.num_other_tokens
    model = state.prefill_time if snapshot.num_other_tokens else state.decode_time
    held, age = observations_between(model, 0.5 * base, 1.5 * base)
    climb = None if snapshot.num_other_tokens else state.climb
    room = min(snapshot.max_total_draft_tokens, num_proposed)
    if room <= 0 or not _is_reference(held, age, model, climb, settings):
        return predict_s(model, [base])
    probe = (
        snapshot.num_other_tokens == 0 and state.num_steps - state.last_drafted_step >= settings.refresh_steps
    )
    if probe:
        from_tokens, slope = base, UNKNOWN_SLOPE * float(predict_s(model, base)) / base
    elif climb is not None and climb.last > base:
        from_tokens, slope = climb.last, _climbing_slope(model, climb)
    else:
        from_tokens, slope = 0, 0.0
    known = from_tokens or max(base, largest_known_tokens(model))
    room = min(room, max(int(known * settings.max_growth) - base, 1))
    tokens = np.arange(base, base + room + 1)
    if not from_tokens:
        return predict_s(model, tokens)
    measured_s = predict_s(model, np.minimum(tokens, from_tokens))
    return np.asarray(measured_s + slope * np.maximum(tokens - from_tokens, 0))


def _is_known(model: StepTimeModel, base: int) -> bool:
    """Whether T near `base` tokens was measured often enough."""
    return observations_between(model, 0.5 * base, 1.5 * base)[0] >= _BASELINE_OBSERVATIONS


def _is_reference(
    num_observations: int, age: int, model: StepTimeModel, climb: Climb | None, settings: BudgetSettings
) -> bool:
    """E1: whether so many observations near B, the last of them `age` steps ago, may serve as the reference."""
    patience = settings.refresh_steps
    if climb is None or not climb.last:  # a step without drafts would end a climb
        patience = min(patience, max(model.num_observations // 2, _FIRST_PATIENCE))
    return num_observations >= _BASELINE_OBSERVATIONS and age < patience


def _room_after(num_coming_tokens: int, base: int, state: BudgetState, settings: BudgetSettings) -> int:
    """Draft tokens that E1 and E2 will let a step of `base` requests verify after one of so many tokens."""
    model = state.decode_time
    held, age = observations_between(model, 0.5 * base, 1.5 * base)
    if 0.5 * base <= KNOTS[nearest_knot(num_coming_tokens)] <= 1.5 * base:
        held, age = held + 1, -1
    if not _is_reference(held, age + 1, model, state.climb, settings):
        return 0
    known = max(base, num_coming_tokens, largest_known_tokens(model))
    return max(int(known * settings.max_growth) - base, 1)


def _climbing_slope(model: StepTimeModel, climb: Climb) -> float:
    """E5: seconds per token that are expected beyond the last step."""
    last_s = float(predict_s(model, climb.last))
    if not climb.before:
        return _FURTHER_SLOPE * last_s / climb.last
    return max(last_s - float(predict_s(model, climb.before)), 0.0) / (climb.last - climb.before)


def _next_climb(state: BudgetState, observation: StepObservation) -> Climb | None:
    """E5 after a step that T(n) was learned from. It ends with a step without drafts, with a smaller one, and with the
    third of a size: where steps overlap, two are decided alike.
    """
    climb = state.climb
    if not observation.num_draft_tokens:
        has_rested = state.num_steps + 1 - state.last_drafted_step >= STALE_STEPS
        return FIRST_CLIMB if has_rested or (climb is not None and not climb.last) else None
    if climb is None:
        return None
    size = nearest_knot(observation.num_tokens)
    if size > nearest_knot(climb.last or observation.num_requests):
        return Climb(climb.last, observation.num_tokens)
    if not climb.last:
        return climb
    is_smaller = size < nearest_knot(climb.last)
    return None if is_smaller or climb.is_repeated else climb._replace(is_repeated=True)


def _best_count(
    sure_tokens: float, values: NDArray[np.floating], seconds: Float64Array, min_gain: float
) -> int:
    """The number of draft tokens with the best expected rate; 0 unless it beats none by `min_gain`.

    values: [num_candidates] expected tokens from each candidate, descending.
    seconds: [num_candidates + 1] step time with 0, 1, .. of them.
    """
    rate = (sure_tokens + np.cumsum(values, dtype=np.float64)) / seconds[1:]
    best = int(rate.argmax())
    return best + 1 if rate[best] > sure_tokens / seconds[0] * (1.0 + min_gain) and values[best] > 0 else 0


def _best_first(value: NDArray[np.floating], seconds: Float64Array) -> NDArray[np.floating]:
    """The highest values in descending order, as many as `seconds` has times for."""
    room = min(len(seconds) - 1, value.size)
    return np.sort(value, axis=None)[: -room - 1 : -1]


def _take_best(score: NDArray[np.floating], ranked: NDArray[np.floating], count: int) -> Int32Array:
    """Lengths that take the `count` highest scores; ties by request, then position. ranked: the scores, descending."""
    if not count:
        return np.zeros(len(score), dtype=np.int32)
    lowest = ranked[count - 1]
    lengths: Int32Array = np.count_nonzero(score >= lowest, axis=1).astype(np.int32)
    if int(lengths.sum()) == count:  # all that are tied are taken
        return lengths
    above = np.count_nonzero(score > lowest, axis=1)
    tied = np.count_nonzero(score == lowest, axis=1)
    left = count - int(above.sum()) - (np.cumsum(tied) - tied)
    lengths = (above + np.minimum(np.maximum(left, 0), tied)).astype(np.int32)
    return lengths


def _decide_bandit(
    snapshot: BudgetSnapshot, probability: Float32Array, room: int, state: BudgetState
) -> Int32Array:
    """TLT 5.2, algorithm 1: the strategy's depth caps each draft, its verify tokens the likeliest of the
    batch."""
    strategy = bandit.select_strategy(state.bandit, snapshot.num_requests)
    reachable = probability[:, : strategy.draft_depth]
    values = np.sort(reachable, axis=None)[::-1]
    count = min(strategy.tokens_to_verify * snapshot.num_requests, room, int(np.count_nonzero(values > 0)))
    return _take_best(reachable, values, count)


def _judge_drafts(
    arms: bandit.BanditState, step: StepObservation, model: StepTimeModel, settings: BudgetSettings
) -> bandit.BanditState:
    """Move the bandit's elastic threshold: would drafts pay in a step of as many requests as this one?

    Tokens per second with the best strategy's typical drafts against those of a step without, by measured times (E1,
    E2). TLT 5.1 leaves the threshold to the user.
    """
    batch, typical = step.num_requests, bandit.typical_trial(arms, step.num_requests)
    if typical is None or not _is_known(model, batch):
        return arms
    size = batch * (1.0 + typical.verified)
    if size > largest_known_tokens(model) * settings.max_growth:
        return arms
    plain_s, drafts_s = predict_s(at_context(model, step.num_context_tokens), np.array([batch, size]))
    pays = typical.accept_length * float(plain_s) > float(drafts_s) + typical.draft_s * batch
    return bandit.move_threshold(arms, batch, pays)


def _decide_thresholds(
    snapshot: BudgetSnapshot, probability: Float32Array, room: int, settings: BudgetSettings
) -> Int32Array:
    """Seer 4.4: limits per request and per batch set the length by concurrency; unlikely tokens are filtered
    out.

    Differs: the limits are settings, not precomputed per model architecture.
    """
    share = settings.threshold_batch_tokens // snapshot.num_requests
    likely = (probability > 0) & (probability >= settings.threshold_min_probability)
    return _even_lengths(likely.sum(axis=1), min(settings.threshold_request_tokens, share), room)


def _even_lengths(available: NDArray[np.integer], length: int, room: int) -> Int32Array:
    """`length` for everyone, as far as drafts reach; without the room position by position, earlier requests
    first."""
    lengths = np.minimum(available, length)
    excess = int(lengths.sum()) > room
    while excess:
        length -= 1
        shorter = np.minimum(available, length)
        excess = int(shorter.sum()) > room
        if not excess:
            longer = lengths > shorter
            lengths = shorter + (longer & (np.cumsum(longer) <= room - int(shorter.sum())))
    result: Int32Array = lengths.astype(np.int32)
    return result


def _check(snapshot: BudgetSnapshot) -> None:
    rows = len(snapshot.path_probability)
    if rows != snapshot.num_requests or snapshot.path_probability.ndim != 2:
        raise EngineError(
            f"path probabilities of shape {snapshot.path_probability.shape} for {snapshot.num_requests} "
            "requests: pass one row per decoding request"
        )
    if snapshot.weight is not None and snapshot.weight.shape != (rows,):
        raise EngineError(
            f"weights of shape {snapshot.weight.shape} for {rows} requests: pass one per decoding request"
        )

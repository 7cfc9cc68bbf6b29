"""The draft window: how many tokens does a draft of w tokens yield, at what rate, and which w is best?

Owns the acceptance model of SpecActor 4.1; placement and reconfiguration ask nothing else. Every function is a
closed form on arrays that broadcast against each other, so one call serves a cluster of plans or thousands of requests.

A draft token is accepted with probability p if those before it were. S_w = 1 + p + .. + p^(w-1) is the expected number
of tokens up to and including the first rejection, at most w.

    coupled     draft w tokens, then verify them:  S_{w+1} tokens (bonus token included) in w D + V seconds
    decoupled   drafter and verifier on different workers. The drafter sends w tokens and drafts up to w more while
                they are verified. All accepted, and the bonus token is the first token drafted ahead: the window
                drafted ahead is next, and the round took max(w D, V). Otherwise what was drafted ahead is wasted and
                a new window is drafted, the refill. A round yields tau_w tokens on average.

tau_w (`decoupled_tokens`) follows from renewal at each rejection: 1/(1-p) tokens come between two rejections; they take
the round that ends in the rejection, the refill, and one round for every window passed before it. The first window
after a refill passes with p^(w+1) (its bonus token checks the next window's first token too), every later one with
p^w (its first token is checked already), so p^(w+1) / (1-p^w) windows pass. With f rounds for the refill

    tau_w = 1/(1-p) / (1 + f + p^(w+1)/(1-p^w)) = S_w / ((1-p^w) (1+f) + p^(w+1))

In a batch, the verifier is busy with the others and the new window waits for its next step: f = 1. A request alone is
verified as soon as its window is there: f = min(w D, V) / max(w D, V).

Differs: the paper takes sum_{a<w} P(a,w) (a+1)/2 + w P(w,w) = (S_w + w p^w)/2, the mean over windows of each window's
tokens per round. A rate is tokens over rounds, the ratio of the two means; the paper's is off by -7 % (w = 1) to
+29 % (docs/decisions/0003-decoupled-rounds.md). `Rules.PAPER` selects it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError, EngineError
from paceline.planning.latency_profile import LatencyModel, VerifyLatency, verify_s
from paceline.types import Float64Array, Int32Array

_NEARLY_ONE = 1.0 - 1e-9  # from here on S_w is w to seven digits, and its quotient would lose them


class Mode(StrEnum):
    """How a request's drafter and verifier take turns."""

    COUPLED = "coupled"
    DECOUPLED = "decoupled"


class Rules(StrEnum):
    """Whose formulas decide, wherever ours differ from SpecActor's."""

    PROTOCOL = "protocol"
    """What the protocol gives, as derived and simulated here."""
    PAPER = "paper"
    """SpecActor's, to the letter."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a draft token and a verification cost; the fields broadcast against each other and the windows."""

    batch: ArrayLike
    """b, requests that are drafted for and verified together, at least 1."""
    draft_s: ArrayLike
    """D(b), seconds to draft one token for each of them, non-negative."""
    verify_s: Float64Array
    """V_w(b), seconds to verify w + 1 tokens of each, positive; the last axis is the window."""


@dataclass(frozen=True, slots=True)
class BestWindow:
    """The best window at each acceptance rate asked for, in the shape of those."""

    window: Int32Array
    """Draft tokens; 0 (coupled only): draft nothing."""
    tokens_per_s: Float64Array
    """Tokens per second and request at that window."""


def coupled_tokens(acceptance: ArrayLike, window: ArrayLike) -> Float64Array:
    """Tokens per coupled round, bonus token included: sum_{a<w} P(a,w) (a+1) + (w+1) P(w,w) = S_{w+1}."""
    w = np.asarray(window) + 1
    return _sum_of_powers(acceptance, w, np.power(acceptance, w))


def decoupled_tokens(
    acceptance: ArrayLike, window: ArrayLike, refill_rounds: ArrayLike = 1.0
) -> Float64Array:
    """tau_w, tokens per decoupled round of max(w D, V) seconds, bonus token included; windows from 1.

    refill_rounds: f, how long after a rejection the verifier waits for the next window, in rounds.
    """
    w = np.asarray(window)
    passed = np.power(acceptance, w)
    rounds = (1.0 - passed) * (1.0 + np.asarray(refill_rounds)) + passed * acceptance
    return np.asarray(_sum_of_powers(acceptance, w, passed) / rounds)


def decoupled_tokens_of_paper(acceptance: ArrayLike, window: ArrayLike) -> Float64Array:
    """SpecActor's tau_w: sum_{a<w} P(a,w) (a+1)/2 + w P(w,w). Exact at p = 0 and p = 1 only."""
    w = np.asarray(window)
    passed = np.power(acceptance, w)
    return np.asarray(0.5 * (_sum_of_powers(acceptance, w, passed) + w * passed))


def round_s(window: ArrayLike, times: StepTimes, mode: Mode) -> Float64Array:
    """IL, seconds of a round: w D + V coupled, max(w D, V) decoupled."""
    draft_s = np.asarray(window) * np.asarray(times.draft_s)
    if mode is Mode.COUPLED:
        return np.asarray(draft_s + times.verify_s)
    return np.asarray(np.maximum(draft_s, times.verify_s))


def tokens_per_s(
    acceptance: ArrayLike, window: ArrayLike, times: StepTimes, mode: Mode, rules: Rules = Rules.PROTOCOL
) -> Float64Array:
    """TGS, tokens per second of one request: tokens per round / seconds of a round.

    Windows from 0 coupled, from 1 decoupled. Rules differ only decoupled.
    """
    seconds = round_s(window, times, mode)
    if mode is Mode.COUPLED:
        return coupled_tokens(acceptance, window) / seconds
    if rules is Rules.PAPER:
        return decoupled_tokens_of_paper(acceptance, window) / seconds
    return decoupled_tokens(acceptance, window, _refill_rounds(window, times)) / seconds


def best_window(
    acceptance: ArrayLike, times: StepTimes, mode: Mode, rules: Rules = Rules.PROTOCOL
) -> BestWindow:
    """argmax_w TGS for each acceptance rate (SpecActor algorithm 2, lines 3 and 4); ties go to the smaller window.

    times: of one batch size, verify_s [max_window + 1] for the windows 0 .. max_window.

    Differs: coupled, the window 0 competes too, as a drafter may be worth less than its time.
    Raises EngineError for acceptance rates outside [0, 1], ConfigError for a max_window below 1.
    """
    p = checked_acceptance(acceptance)
    max_window = len(times.verify_s) - 1
    if max_window < 1:
        raise ConfigError(
            f"a longest draft window of {max_window} leaves nothing to choose: allow at least 1"
        )
    first = 0 if mode is Mode.COUPLED and rules is Rules.PROTOCOL else 1
    windows = np.arange(first, max_window + 1, dtype=np.int32)
    offered = StepTimes(times.batch, times.draft_s, times.verify_s[first:])
    rates = tokens_per_s(p[..., None], windows, offered, mode, rules)
    best = rates.argmax(axis=-1)
    return BestWindow(windows[best], np.take_along_axis(rates, best[..., None], axis=-1)[..., 0])


def profiled_times(draft: LatencyModel, verify: VerifyLatency, batch: int, max_window: int) -> StepTimes:
    """D(b) and V_w(b) of the windows 0 .. max_window from latency models, as `best_window` wants them."""
    if batch < 1:
        raise ConfigError(f"a batch of {batch} requests takes no time: plan for at least 1")
    return StepTimes(batch, float(draft.seconds(batch)), verify_s(verify, batch, np.arange(max_window + 1)))


def checked_acceptance(acceptance: ArrayLike) -> Float64Array:
    """The rates as float64, in their shape. Raises EngineError if one is outside [0, 1] or not a number."""
    p = np.asarray(acceptance, dtype=np.float64)
    wrong = p[~((p >= 0.0) & (p <= 1.0))]
    if wrong.size:
        raise EngineError(
            f"an acceptance rate of {wrong[0]} is not between 0 and 1: report accepted / draft tokens, "
            "and a prior while nothing was drafted"
        )
    return p


def _sum_of_powers(acceptance: ArrayLike, window: ArrayLike, passed: Float64Array) -> Float64Array:
    """S_w = (1 - p^w) / (1 - p), w at p = 1: tokens until a rejection. passed: p^w."""
    p = np.asarray(acceptance, dtype=np.float64)
    certain = p > _NEARLY_ONE
    if not certain.any():
        return np.asarray((1.0 - passed) / (1.0 - p))
    return np.where(certain, window, (1.0 - passed) / np.where(certain, 1.0, 1.0 - p))


def _refill_rounds(window: ArrayLike, times: StepTimes) -> Float64Array:
    """f: 1 in a batch, min(w D, V) / max(w D, V) for a request alone."""
    alone = np.asarray(times.batch) == 1
    if not alone.any():
        return np.ones(())
    draft_s = np.asarray(window) * np.asarray(times.draft_s)
    share = np.minimum(draft_s, times.verify_s) / np.maximum(draft_s, times.verify_s)
    return np.where(alone, share, 1.0)

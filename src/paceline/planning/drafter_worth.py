"""When does a model drafter draft, and how far?

Owns the decisions about a drafter that costs time (a suffix tree costs next to none). Both compare rates: a step of B
requests that verifies n draft tokens yields B + E tokens in T(B + n) seconds, and in D more if the drafter made them.

* It goes on while (B + E1) / (T(B + n1) + D) is above (B + E0) / T(B + n0), index 0 standing for what the budget would
  have done with the model-free drafts of the same steps. A drafter that loses rests, twice as long each time
  (`next_rest`), because its own time, the target's and the acceptance change with batch, context and
  policy. Each batch size rests for itself: in a rollout's tail the drafter pays most, and when the next rollout begins
  it is not forgotten that it lost there. After a rest it has to read all that was written meanwhile, whether the
  trial ends well or not; so a trial drafts for a sample of the requests first, and for twice as many as long as the
  gain of a time as long as the rest pays for the reading.
* It reads what responses have written so far, their prompts at first, only where that is worth it: where the gain at
  this batch size, over the steps that the responses still have, is more than reading takes.
* One more level over m requests pays if the accepted tokens that it promises, beyond those that places in the step
  cost, are worth D(m) at the present rate.

Differs from TLT 5.2 and SpecActor algorithm 1, which choose one draft length by mean acceptance: the length here
follows the drafter's certainty in this very draft, and the rest rule needs no trial of its own while it drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from paceline.planning.latency import StepTimeModel, predict_one_s, predict_s
from paceline.types import Float32Array, Float64Array

HIGHEST_FLOOR = 0.9
"""A draft never has to be surer than this to go on: certainty is what the budget judges, with fresher knowledge."""

MEMORY = 1.0 - 1.0 / 24.0
"""What a step counts for one step later, in the rates of its batch size."""

TRIAL_STEPS = 4
"""Steps with drafts before a batch size is judged; after a rest, before a trial grows or ends."""

FIRST_REST = 8
"""Steps of the first rest; each further one is twice as long, up to `LONGEST_REST`."""

LONGEST_REST = 128
"""What is known recovers from a disturbance that has ended within twice as many steps."""

RECOVERED = 1.5
"""A rest ends when T has fallen by this factor: the drafter was judged on a busy machine."""

AFTER_REST = 1.0 / 12.0
"""What older steps count for after a rest: the trial decides."""

LEAST_S = 1e-6
"""Rates do not fade to fewer seconds."""

SPAN_TOKENS = 4
"""Tokens over which the slope of T is taken, at least."""

SPAN_SHARE = 0.5
"""The same as a share of the step: between two knots of T alone the slope is mostly noise."""

_NUM_SIZES = 12


@dataclass(frozen=True, slots=True)
class Rates:
    """Decayed sums over the steps of one batch size."""

    tokens_with: float = 0.0
    seconds_with: float = 0.0
    tokens_without: float = 0.0
    seconds_without: float = 0.0
    num_steps: int = 0

    def faded(self, factor: float) -> Rates:
        """The same rates, counting `factor` times as much."""
        return Rates(
            self.tokens_with * factor,
            self.seconds_with * factor,
            self.tokens_without * factor,
            self.seconds_without * factor,
            self.num_steps,
        )

    @property
    def gain(self) -> float:
        """Time that the drafter saves, in parts of that of the steps with it; below 0 where it loses."""
        return self.tokens_with * self.seconds_without / (self.tokens_without * self.seconds_with) - 1.0


@dataclass(frozen=True, slots=True)
class Worth:
    """What is known about a drafter, by batch size in powers of two."""

    rates: tuple[Rates, ...] = field(default=(Rates(),) * _NUM_SIZES)

    def is_positive(self, batch: int) -> bool:
        """Whether drafting pays at this batch size. A size not tried often enough follows the nearest smaller one that
        was; while there is none, the drafter is believed to pay.
        """
        return self.gain(batch) > 0.0

    def gain(self, batch: int) -> float:
        """`Rates.gain` as far as it is known; infinite while the drafter is believed to pay."""
        known = self._nearest(batch, TRIAL_STEPS)
        return float("inf") if known is None else known.gain

    def token_s(self, batch: int) -> float | None:
        """Seconds per token at this batch size, with the drafter or without, whichever is faster; None while it was
        not tried. By the rate of a drafter that loses, time would look cheap, and it would draft more.
        """
        known = self._nearest(batch, 1)
        if known is None:
            return None
        return min(known.seconds_with / known.tokens_with, known.seconds_without / known.tokens_without)

    def _nearest(self, batch: int, least: int) -> Rates | None:
        sizes = range(size_of(batch), -1, -1)
        return next((self.rates[at] for at in sizes if self.rates[at].num_steps >= least), None)


@dataclass(frozen=True, slots=True)
class Rest:
    """Where a drafter stands between drafting and resting."""

    left: int = 0
    """Steps still to rest; 0: it drafts."""
    trial_left: int = 0
    """Steps still to come before a trial grows or ends."""
    sample: int = 0
    """Requests that the trial drafts for; 0: all."""
    length: int = FIRST_REST
    """Steps of the next rest."""
    last: int = FIRST_REST
    """Steps of the last one."""
    batch: int = 1
    """Requests of the step after which it went to rest."""
    step_s: float = 0.0
    """What a step of so many tokens took then."""


def update_worth(
    worth: Worth, batch: int, with_drafts: tuple[float, float], without: tuple[float, float]
) -> Worth:
    """The worth after a step of `batch` requests.

    with_drafts: (tokens, seconds) of the step as it is, the drafter's time included.
    without: (tokens, seconds) of the step as the budget would have made it of the model-free drafts.
    """
    at = size_of(batch)
    old = worth.rates[at].faded(MEMORY)
    new = Rates(
        old.tokens_with + with_drafts[0],
        old.seconds_with + with_drafts[1],
        old.tokens_without + without[0],
        old.seconds_without + without[1],
        old.num_steps + 1,
    )
    return _put(worth, at, new)


def fade(worth: Worth, batch: int) -> Worth:
    """The worth when the drafter goes to rest at this batch size: what was learned counts little after it. It stays,
    however little, where nobody judges the drafter any more.
    """
    at = size_of(batch)
    rates = worth.rates[at].faded(AFTER_REST)
    return _put(worth, at, rates) if rates.seconds_with > LEAST_S else worth


def next_rest(
    rest: Rest, batch: int, is_positive: bool, step_time: StepTimeModel, *, is_alive: bool = True
) -> Rest:
    """Where the drafter stands in the next step of this batch size: resting, on trial after a rest, or drafting while
    it pays.

    rest: where it stood in the last one. is_positive: whether it pays at this batch size, as far as is known.
    step_time: T. is_alive: False while it may be dead (zero_acceptance.py): then it is heard again soon, so that this
    is settled.
    """
    first = isqrt(batch) if batch > 1 else 0
    if rest.left and predict_one_s(step_time, rest.batch) < rest.step_s / RECOVERED:
        return Rest(trial_left=TRIAL_STEPS, sample=first, last=rest.last + 1 - rest.left)
    if rest.left > 1:
        return replace(rest, left=rest.left - 1)
    if rest.left == 1:
        return replace(rest, left=0, trial_left=TRIAL_STEPS, sample=first)
    if rest.trial_left > 1:
        return replace(rest, trial_left=rest.trial_left - 1)
    if is_positive and rest.sample:
        more = 2 * rest.sample
        return replace(rest, trial_left=TRIAL_STEPS, sample=more if more < batch else 0)
    if is_positive:
        return Rest()
    length = rest.length if is_alive else FIRST_REST
    return Rest(
        left=length,
        length=min(2 * rest.length, LONGEST_REST) if is_alive else rest.length,
        last=length,
        batch=batch,
        step_s=predict_one_s(step_time, batch),
    )


def choose_floor(
    batch: int, num_drafted: int, token_s: float, step_time: StepTimeModel, lowest: float
) -> float:
    """Path probability below which a draft token is not worth its place in the step.

    batch: requests of the step. num_drafted: draft tokens that it verifies. token_s: seconds per token at the present
    rate. One more draft token costs dT/dn seconds and saves `token_s` with its path probability.
    """
    tokens = batch + num_drafted
    span = max(SPAN_TOKENS, int(SPAN_SHARE * tokens))
    low, high = predict_s(step_time, np.array([tokens, tokens + span]))
    place_s = max(float(high - low), 0.0) / span
    return float(min(max(place_s / token_s, lowest), HIGHEST_FLOOR))


def level_costs(
    batch: int,
    token_s: float,
    level_time: StepTimeModel,
    step_time: StepTimeModel,
    num_drafting: int | None = None,
) -> Float32Array:
    """Accepted tokens that one drafting level over 0, 1, .. `batch` requests must be worth. [batch + 1] float32

    num_drafting: requests that stand for all of them in a trial; a level costs each what it would cost among all.
    """
    scale, sizes = batch / num_drafting if num_drafting else 1.0, np.arange(batch + 1)
    costs = scale_up(level_time, step_time, sizes, scale) / (scale * token_s)
    return costs.astype(np.float32)  # type: ignore[no-any-return]


def scale_up(
    level_time: StepTimeModel, step_time: StepTimeModel, sizes: NDArray[np.integer], scale: float
) -> Float64Array:
    """Seconds of a drafting level over `scale` times as many requests as `sizes`, told by one over so many.

    What a level over more takes may be known from before a rest alone, when the machine was busy; the target's step,
    which is the same arithmetic and grows no slower, was measured since. The smaller growth counts: a trial goes on
    with more requests only if the smaller one says so, and measures then.
    """
    growth = predict_s(step_time, sizes * scale) / predict_s(step_time, np.maximum(sizes, 1))
    return np.minimum(predict_s(level_time, sizes * scale), predict_s(level_time, sizes) * growth)


def choose_depth(path: Float32Array, floor: float, costs: Float32Array, longest: int) -> int:
    """Levels of the next drafts, where all requests draft equally deep and that is decided before they begin.

    As many as the last drafts would have had by the rule for single levels, and one more; where every level paid, twice
    as many. path: path probabilities of the last drafts. [num_requests, num_levels] costs: `level_costs`.
    """
    num_levels: int = path.shape[1]
    for level in range(num_levels):
        grows = path[:, level] >= floor
        promised = float((path[grows, level] - floor).sum())
        if not grows.any() or promised < costs[min(int(grows.sum()), len(costs) - 1)]:
            return min(level + 2, longest)
    return min(2 * num_levels, longest)


def _put(worth: Worth, at: int, rates: Rates) -> Worth:
    return Worth((*worth.rates[:at], rates, *worth.rates[at + 1 :]))


def size_of(batch: int) -> int:
    """The batch size's place in `Worth.rates`."""
    return min(max(batch, 1).bit_length() - 1, _NUM_SIZES - 1)

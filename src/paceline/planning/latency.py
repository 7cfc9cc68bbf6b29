"""The step-time model: T(n, C), the seconds of an engine step over n tokens that attend to C tokens, fitted online.

Owns the fit; knows nothing of drafts. Invariants: T is positive, finite and non-decreasing in n; a model is
never changed, `update_step_time` returns a new one. Called after every engine step (some 50 microseconds),
so the work is bounded by the number of knots, not by the number of observations, and the curve is fitted anew only when
what it stands on has moved.

Observations are gathered at knots that double every second step. A knot keeps its latest observations and
stands at their mean token count with their lower median, so that a pause of the machine does not count. T is
the monotone, piecewise linear curve through the visited knots; where knots were skipped, and beyond the ends,
it takes the optimistic course, so that an unmeasured step gets tried once rather than never.

T(n, C) = f(n) + c(n) C, C the context of all the step's requests together. The slope c is learned from visits of the
same knot at different contexts (the within-knot regression of a panel), of each knot for itself and of all together: a
knot of which little is known has the common slope. On a GPU the two are the same; on a CPU several query tokens of a
request take its keys and values longer than one does, and with one slope for all a step without drafts would look too
dear. A rollout needs c: as it goes on the batch shrinks and the context with it, and knots last visited at a larger
batch would look dear. The curve is fitted where the rollout is, at the context of the last visit, so that what c is
wrong by counts little.

In the same way m is learned, the seconds more of a step before which a model has drafted: the drafter has used the
caches and the host meanwhile. f is without them, and `after_model` adds them: whether a drafter pays is asked by
comparing steps of both kinds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import EngineError
from paceline.types import Float64Array, StepObservation

MAX_TOKENS = 1 << 20
"""Largest step the model speaks of, tokens; beyond it T stays constant."""
KNOTS: tuple[int, ...] = (1, 2, *(knot for power in range(1, 14) for knot in (3 << power - 1, 2 << power)))
WINDOW = 16
"""Observations kept per knot."""
STALE_STEPS = 128
"""A knot not visited for so many observations keeps its median alone: the next visits outvote it at once."""
TRUSTED_VISITS = 4
"""A knot above all fresh ones that has fewer observations and is stale counts as unmeasured: what a machine did in its
first large steps would otherwise keep it from ever trying them again."""
TRUSTED_STEPS = 192
"""A knot that was not visited for so many observations counts as unmeasured where it lies above all fresh ones, or is
dearer than those visited since say by a line between them: it may look dear only because the machine was busy then."""
LONGEST_CONTEXT_RATIO = 4.0
"""The same for a knot whose visits had so many times the present context: where rollouts begin, behind the long
contexts of the last one, its time is an extrapolation."""
SMALL_STEP_TOKENS = 32
"""A step of so many tokens is tried again at once after a long time without; larger ones by and by (E2, budget.py)."""
UNKNOWN_SLOPE = 0.25
"""Slope assumed while a single knot is known, as a share of the mean cost per token T(n)/n. The share is 1
for a compute-bound step and about 0 for a memory-bound one; a low guess lets speculation be tried, and one
trial corrects it."""
PRIOR_BASE_S = 0.010
PRIOR_PER_TOKEN_S = 0.00025
"""The guess before anything was observed."""

_BOUNDARIES = tuple((low * high) ** 0.5 for low, high in pairwise(KNOTS))
_NEIGHBOUR_WEIGHT = 1.0  # observations that the line through both neighbours counts for
_SLOPE_SPAN = 4  # knots within this factor of the end decide the slope beyond it
_KNEE_GAP = 1.4  # neighbours further apart than this factor leave room for a knee
_CONTEXT_DECAY = 0.998  # per observation, of what is known about c
_CONTEXT_PRIOR = 0.1  # weight of c = 0, in squares of the context: a few tokens more or less say nothing
_KNOT_DECAY = 0.99  # per visit, of what is known about the c of a knot, whose prior is the common one
_MODEL_DECAY = 0.995  # the same for m, which is small: what a busy machine has made of it is soon forgotten
_MODEL_PRIOR = 16.0  # weight of m = 0, in visits of the other kind
_LARGEST_SURPRISE = (
    0.3  # of a knot's time: how far a visit may be off what c foresees, as a pause of the machine is
)
_SMALLEST_SURPRISE = -1.0  # the same for a knot's own c, downwards: no pause makes a step fast
_LARGEST_MODEL_SURPRISE = 0.1  # the same for m
_SMALLEST_SHARE = 0.05  # of a measured time that T keeps, without m and at any other context
_STILL = 0.002  # of a knot's time: by less it has not moved, and the curve stays
_FAST_VISITS = (
    5  # so many in a row that took less than _FAST_SHARE of what was expected: the machine was slow before
)
_FAST_SHARE = 0.8

_PRIOR_S = (PRIOR_BASE_S, PRIOR_BASE_S + PRIOR_PER_TOKEN_S * MAX_TOKENS)

_Point = tuple[float, float]  # tokens, seconds
_Visit = tuple[float, float, float, float]  # tokens, seconds, context, 1 after a model's drafts, else 0


class Slope(NamedTuple):
    """What is known about c or m: decayed sums over visits of knots that were visited before."""

    prior: float
    """Weight of 0, in squares of the largest value."""
    decay: float
    """Per observation."""
    squares: float = 0.0
    """Of the deviation of the value (the context, or whether a model has drafted) from the knot's."""
    products: float = 0.0
    """Of that deviation and the time's."""
    largest: float = 0.0
    """Largest value seen, decayed."""

    @property
    def seconds(self) -> float:
        """Seconds per unit of the value; 0 until values have differed by more than a little."""
        weight = self.squares + self.prior * self.largest**2
        return max(self.products / weight, 0.0) if weight else 0.0

    def beside(self, common: Slope) -> float:
        """The same of a knot's own visits, drawn to the common one until they have differed by more than a little."""
        ridge = self.prior * common.largest**2
        weight = self.squares + ridge
        return max((self.products + ridge * common.seconds) / weight, 0.0) if weight else common.seconds

    def faster(self, factor: float) -> Slope:
        """With times taken down by a factor."""
        return self._replace(products=self.products * factor)

    def after(self, value: float, deviation: float, difference_s: float) -> Slope:
        """With one more visit, `deviation` and `difference_s` from its knot's other visits."""
        return Slope(
            self.prior,
            self.decay,
            self.squares * self.decay + deviation**2,
            self.products * self.decay + deviation * difference_s,
            max(self.largest * self.decay**0.5, value),
        )


class Knot(NamedTuple):
    """What was observed at one knot."""

    visits: tuple[_Visit, ...] = ()
    """The latest, oldest first; at most WINDOW."""
    num_visits: int = 0
    """Observations since it was last cut to its median."""
    last_seen: int = -1
    """Value of num_observations at the last visit, -1: never."""
    point: _Visit = (0.0, 0.0, 0.0, 0.0)
    """Mean tokens of the visits, lower median of the seconds, mean of the others."""
    context: Slope = Slope(_CONTEXT_PRIOR, _KNOT_DECAY)
    """Of its own visits."""
    context_s: float = 0.0
    """Its c when the curve was fitted after a visit of it."""


class StepTimeModel(NamedTuple):
    """What has been learned about T(n). Make one with `initial`, read it with `predict_s`."""

    knots: tuple[Knot, ...]  # one for each of KNOTS
    context: Slope
    """Of all knots."""
    context_s: float
    """The common c when the curve was fitted."""
    drafter: Slope
    drafter_s: float
    """m when the curve was fitted."""
    fast_visits: tuple[tuple[_Visit, float], ...]  # observations and their shares of the expected time
    num_observations: int
    curve_tokens: tuple[float, ...]  # ascending
    curve_s: tuple[float, ...]  # T at `curve_tokens` and `num_context_tokens`: non-decreasing
    fitted_s: tuple[float, ...]  # T at `curve_tokens` and `fitted_context`
    slopes_s: tuple[float, ...]  # c at `curve_tokens`
    fitted_context: float = 0.0
    """Context of the visit after which the curve was fitted."""
    num_context_tokens: float = 0.0
    """What `at_context` says."""
    shift_s: float = 0.0
    """To be added: what `after_model` says."""

    @classmethod
    def initial(cls) -> StepTimeModel:
        """A model that has seen nothing: T(n) = 10 ms + 0.25 ms n, replaced by the first observation."""
        return cls(
            knots=(Knot(),) * len(KNOTS),
            context=Slope(_CONTEXT_PRIOR, _CONTEXT_DECAY),
            context_s=0.0,
            drafter=Slope(_MODEL_PRIOR, _MODEL_DECAY),
            drafter_s=0.0,
            fast_visits=(),
            num_observations=0,
            curve_tokens=(0.0, float(MAX_TOKENS)),
            curve_s=_PRIOR_S,
            fitted_s=_PRIOR_S,
            slopes_s=(0.0, 0.0),
        )


def predict_s(model: StepTimeModel, num_tokens: ArrayLike) -> Float64Array:
    """T at each entry of `num_tokens`, seconds, in its shape (a number gives a 0-d array)."""
    return np.asarray(np.interp(np.asarray(num_tokens), model.curve_tokens, model.curve_s) + model.shift_s)


def predict_one_s(model: StepTimeModel, num_tokens: float) -> float:
    """`predict_s` of one number, without the arrays."""
    return _interpolated(num_tokens, model.curve_tokens, model.curve_s) + model.shift_s


def at_context(model: StepTimeModel, num_context_tokens: int) -> StepTimeModel:
    """The model of steps whose requests attend to so many tokens more in all; to be read, not to be updated."""
    if not any(model.slopes_s):
        return model
    context = model.num_context_tokens + num_context_tokens
    return model._replace(curve_s=_moved(model, context), num_context_tokens=context)


def _moved(model: StepTimeModel, context: float) -> tuple[float, ...]:
    """T at `curve_tokens` with so much context: positive, and non-decreasing as slopes need not be."""
    further = context - model.fitted_context
    return tuple(
        accumulate(
            (
                max(time + slope * further, _SMALLEST_SHARE * time)
                for time, slope in zip(model.fitted_s, model.slopes_s, strict=True)
            ),
            max,
        )
    )


def _at(model: StepTimeModel, num_tokens: float, context: float) -> float:
    """T of one step alone, without m."""
    fitted_s = _interpolated(num_tokens, model.curve_tokens, model.fitted_s)
    slope_s = _interpolated(num_tokens, model.curve_tokens, model.slopes_s)
    return max(fitted_s + slope_s * (context - model.fitted_context), _SMALLEST_SHARE * fitted_s)


def after_model(model: StepTimeModel) -> StepTimeModel:
    """The model of steps before which a model has drafted; to be read, not to be updated."""
    return model._replace(shift_s=model.shift_s + model.drafter_s) if model.drafter_s else model


def update_step_time(model: StepTimeModel, observation: StepObservation) -> StepTimeModel:
    """The model after one more measured step; every token of the step counts, prefill tokens included.

    A model has drafted for it if that took time beside the step's (`draft_s`, without the wait for a draft worker).
    Keep one model for steps that only decode and another one for steps that contain prefill. Raises
    EngineError for a step without tokens or without a positive, finite time.
    """
    return update_measured_time(
        model,
        observation.num_tokens,
        observation.step_s,
        observation.num_context_tokens,
        observation.draft_s > observation.wait_s,
    )


def update_measured_time(
    model: StepTimeModel,
    num_tokens: int,
    seconds: float,
    num_context_tokens: int = 0,
    has_model_drafts: bool = False,
) -> StepTimeModel:
    """`update_step_time` for bare numbers, as a drafter's forward pass over `num_tokens` rows gives them."""
    if num_tokens < 1 or not 0.0 < seconds < float("inf"):
        raise EngineError(
            f"a measured step of {num_tokens} tokens in {seconds} s cannot be learned from: "
            "report at least 1 token and a positive, finite time"
        )
    visit = (float(num_tokens), float(seconds), float(num_context_tokens), float(has_model_drafts))
    model = _watch_speed(model, visit)
    place, now = nearest_knot(num_tokens), model.num_observations + 1
    before = model.knots[place]
    context, drafter, own = _learn_slopes(model, before, visit)
    visits, count = before.visits, before.num_visits
    if count > 1 and now - before.last_seen > STALE_STEPS:
        visits, count = (before.point,), 1
    visits = (*visits[1 - WINDOW :], visit)
    knot = Knot(visits, count + 1, now, before.point, own, before.context_s)
    own_s = own.beside(context)
    centre = _centre(model, visits, (own_s, drafter.seconds))
    learned = model._replace(
        knots=_with(model.knots, place, knot), context=context, drafter=drafter, num_observations=now
    )
    if knot.num_visits > WINDOW and _is_still(learned, knot, centre, num_context_tokens):
        return learned
    knots = _with(model.knots, place, knot._replace(point=centre, context_s=own_s))
    curve_tokens, fitted_s, slopes_s = _fit_curve(knots, now, (context, drafter), num_context_tokens)
    fitted = learned._replace(
        knots=knots,
        context_s=context.seconds,
        drafter_s=drafter.seconds,
        curve_tokens=curve_tokens,
        fitted_s=fitted_s,
        slopes_s=slopes_s,
        fitted_context=float(num_context_tokens),
    )
    return fitted._replace(curve_s=_moved(fitted, 0.0))


def _with(knots: tuple[Knot, ...], place: int, knot: Knot) -> tuple[Knot, ...]:
    return (*knots[:place], knot, *knots[place + 1 :])


def _is_still(model: StepTimeModel, knot: Knot, centre: _Visit, num_context_tokens: int) -> bool:
    """Whether the curve can stay: the visited knot, c, m and what counts as fresh are as when it was fitted.

    model: after the visit, but for the curve and the knot's point. centre: where that would be now.
    """
    now = model.num_observations
    turns = now - STALE_STEPS - 1, now - TRUSTED_STEPS - 1
    if any(other.last_seen in turns for other in model.knots if other.num_visits):
        return False
    if num_context_tokens * LONGEST_CONTEXT_RATIO < model.fitted_context:
        return False
    tokens, seconds, context, share = knot.point
    here_s, there_s = _at(model, centre[0], context), _at(model, tokens, context)
    now_s, drafter_s, most_s = model.context.seconds, model.drafter.seconds, _STILL * seconds
    own_s = knot.context.beside(model.context)
    foreseen_s = here_s - there_s + own_s * (centre[2] - context) + drafter_s * (centre[3] - share)
    farthest = max(num_context_tokens, context)
    return (
        abs(centre[1] - seconds - foreseen_s) <= most_s
        and abs(now_s - model.context_s) * farthest <= most_s
        and abs(own_s - knot.context_s) * max(abs(num_context_tokens - context), 0.5 * farthest) <= most_s
        and abs(drafter_s - model.drafter_s) <= most_s
    )


def _watch_speed(model: StepTimeModel, visit: _Visit) -> StepTimeModel:
    """Notice that the machine works faster than it did, before the visit itself is learned.

    Something else was busy on it, say, and has ended. Knots that are visited learn that by themselves. Those that are
    not would look dear for good and hence never be visited again: all are taken down by the same factor. The other way
    round nothing has to be done: a knot that looks cheap is visited.
    """
    tokens, seconds, context, drafted = visit
    expected_s = _at(model, tokens, context) + model.drafter_s * drafted
    share = seconds / expected_s
    if not model.num_observations or share > _FAST_SHARE:
        return model._replace(fast_visits=()) if model.fast_visits else model
    visits = (*model.fast_visits, (visit, share))
    if len(visits) < _FAST_VISITS:
        return model._replace(fast_visits=visits)
    return _speed_up(model, visits)


def _speed_up(model: StepTimeModel, fast: tuple[tuple[_Visit, float], ...]) -> StepTimeModel:
    """The model with everything before `fast` taken down by their median share, and they alone at theirs."""
    factor = float(median(share for _, share in fast))
    own: dict[int, list[_Visit]] = {}
    for visit, _ in fast:
        own.setdefault(nearest_knot(int(visit[0])), []).append(visit)
    knots = []
    for place, knot in enumerate(model.knots):
        if place in own:
            visits = own[place]
            tokens, seconds, contexts, shares = zip(*visits, strict=True)
            point = fmean(tokens), float(median(seconds)), fmean(contexts), fmean(shares)
            number, own_visits = len(visits), tuple(visits)
        else:
            point = _faster(knot.point, factor)
            number, own_visits = knot.num_visits, tuple(_faster(visit, factor) for visit in knot.visits)
        context = knot.context.faster(factor)
        knots.append(Knot(own_visits, number, knot.last_seen, point, context, knot.context_s * factor))
    return model._replace(
        knots=tuple(knots),
        context=model.context.faster(factor),
        context_s=model.context_s * factor,
        drafter=model.drafter.faster(factor),
        drafter_s=model.drafter_s * factor,
        fast_visits=(),
        curve_s=tuple(seconds * factor for seconds in model.curve_s),
        fitted_s=tuple(seconds * factor for seconds in model.fitted_s),
        slopes_s=tuple(slope * factor for slope in model.slopes_s),
    )


def _faster(visit: _Visit, factor: float) -> _Visit:
    return visit[0], visit[1] * factor, visit[2], visit[3]


def _learn_slopes(model: StepTimeModel, knot: Knot, visit: _Visit) -> tuple[Slope, Slope, Slope]:
    """What a visit says about c, m and the knot's own c beside its earlier ones, whose difference in tokens the curve
    explains.

    Each takes what the other leaves unexplained for its own; where both differ, later visits settle it.
    """
    num_tokens, seconds, context, drafted = visit
    if not knot.num_visits:
        return (
            model.context.after(context, 0.0, 0.0),
            model.drafter.after(drafted, 0.0, 0.0),
            knot.context.after(context, 0.0, 0.0),
        )
    tokens, usual_s, usual_context, usual_share = knot.point
    more_s = _at(model, num_tokens, context) - _at(model, tokens, context)
    further, more = context - usual_context, drafted - usual_share
    context_s = knot.context.beside(model.context) * further
    model_s = model.drafter.seconds * more
    surprise = (seconds - usual_s - more_s - context_s - model_s) / usual_s
    surprise_s, model_surprise_s = (
        usual_s * min(max(surprise, -limit), limit) for limit in (_LARGEST_SURPRISE, _LARGEST_MODEL_SURPRISE)
    )
    own_surprise_s = usual_s * min(max(surprise, _SMALLEST_SURPRISE), _LARGEST_SURPRISE)
    return (
        model.context.after(context, further, context_s + surprise_s),
        model.drafter.after(drafted, more, model_s + model_surprise_s),
        knot.context.after(context, further, context_s + own_surprise_s),
    )


def nearest_knot(num_tokens: int) -> int:
    """Index of the knot nearest to `num_tokens` by ratio; on a boundary the higher one."""
    return bisect_right(_BOUNDARIES, num_tokens)


def observations_between(model: StepTimeModel, low: float, high: float) -> tuple[int, int]:
    """How well T is known in [low, high]: (observations held by its knots, observations made since the last
    of them).

    The second number is `num_observations` when there is none.
    """
    span = model.knots[bisect_left(KNOTS, low) : bisect_right(KNOTS, high)]
    held = sum(knot.num_visits for knot in span)
    newest = max(knot.last_seen for knot in span) if held else 0
    return held, model.num_observations - newest


def largest_known_tokens(model: StepTimeModel) -> int:
    """Where the measured part of the curve ends, tokens; 0 while nothing was observed.

    Small steps that were measured once stay known: what they take may have changed, but it is not much.
    """
    largest = max(knot.point[0] for knot in model.knots)
    return max(int(model.curve_tokens[-2]), min(int(largest), SMALL_STEP_TOKENS))


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The value at x of the line through the points (xs, ys), xs ascending; constant beyond them."""
    right = bisect_right(xs, x)
    if not right:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) / (xs[right] - xs[left]) * (x - xs[left])


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = (
        sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread > 0 else 0.0
    )
    slope = max(slope, 0.0)
    return mean_y - slope * mean_x, slope


def _centre(model: StepTimeModel, visits: tuple[_Visit, ...], slopes: tuple[float, float]) -> _Visit:
    """Mean tokens, lower median of the seconds, mean context and share of steps after a model's drafts.

    The seconds are moved to the means by `slopes`, the knot's c and m, and to the mean tokens in proportion to the
    present curve.
    """
    context_s, drafter_s = slopes
    tokens, seconds, contexts, shares = zip(*visits, strict=True)
    count = len(visits)
    mean, context, share = sum(tokens) / count, sum(contexts) / count, sum(shares) / count
    shift_s = context_s * context + drafter_s * share
    moved = [
        time - context_s * there - drafter_s * drafted + shift_s
        for time, there, drafted in zip(seconds, contexts, shares, strict=True)
    ]
    if min(tokens) < max(tokens):
        drafted_s = drafter_s * share
        mean_s = _at(model, mean, context) + drafted_s
        curve = {number: _at(model, number, context) + drafted_s for number in set(tokens)}
        moved = [time * mean_s / curve[number] for time, number in zip(moved, tokens, strict=True)]
    middle = sorted(moved)[(count - 1) // 2]
    return mean, max(middle, _SMALLEST_SHARE * min(seconds)), context, share


def _fit_curve(
    knots: tuple[Knot, ...], now: int, slopes: tuple[Slope, Slope], context: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Curve points of T at a context, and c there: 0, every visited knot (smoothed, then monotone), knees between them,
    MAX_TOKENS.
    """
    kept = _kept([knot for knot in knots if knot.num_visits], now, slopes, context)
    tokens = [knot.point[0] for knot, _ in kept]
    weights = [min(knot.num_visits, WINDOW) if now - knot.last_seen <= STALE_STEPS else 1 for knot, _ in kept]
    seconds = [time for _, time in kept]
    seconds = _monotone(_smoothed(tokens, seconds, weights), weights)
    below = _end_slope(tokens, seconds, tokens[0])
    above = _end_slope(tokens[::-1], seconds[::-1], tokens[-1])
    corners = [(0.0, seconds[0] - below * tokens[0]), *zip(tokens, seconds, strict=True)]
    corners.append((float(MAX_TOKENS), seconds[-1] + above * (MAX_TOKENS - tokens[-1])))
    for gap in range(len(tokens) - 1, 0, -1):
        if tokens[gap] > _KNEE_GAP * tokens[gap - 1] and tokens[gap] > tokens[gap - 1] + 1.0:
            corners[gap + 1 : gap + 1] = _knee(*corners[gap - 1 : gap + 3])
    curve_tokens, fitted_s = zip(*corners, strict=True)
    own_s = [knot.context.beside(slopes[0]) for knot, _ in kept]
    return curve_tokens, fitted_s, tuple(_interpolated(number, tokens, own_s) for number in curve_tokens)


def _kept(
    visited: list[Knot], now: int, slopes: tuple[Slope, Slope], context: float
) -> list[tuple[Knot, float]]:
    """The knots that count, each with its time at a context, without m: see TRUSTED_VISITS, TRUSTED_STEPS and
    LONGEST_CONTEXT_RATIO.
    """
    without = []
    for knot in visited:
        _, time, there, share = knot.point
        moved = time + knot.context.beside(slopes[0]) * (context - there) - slopes[1].seconds * share
        without.append(max(moved, _SMALLEST_SHARE * time))
    newest = max(place for place, knot in enumerate(visited) if now - knot.last_seen <= STALE_STEPS)
    longest = LONGEST_CONTEXT_RATIO * max(context, 1.0)
    is_recent = [
        now - knot.last_seen <= TRUSTED_STEPS
        and (place <= newest or knot.num_visits >= TRUSTED_VISITS)
        and (knot.point[2] <= longest or knot.last_seen == now)
        for place, knot in enumerate(visited)
    ]
    recent = list(
        compress(((knot.point[0], time) for knot, time in zip(visited, without, strict=True)), is_recent)
    )
    recent_tokens, recent_s = zip(*recent, strict=True)
    return [
        (knot, time)
        for place, (knot, time) in enumerate(zip(visited, without, strict=True))
        if is_recent[place]
        or (place <= newest and time <= _interpolated(knot.point[0], recent_tokens, recent_s))
    ]


def _knee(before: _Point, left: _Point, right: _Point, after: _Point) -> list[_Point]:
    """Where T may turn between two visited knots that lie far apart: at most one point, below the chord.

    A step is level while memory-bound and rises beyond, so T is taken to go on as before on both sides
    (convex): the most optimistic guess, which one visit corrects. A chord over such a knee would hide its
    best step for good.
    """
    chord, slope_left, slope_right = _slope(left, right), _slope(before, left), _slope(right, after)
    if not slope_left < chord < slope_right:
        return []
    x = (right[1] - left[1] + slope_left * left[0] - slope_right * right[0]) / (slope_left - slope_right)
    return [(x, left[1] + slope_left * (x - left[0]))] if left[0] < x < right[0] else []


def _slope(left: _Point, right: _Point) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _smoothed(tokens: list[float], seconds: list[float], weights: list[int]) -> list[float]:
    """Draws each inner knot towards the line through its neighbours, less the more often it was visited."""
    smooth = seconds.copy()
    for i in range(1, len(tokens) - 1):
        share = (tokens[i] - tokens[i - 1]) / (tokens[i + 1] - tokens[i - 1])
        line = seconds[i - 1] + share * (seconds[i + 1] - seconds[i - 1])
        smooth[i] = (weights[i] * seconds[i] + _NEIGHBOUR_WEIGHT * line) / (weights[i] + _NEIGHBOUR_WEIGHT)
    return smooth


def _monotone(seconds: list[float], weights: list[int]) -> list[float]:
    """Weighted isotonic regression (pool adjacent violators): the nearest non-decreasing sequence."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(seconds, weights, strict=True):
        mean, mass, length = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            low_mean, low_mass, low_length = pools.pop()
            mean = (mean * mass + low_mean * low_mass) / (mass + low_mass)
            mass, length = mass + low_mass, length + low_length
        pools.append((mean, mass, length))
    return [mean for mean, _, length in pools for _ in range(length)]


def _end_slope(tokens: list[float], seconds: list[float], end: float) -> float:
    """Slope beyond the first point, from the points near it; never above the mean cost per token there."""
    mean_cost = seconds[0] / end
    if len(tokens) == 1:
        return UNKNOWN_SLOPE * mean_cost
    near = max(2, sum(1 for n in tokens if end <= n * _SLOPE_SPAN and n <= end * _SLOPE_SPAN))
    return min(_line(tokens[:near], seconds[:near])[1], mean_cost)

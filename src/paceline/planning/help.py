"""Help for stragglers: what does a worker that has fallen free do? (goes beyond SpecActor 4.2)

A rollout ends with its last response, so help goes to the busy worker that is predicted to end last (`Ends`), and of
all kinds of help to the one after which it ends first (`decide_help`). SpecActor's own rules, which go by acceptance
and ladder rank and ask no time, are in `racing.py`.

    draft    the free worker drafts ahead for all responses of the other (planning/window.py, decoupled), with the
             drafter of that one, which then rests there, or with another one beside it: a race inside one verifier
    take     it takes over the k longest responses, so that both batches are smaller
    copy     it generates the longest response too, from its tokens so far; the first to end wins (SpecActor 4.3)
    nothing  it rests, or lends its cores to a drafter's trainer (harvest.py)

Predicted times: a step over n tokens takes `base_s + token_s n`. A response that needs s more steps, of q tokens each,
and others that need fewer end after base_s s + token_s q sum_i s_i seconds, as the batch shrinks by itself. Where a
step brings tau tokens in place of r, all s_i become s_i r / tau. On the helper a step takes `slowness` times as long.

Predictions leave out what both workers cost each other (memory bandwidth above all), so drafting for a worker and a
copy are trials: `judge_help` ends them where the worker has become slower, if its steps are short enough to tell.

Invariant: whoever helps shortens the predicted end of the worker that ends last by at least `MIN_GAIN` and
`MIN_GAIN_S`, so a tail that is over soon is left alone. Equal ends: in
the order above, the drafter that is named first, fewer responses taken, the shorter window. A decision is
O(log workers + responses of one worker). Called by the controller, and `decide_help` by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from paceline.planning.window import Mode, StepTimes, best_window, coupled_tokens, decoupled_tokens
from paceline.types import Float64Array, Progress

MIN_GAIN = 0.1
"""Share of the predicted time by which help must shorten it: predictions are no better. On two cores that share their
memory's bandwidth drafting was measured to be 0.85 to 0.94 times as fast where 1.05 was promised, 1.13 where 1.25 was.
"""

MIN_GAIN_S = 0.25
"""Seconds by which it must shorten it, too: what help that loses costs until it is ended (`judge_help`)."""

EARLY_S = 0.3
"""Seconds of steps that tell how fast a worker is, roughly; under help it must then not be `FAR_BEHIND`."""

FAR_BEHIND = 0.75
"""Of the speed without help."""

LEAST_STEPS = 12
"""With fewer on either side nothing is said: one step brings a token, another one thirty."""

TRIAL_S = 1.0
"""Seconds of steps under help after which it is kept or ended. Later ones are slower anyway, as contexts grow."""

SAME_BATCH = 0.05
"""Speeds are compared at equal numbers of responses: the mean numbers differ by no larger share."""

MAX_WINDOW = 16
"""Longest draft window that is considered, tokens."""


class Help(StrEnum):
    """What a free worker does."""

    DRAFT = "draft"
    TAKE = "take"
    COPY = "copy"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter of a free worker."""

    draft_s: float
    """D, seconds of a draft token of the first response that it drafts for."""
    acceptance: float
    """Probability that a draft token is accepted if those before it were."""
    drafter: int = 0
    """Its place in the engines' settings."""
    more_s: float = 0.0
    """What D grows by with each further response; 0 where it is known at the present batch."""

    def seconds(self, batch: float) -> float:
        """D, of a draft token of each of so many responses."""
        return self.draft_s + self.more_s * (batch - 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a busy worker has left to do, as predicted. Arrays are [num_responses], at least one."""

    steps: Float64Array
    """Engine steps that each response will take, descending."""
    context_tokens: Float64Array
    """Of each, prompt included."""
    tokens_per_step: float
    """r, of a response, drafts accepted in these steps included."""
    step_tokens: float
    """q, tokens of a response in a step: 1 and its draft tokens."""
    base_s: float
    token_s: float
    """A step over n tokens takes base_s + token_s n."""
    inside_s: float = 0.0
    """What drafting inside the engine adds to a step; nothing while another worker drafts with the same drafter."""
    is_helped: bool = False
    """Another worker drafts for it already, or runs a copy."""
    drafter: int = 0
    """Its own drafter's place: it rests while another worker drafts with the same, and goes on beside another one."""

    @property
    def end_s(self) -> float:
        """Seconds until its last response ends."""
        return float(self.seconds(self.steps[0], self.steps.sum()))

    def seconds(self, longest: ArrayLike, sum_steps: ArrayLike) -> Float64Array:
        """Of responses that take so many steps, the longest and all together."""
        base_s, response_s = self.base_s + self.inside_s, self.token_s * self.step_tokens
        return base_s * np.asarray(longest) + response_s * np.asarray(sum_steps)


@dataclass(frozen=True, slots=True)
class Helper:
    """What a free worker can do, None or False: it cannot."""

    ahead: tuple[Drafting, ...] = ()
    """Draft for another worker, with one of these."""
    inside: Drafting | None = None
    """What a copy may draft with, by turns with the target, beside what the helped worker drafts with."""
    can_copy: bool = False
    can_take: bool = False
    switch_s: float = 0.0
    """Until it begins."""
    load_token_s: float = 0.0
    """Seconds per token of context to load or recompute keys and values, for `take` and `copy`."""
    slowness: float = 1.0
    """Time of an engine step there, as a share of the helped worker's for the same tokens."""


@dataclass(frozen=True, slots=True)
class HelpChoice:
    """What the free worker does, and when the helped one is then predicted to end."""

    kind: Help
    end_s: float
    window: int = 0
    """draft: w, tokens."""
    drafter: int = 0
    """draft: the place of the drafter."""
    num_taken: int = 0
    """take: so many of the longest responses."""


def decide_help(load: Load, helper: Helper) -> HelpChoice:
    """The best help for the worker that ends last. load: that worker's."""
    end_s = load.end_s
    best = min(_options(load, helper), key=lambda choice: choice.end_s, default=None)
    if best is not None and best.end_s <= end_s - max(MIN_GAIN * end_s, MIN_GAIN_S):
        return best
    return HelpChoice(Help.NOTHING, end_s)


def judge_help(before: Progress, after: Progress) -> bool | None:
    """Whether a worker is at least as fast under help as it was before it; None: that cannot be said, or not yet.

    before: without help, while who helps was free already. after: under help; of a copied response alone, where a copy
    is judged, both of one response.
    """
    if min(before.step_s, after.step_s) < EARLY_S or min(before.num_steps, after.num_steps) < LEAST_STEPS:
        return None
    batch = before.response_s / before.step_s
    if abs(after.response_s / after.step_s - batch) > SAME_BATCH * batch:
        return None
    share = after.num_tokens / after.response_s / max(before.num_tokens / before.response_s, 1e-9)
    if after.step_s < TRIAL_S:
        return False if share < FAR_BEHIND else None
    return share >= 1.0


def _options(load: Load, helper: Helper) -> Iterator[HelpChoice]:
    """The best choice of each kind, in the order in which ties are broken."""
    if not load.is_helped:
        yield from (_draft(load, drafting, helper.switch_s) for drafting in helper.ahead)
    if helper.can_take and len(load.steps) > 1:
        yield _take(load, helper)
    if helper.can_copy and not load.is_helped:
        yield _copy(load, helper)


def _draft(load: Load, drafting: Drafting, switch_s: float) -> HelpChoice:
    """The window after which the last response ends first, at the mean batch of the rest.

    Beside another drafter than its own the helped worker goes on drafting, by turns with the target: where the two meet
    in its draft trees a step brings at least what the better of them does.
    """
    longest = float(load.steps[0])
    batch = float(load.steps.sum()) / longest
    windows = np.arange(1, MAX_WINDOW + 1)
    is_other = drafting.drafter != load.drafter
    draft_s = windows * drafting.seconds(batch)
    verify_s = load.base_s + load.token_s * batch * (windows + 1)
    verify_s += load.inside_s if is_other else 0.0
    refill = np.minimum(draft_s, verify_s) / np.maximum(draft_s, verify_s)
    tokens = decoupled_tokens(drafting.acceptance, windows, refill) * _formula_share(load, drafting)
    tokens = np.maximum(tokens, load.tokens_per_step) if is_other else tokens
    ends_s = switch_s + longest * load.tokens_per_step / tokens * np.maximum(draft_s, verify_s)
    best = int(ends_s.argmin())
    return HelpChoice(Help.DRAFT, float(ends_s[best]), window=best + 1, drafter=drafting.drafter)


def _formula_share(load: Load, drafting: Drafting) -> float:
    """What steps bring of what the formula says, at most 1, as far as the same drafter drafts in them: it knows one
    acceptance, and real ones differ from place to place. What it promises too much now it promises elsewhere.
    """
    if drafting.drafter != load.drafter or not load.inside_s:
        return 1.0
    return min(load.tokens_per_step / float(coupled_tokens(drafting.acceptance, load.step_tokens - 1.0)), 1.0)


def _take(load: Load, helper: Helper) -> HelpChoice:
    """The number of longest responses after whose moving the later of both workers ends first."""
    taken_steps = np.cumsum(load.steps)[:-1]  # of the k longest, k = 1 .. num_responses - 1
    moved_s = helper.switch_s + helper.load_token_s * np.cumsum(load.context_tokens)[:-1]
    there_s = moved_s + helper.slowness * load.seconds(load.steps[0], taken_steps)
    here_s = load.seconds(load.steps[1:], load.steps.sum() - taken_steps)
    ends_s = np.maximum(there_s, here_s)
    best = int(ends_s.argmin())
    return HelpChoice(Help.TAKE, float(ends_s[best]), num_taken=best + 1)


def _copy(load: Load, helper: Helper) -> HelpChoice:
    """The longest response ends where it ends first; its worker cancels it then, and the others go on."""
    longest = float(load.steps[0])
    alone_s = float(load.seconds(longest, longest))
    if helper.inside is not None:
        verify_s = np.asarray(load.base_s + load.token_s * np.arange(1, MAX_WINDOW + 2), np.float64)
        times = StepTimes(1, helper.inside.seconds(1), verify_s)
        rate = float(best_window(helper.inside.acceptance, times, Mode.COUPLED).tokens_per_s)
        alone_s = min(alone_s, longest * load.tokens_per_step / rate)
    moved_s = helper.switch_s + helper.load_token_s * float(load.context_tokens[0])
    others = load.steps[1:]
    rest_s = float(load.seconds(others[0], others[0] + others.sum())) if len(others) else 0.0
    return HelpChoice(Help.COPY, max(moved_s + helper.slowness * alone_s, rest_s))


class Ends:
    """Who ends last? Predicted ends by worker, with the latest at hand; each call is O(log workers)."""

    def __init__(self) -> None:
        self._ends_s: dict[str, float] = {}
        self._heap: list[
            tuple[float, str]
        ] = []  # (-end_s, worker); those that are no longer so are passed over

    def put(self, worker: str, end_s: float) -> None:
        """A worker is predicted to end then; replaces what was predicted before."""
        if self._ends_s.get(worker) != end_s:
            self._ends_s[worker] = end_s
            heappush(self._heap, (-end_s, worker))
            if len(self._heap) > 2 * len(self._ends_s) + 64:
                self._heap = [(-end, name) for name, end in self._ends_s.items()]
                heapify(self._heap)

    def remove(self, worker: str) -> None:
        """A worker has nothing to do any more, or is gone."""
        self._ends_s.pop(worker, None)

    def latest(self) -> str | None:
        """The worker that ends last, of equal ones the first by name; None: all are free."""
        while self._heap:
            end_s, worker = self._heap[0]
            if self._ends_s.get(worker) == -end_s:
                return worker
            heappop(self._heap)
        return None

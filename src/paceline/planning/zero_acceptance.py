"""Is the model drafter dead? Random, stale or lost weights draft as before, and nothing that they draft is accepted.

Wald's sequential test of the first draft token of each request; a verdict holds until weights change. While at least
`HEALTHY` of these tokens are right in the mean, the likelihood ratio of a dead drafter is a supermartingale, so it ever
reaches 1 / `FALSE_ALARM` with probability `FALSE_ALARM` at most (Ville's inequality), however long the test goes on.

Requests of one step may stand at the same place of like texts, where most are right or most are wrong. So n of them
count as n / (1 + (n - 1) `CORRELATION`) outcomes (Kish's design effect); the bound holds for beta-binomial ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

HEALTHY = 0.3
"""Acceptance at which an alarm would be false."""
DEAD = 0.02
"""Acceptance that an alarm looks for; it is found up to about 0.1."""
FALSE_ALARM = 1e-4
"""Probability that a trial of any length ends with a false alarm, and that it takes a dead drafter for alive."""
CORRELATION = 0.25
"""Most that is allowed for between two requests of a step; a step counts as 4 outcomes at most."""

_RIGHT = math.log(DEAD / HEALTHY)
_WRONG = math.log((1 - DEAD) / (1 - HEALTHY))
_BOUND = -math.log(FALSE_ALARM)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is known so far; Trial() begins."""

    evidence: float = 0.0
    """Logarithm of the likelihood ratio of `DEAD` over `HEALTHY`."""

    @property
    def verdict(self) -> Literal["alive", "dead"] | None:
        """None: not decided yet."""
        if abs(self.evidence) < _BOUND:
            return None
        return "dead" if self.evidence > 0 else "alive"


def likely_cause(*, was_alive: bool, is_pushed: bool) -> str:
    """Why a drafter is dead, in words.

    was_alive: the weights that it has were found alive before, by earlier weights of the target. is_pushed: they were
    pushed to a running engine, not loaded from its folder.
    """
    if was_alive:
        return "stale weights: it was right until the target got others"
    if is_pushed:
        return "random weights, or some that were lost in the push: it was never right with those that were pushed"
    return "random weights, another target's, or another tokenizer: it was never right"


def observe(trial: Trial, tried: int, right: int) -> Trial:
    """The trial after a step in which `right` of `tried` first draft tokens were the target's. A verdict stands."""
    if not tried or trial.verdict is not None:
        return trial
    weight = 1.0 / (1.0 + (tried - 1) * CORRELATION)
    return Trial(trial.evidence + weight * (right * _RIGHT + (tried - right) * _WRONG))

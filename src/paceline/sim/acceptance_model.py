"""How often the target accepts a drafter's tokens: a random process over requests, drafters and the response.

    logit p = logit(level) + between x z(response) + within x z(response, segment)

z are standard normal; z(response) is the same for all drafters in part (`shared`: what is hard for one is hard for
all) and alike within a group (`group_correlation`). The level of a drafter that learns from siblings (suffix trees of
a group) rises with what they have generated, in multiples of the response's own length (Seer 3.3: acceptance length
over the number of references):

    level = cold + (warm - cold) x siblings / (siblings + half_siblings)

Invariant: p is a pure function of (seed, drafter, response, tokens so far, siblings). Called by the simulated workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError
from paceline.noise import normal
from paceline.types import Float64Array, Int64Array

_SHARED_STREAM, _GROUP_STREAM, _OWN_STREAM = 1000, 1001, 1002  # and from there on, four for each drafter
_LEAST, _MOST = 0.01, 0.995


@dataclass(frozen=True, slots=True)
class AcceptanceProcess:
    """One drafter's. Raises ConfigError for a value out of range."""

    level: float
    """Probability that a draft token is accepted if those before it were, of the median response without siblings."""
    warm_level: float | None = None
    """The same with endless siblings; None: siblings teach nothing."""
    half_siblings: float = 4.0
    """Siblings, in responses as long as this one, that bring half of the rise."""
    between: float = 0.4
    """Standard deviation of logit p between responses."""
    within: float = 0.2
    """Standard deviation of logit p between segments of one response."""
    shared: float = 0.5
    """Share of the variance between responses that all drafters have in common."""
    group_correlation: float = 0.5
    """Share of the variance between responses that a group has in common."""
    segment_tokens: int = 1024
    """Tokens after which p within a response is drawn anew."""

    def __post_init__(self) -> None:
        for name in ("level", "warm_level"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ConfigError(f"acceptance {name} is {value}: must be between 0 and 1")
        for name in ("shared", "group_correlation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"acceptance {name} is {getattr(self, name)}: must be from 0 to 1")
        for name, least in (
            ("between", 0.0),
            ("within", 0.0),
            ("half_siblings", 1e-9),
            ("segment_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"acceptance {name} is {getattr(self, name)}: must be at least {least}")


class AcceptanceModel:
    """The acceptance of several drafters for the responses of one rollout."""

    def __init__(
        self, processes: tuple[AcceptanceProcess, ...], group_size: int, num_responses: int, seed: int
    ) -> None:
        """Draws what does not change over a response."""
        self._processes = processes
        self._seed = seed
        responses = np.arange(num_responses)
        groups = responses // group_size
        common = normal(seed, _SHARED_STREAM, responses), normal(seed, _GROUP_STREAM, groups)
        self._fixed = np.empty((len(processes), num_responses))
        for at, process in enumerate(processes):
            stream = _OWN_STREAM + 4 * at
            own = normal(seed, stream, responses), normal(seed, stream + 1, groups)
            parts = [
                math.sqrt(process.shared) * c + math.sqrt(1.0 - process.shared) * o
                for c, o in zip(common, own, strict=True)
            ]
            rho = process.group_correlation
            self._fixed[at] = process.between * (math.sqrt(1.0 - rho) * parts[0] + math.sqrt(rho) * parts[1])

    def rates(
        self, drafter: int, responses: Int64Array, tokens: Float64Array, siblings: Float64Array
    ) -> Float64Array:
        """p of each response now. tokens: generated so far; siblings: of the group, in multiples of them."""
        process = self._processes[drafter]
        segment = (tokens / process.segment_tokens).astype(np.int64)
        stream = _OWN_STREAM + 4 * drafter + 2
        change = normal(self._seed, stream, responses * 65536 + segment) if process.within else 0.0
        logit = (
            _logit(self.level(drafter, siblings)) + self._fixed[drafter, responses] + process.within * change
        )
        return np.asarray(np.clip(1.0 / (1.0 + np.exp(-logit)), _LEAST, _MOST))

    def level(self, drafter: int, siblings: Float64Array) -> Float64Array:
        """The median response's p."""
        process = self._processes[drafter]
        if process.warm_level is None:
            return np.full(len(siblings), process.level)
        known = siblings / (siblings + process.half_siblings)
        return np.asarray(process.level + (process.warm_level - process.level) * known)


def sibling_level(process: AcceptanceProcess, siblings: float) -> float:
    """The median response's p with so many siblings as long as it is."""
    return float(AcceptanceModel((process,), 1, 1, 0).level(0, np.array([siblings]))[0])


def moved_logit(p: float, change: float) -> float:
    """The probability whose logit is that of `p` plus `change`."""
    return 1.0 / (1.0 + (1.0 / p - 1.0) * math.exp(-change))


def _logit(p: Float64Array) -> Float64Array:
    return np.asarray(np.log(p / (1.0 - p)))

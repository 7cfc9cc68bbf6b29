"""What a rollout has to generate: groups of responses with their lengths.

Invariant: a workload is drawn from (distribution, seed) alone, so every system of a comparison gets the same one.
Called by presets and by whoever simulates a recorded run.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.errors import ConfigError
from paceline.noise import normal
from paceline.types import Float64Array, Int32Array

_ERF = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """The responses of one rollout, sample by sample within group by group."""

    group_size: int
    prompt_tokens: Int32Array  # [num_groups]
    length_tokens: Int32Array  # [num_groups x group_size] response tokens, at least 1
    max_tokens: int

    @property
    def num_responses(self) -> int:
        """Responses of all groups."""
        return len(self.length_tokens)

    @property
    def num_groups(self) -> int:
        """Prompts."""
        return len(self.prompt_tokens)


class LengthDistribution(Protocol):
    """Where lengths come from."""

    def quantile(self, share: Float64Array) -> Float64Array:
        """The length that this share of the responses does not exceed, for shares in (0, 1)."""


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Lengths whose logarithm is normal; what exceeds max_tokens is cut."""

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm: p90 = median x exp(1.28 sigma)."""

    def quantile(self, share: Float64Array) -> Float64Array:
        """Through a table of the normal distribution, exact to about 1e-5."""
        grid = np.linspace(-5.0, 5.0, 4001)
        return self.median_tokens * np.exp(self.sigma * np.interp(share, _normal_share(grid), grid))


@dataclass(frozen=True, slots=True)
class HistogramLengths:
    """Lengths of a histogram, such as production telemetry."""

    length_tokens: Float64Array  # [num_bins] ascending
    cumulative: Float64Array  # [num_bins] ascending, the last is 1

    def quantile(self, share: Float64Array) -> Float64Array:
        """The first bin whose cumulative share reaches it."""
        at = np.searchsorted(self.cumulative, share)
        return np.asarray(self.length_tokens[np.minimum(at, len(self.length_tokens) - 1)])

    def scaled(self, factor: float) -> HistogramLengths:
        """The same shape at another length."""
        return HistogramLengths(self.length_tokens * factor, self.cumulative)


def read_histogram(path: Path, key: str = "output_tokens") -> HistogramLengths:
    """A JSON file (gzip-compressed or not): pairs [length, probability], or an object that holds them under `key`.

    Raises ConfigError for a file that is none.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        pairs = np.array(found[key] if isinstance(found, dict) else found, dtype=np.float64)
        pairs = pairs[np.argsort(pairs[:, 0])]
        chances = np.maximum(pairs[:, 1], 0.0)
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no length histogram ({error}): give a JSON list of [length, probability], "
            f"or an object with such a list under {key!r}"
        ) from error
    if not np.isfinite(pairs).all():
        raise ConfigError(
            f"{path} has a length or a probability that is no finite number: leave that pair out"
        )
    total = np.cumsum(chances)
    if not len(total) or total[-1] <= 0.0 or pairs[0, 0] < 0.0:
        raise ConfigError(f"{path} has no positive probability, or a negative length: is it a histogram?")
    return HistogramLengths(np.maximum(pairs[:, 0], 1.0), total / total[-1])


def draw_workload(
    lengths: LengthDistribution,
    num_groups: int,
    group_size: int,
    prompt_tokens: int,
    max_tokens: int,
    group_correlation: float,
    seed: int,
) -> Workload:
    """Draw lengths that are alike within a group: a Gaussian copula with this correlation between two siblings.

    Raises ConfigError for a correlation outside [0, 1], or nothing to draw.
    """
    if not 0.0 <= group_correlation <= 1.0:
        raise ConfigError(f"a correlation of {group_correlation} within groups is not between 0 and 1")
    if min(num_groups, group_size, prompt_tokens, max_tokens) < 1:
        raise ConfigError(
            f"{num_groups} groups of {group_size} responses, prompts of {prompt_tokens} and at most {max_tokens} "
            "tokens: all must be at least 1"
        )
    count = num_groups * group_size
    own = normal(seed, 0, np.arange(count))
    shared = np.repeat(normal(seed, 1, np.arange(num_groups)), group_size)
    z = math.sqrt(group_correlation) * shared + math.sqrt(1.0 - group_correlation) * own
    drawn = np.clip(np.rint(lengths.quantile(_normal_share(z))), 1, max_tokens)
    prompts = np.full(num_groups, prompt_tokens, dtype=np.int32)
    return Workload(group_size, prompts, drawn.astype(np.int32), max_tokens)


def recorded_workload(
    lengths: Sequence[Sequence[int]], prompt_tokens: Sequence[int], max_tokens: int
) -> Workload:
    """The responses of a recorded rollout: lengths by group and sample. Raises ConfigError for unequal groups."""
    sizes = {len(group) for group in lengths}
    if len(sizes) != 1 or len(lengths) != len(prompt_tokens):
        raise ConfigError(
            f"{len(lengths)} groups of sizes {sorted(sizes)} and {len(prompt_tokens)} prompts: record groups of one "
            "size, each with its prompt"
        )
    flat = np.array([length for group in lengths for length in group], dtype=np.int32)
    return Workload(sizes.pop(), np.array(prompt_tokens, dtype=np.int32), flat, max_tokens)


def _normal_share(z: Float64Array) -> Float64Array:
    """The normal distribution function."""
    return np.asarray(0.5 * (1.0 + np.asarray(_ERF(z / math.sqrt(2.0)), dtype=np.float64)))

"""Random numbers as pure functions of (seed, stream, index): the same whatever is asked for when, and in which order.

Called by the simulator, where all systems of a comparison see the same responses; by drafters that are played
(drafting/synthetic.py), and where some responses are chosen by their keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from paceline.types import Float64Array, UInt64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, stream: ArrayLike, index: ArrayLike) -> Float64Array:
    """Uniform in (0, 1) for each stream and index, which broadcast; 64-bit keys are streams or indices too.

    Source: the SplitMix64 output function (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        streams, places = (np.asarray(one).astype(np.uint64) + np.uint64(1) for one in (stream, index))
        bits = _mixed(_mixed(np.uint64(seed) + _GOLDEN * streams) + _GOLDEN * places)
    return np.asarray(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def normal(seed: int, stream: int, index: ArrayLike) -> Float64Array:
    """Standard normal for each entry of `index` (Box and Muller 1958; its streams are 2 stream and 2 stream + 1)."""
    radius = np.sqrt(-2.0 * np.log(uniform(seed, 2 * stream, index)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(seed, 2 * stream + 1, index)))


def _mixed(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))

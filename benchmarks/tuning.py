"""Which settings of a rival are worth measuring, decided from short rollouts of other prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rivals import LENGTHS, Table
from steps import Step

BATCH_EDGES = (1, 2, 3, 5, 9, 17, 33, 65)
"""Smallest batch size of each entry of a tuned table."""
MIN_STEPS = 8
"""A length counts in a table's entry if it was tried in at least so many steps there."""


def next_length(scores: Mapping[int, float]) -> int | None:
    """The next draft length to try, from LENGTHS upwards; None after two in a row below the best so far, or at the end.

    scores: of the lengths tried; higher is better.
    """
    tried = [scores[length] for length in LENGTHS if length in scores]
    if len(tried) >= 3 and max(tried[-2:]) < max(tried[:-2]):
        return None
    return next((length for length in LENGTHS if length not in scores), None)


def best_settings(scores: Mapping[str, float], count: int = 2) -> list[str]:
    """The names of the best `count` settings, best first; ties: by name."""
    return sorted(scores, key=lambda name: (-scores[name], name))[:count]


def tune_table(steps: Mapping[int, Sequence[Step]]) -> Table | None:
    """The length with the most tokens per second at each batch size, as vLLM's table; None if nothing was tried.

    steps: of all rollouts, by draft length. An entry that no length was tried in enough takes its smaller neighbour's
    length, or at the small end its larger one's. Ties: the shorter.
    """
    edges = (*BATCH_EDGES, 1 << 30)
    best = [_best_length(steps, range(low, high)) for low, high in pairwise(edges)]
    known = [length for length in best if length is not None]
    if not known:
        return None
    filled, last = [], known[0]
    for length in best:
        last = last if length is None else length
        filled.append(last)
    ends = [edge - 1 for edge in BATCH_EDGES[1:]] + [128]
    return tuple(zip(BATCH_EDGES, ends, filled, strict=True))


def _best_length(steps: Mapping[int, Sequence[Step]], batches: range) -> int | None:
    rates = {}
    for length in sorted(steps):
        here = [step for step in steps[length] if step.is_decode and step.num_requests in batches]
        if len(here) >= MIN_STEPS:
            rates[length] = _rate(here)
    return max(rates, key=lambda length: rates[length]) if rates else None


def _rate(steps: Iterable[Step]) -> float:
    steps = list(steps)
    return sum(step.num_gained for step in steps) / sum(step.step_s for step in steps)

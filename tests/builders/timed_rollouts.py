"""Builds the rollouts that the speed benchmark compares."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from rollouts import Timed  # noqa: E402
from steps import Step  # noqa: E402

PROMPT = (1, 2, 3)


def decode_step(
    requests: int, context: int, step_s: float, *, drafts: int = 0, gained: int = 0, drafting_s: float = 0.0
) -> Step:
    """A step without prefill; it gains a token for each request unless told otherwise."""
    return Step(requests, requests + drafts, context, gained or requests, True, drafting_s, step_s)


def plain_rollout(lengths: list[int], *, fixed_s: float = 0.02, request_s: float = 0.001) -> Timed:
    """Plain decoding in which a step takes `fixed_s` and `request_s` for each request; prefill takes no time."""
    ids = [tuple(range(10, 10 + length)) for length in lengths]
    steps, now, ends = [], 0.0, {}
    for at in range(1, max(lengths)):
        running = [length for length in lengths if length > at]
        steps.append(
            decode_step(len(running), len(running) * (len(PROMPT) + at), fixed_s + request_s * len(running))
        )
        now += steps[-1].step_s
        ends[at + 1] = now
    return Timed(
        sorted(ends.get(length, 0.0) for length in lengths),
        steps,
        [PROMPT] * len(lengths),
        list(range(len(lengths))),
        ids,
        list(lengths),
        0.1 * sum(lengths),
    )

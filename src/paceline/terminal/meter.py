"""How far a rollout is, in numbers: responses, tokens per second, acceptance length. Shows nothing itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from paceline.types import StepObservation

WINDOW_S = 5.0
"""Tokens per second are those of the last so many seconds."""


class RolloutMeter:
    """Counts the responses, tokens and engine steps of one rollout."""

    def __init__(self, num_responses: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_responses = num_responses
        self.num_finished = 0
        self.num_tokens = 0
        self.num_decoded = 0
        """(request, step) pairs in which a request decoded."""
        self.num_accepted = 0
        self._clock = clock
        self._began_s = clock()
        self._recent: deque[tuple[float, int]] = deque([(self._began_s, 0)])

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step so far; 1 before the first."""
        return 1.0 + self.num_accepted / self.num_decoded if self.num_decoded else 1.0

    def count(self, num_tokens: int, num_finished: int) -> None:
        """Add tokens and responses that came."""
        self.num_tokens += num_tokens
        self.num_finished += num_finished

    def observe(self, steps: Iterable[StepObservation]) -> None:
        """Take measured engine steps into account."""
        for step in steps:
            self.num_decoded += step.num_requests
            self.num_accepted += step.num_accepted_tokens

    def describe(self) -> str:
        """One line. Rates are those since the call `WINDOW_S` ago, so call it at regular times."""
        now_s = self._clock()
        self._recent.append((now_s, self.num_tokens))
        while len(self._recent) > 2 and now_s - self._recent[1][0] > WINDOW_S:
            self._recent.popleft()
        then_s, tokens = self._recent[0]
        rate = (self.num_tokens - tokens) / (now_s - then_s) if now_s > then_s else 0.0
        parts = [f"{self.num_finished}/{self.num_responses} responses", f"{rate:.0f} tokens/s"]
        if self.num_decoded:
            parts.append(f"acceptance length {self.acceptance_length:.2f}")
        return ", ".join([*parts, f"{self.elapsed_s:.0f} s"])

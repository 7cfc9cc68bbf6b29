"""Live progress of a rollout on the error stream: a bar in a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from paceline.types import StepObservation

REFRESH_S = 0.25
LINE_S = 10.0
WINDOW_S = 5.0
"""Tokens per second are those of the last so many seconds."""


class _Bar(Bar):
    """A bar with something below it."""

    below: Callable[[], RenderableType] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below()


class Progress:
    """Counts responses, tokens and engine steps and shows them. Refreshed by `count`; owns no thread."""

    def __init__(
        self,
        num_responses: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        below: Callable[[], RenderableType] | None = None,
    ) -> None:
        """below: shown below the bar, in a terminal."""
        self.num_tokens = 0
        self.num_finished = 0
        self.num_decoded = 0
        """(request, step) pairs in which a request decoded."""
        self.num_accepted = 0
        self._num_responses = num_responses
        self._running = 0
        self._console = console
        self._clock = clock
        self._began_s = self._shown_s = clock()
        self._recent: deque[tuple[float, int]] = deque([(self._began_s, 0)])
        self._bar: _Bar | None = None
        self._below = below
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = _Bar(
                BarColumn(bar_width=10),
                TextColumn("{task.completed}/{task.total} responses, {task.fields[figures]}"),
                TimeElapsedColumn(),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.below = self._below
            self._task = self._bar.add_task("responses", total=self._num_responses, figures="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._show(self._clock())
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step so far; 1 before the first."""
        return 1.0 + self.num_accepted / self.num_decoded if self.num_decoded else 1.0

    def count(
        self, num_tokens: int, num_finished: int, steps: Callable[[], Iterable[StepObservation]]
    ) -> None:
        """Add what came; `steps` gives the engine steps measured since it was last called, asked when shown."""
        self.num_tokens += num_tokens
        self.num_finished += num_finished
        now = self._clock()
        if now - self._shown_s >= (LINE_S if self._bar is None else REFRESH_S):
            self.observe(steps())
            self._show(now)

    def observe(self, steps: Iterable[StepObservation]) -> None:
        """Take measured engine steps into account."""
        for step in steps:
            self.num_decoded += step.num_requests
            self.num_accepted += step.num_accepted_tokens
            self._running = step.num_requests

    def _show(self, now: float) -> None:
        self._shown_s = now
        self._recent.append((now, self.num_tokens))
        while len(self._recent) > 2 and now - self._recent[1][0] > WINDOW_S:
            self._recent.popleft()
        figures = self._figures(now)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.num_finished, figures=figures, refresh=True)
        else:
            line = f"{self.num_finished}/{self._num_responses} responses, {figures}, {self.elapsed_s:.0f} s"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, now: float) -> str:
        then, tokens = self._recent[0]
        rate = (self.num_tokens - tokens) / (now - then) if now > then else 0.0
        parts = [f"{rate:.0f} tokens/s"]
        if self.num_decoded:
            parts += [f"acceptance length {self.acceptance_length:.2f}", f"{self._running} running"]
        return ", ".join(parts)

"""What a rollout or a training run shows while it runs: a live view on a terminal, a plain line now and then elsewhere.

A log file or CI gets no control characters. Owns no thread, decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.terminal.meter import RolloutMeter
from paceline.terminal.tables import make_table
from paceline.types import StepObservation

KEPT_ROWS = 12
REFRESH_S = 0.25
LINE_S = 10.0
"""Without a terminal, a rollout says that it is alive this often."""
BAR_WIDTH = 10
COLUMNS = ("step", "reward", "held-out", "tokens/s", "accepted", "rollout s", "train s")


class Progress:
    """Shows a run on `console`. Use in `with`; messages may be printed at any time."""

    def __init__(
        self,
        console: Console,
        num_steps: int = 0,
        *,
        below: Callable[[], RenderableType] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_steps: training steps; 0 for a rollout alone. below: shown last, on a terminal."""
        self._console = console
        self._num_steps = num_steps
        self._below = below
        self._clock = clock
        self._shown_s = clock()
        self._rows: deque[tuple[str, ...]] = deque(maxlen=KEPT_ROWS)
        self._phase = ""
        self._meter: RolloutMeter | None = None
        self._line = ""
        self._solved = "-"
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_steps:
            self._phase, self._meter = "", None
        if self._meter is not None:
            self._line = self._meter.describe()
        if self._live is not None:
            self._live.refresh()
            self._live.stop()

    # -- a rollout

    def show_phase(self, name: str) -> None:
        """A phase begins: "rollout", "evaluation", "training", ..."""
        self._phase, self._meter = name, None
        self._refresh()

    def show_rollout(
        self, meter: RolloutMeter, steps: Callable[[], Iterable[StepObservation]] = tuple
    ) -> None:
        """A rollout has come so far. Cheap unless it is time to show it.

        steps: engine steps that the meter has not seen; asked for only when they are shown.
        """
        now_s = self._clock()
        if now_s - self._shown_s < (REFRESH_S if self._live else LINE_S):
            return
        meter.observe(steps())
        self._meter, self._line, self._shown_s = meter, meter.describe(), now_s
        if self._live is None:
            self._print(f"{self._phase}: {self._line}" if self._phase else self._line)
        self._refresh()

    # -- a training run

    def show_step(
        self,
        step: int,
        *,
        reward: float | None,
        num_tokens: int,
        rollout_s: float,
        train_s: float,
        acceptance_length: float,
    ) -> None:
        """A training step has ended."""
        row = (
            f"{step}/{self._num_steps}",
            "-" if reward is None else f"{reward:.3f}",
            self._solved,
            f"{num_tokens / max(rollout_s, 1e-9):.0f}",
            f"{acceptance_length:.2f}",
            f"{rollout_s:.1f}",
            f"{train_s:.1f}",
        )
        self._rows.append(row)
        if self._live is None:
            names = ("reward", "held-out", "tokens/s", "acceptance length", "rollout s", "train s")
            parts = (f"{name} {value}" for name, value in zip(names, row[1:], strict=True))
            self._print(f"step {row[0]}: {', '.join(parts)}")
        self._refresh()

    def show_evaluation(self, step: int, solve_rate: float, num_problems: int) -> None:
        """A held-out evaluation has ended."""
        self._solved = f"{solve_rate:.1%}"
        self.say(f"step {step}: held-out solve rate {self._solved} of {num_problems} problems")

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self._print(text)
        self._refresh()

    # -- how it looks

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _render(self) -> Group:
        parts: list[RenderableType] = []
        if self._num_steps:
            parts.append(self._step_table())
        parts.append(self._rollout_line())
        if self._below is not None:
            parts.append(self._below())
        return Group(*parts)

    def _step_table(self) -> Table:
        table = make_table((), COLUMNS)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _rollout_line(self) -> RenderableType:
        meter = self._meter
        if meter is None:
            return Text(self._phase, style="dim")
        line = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=meter.num_responses, completed=meter.num_finished, width=BAR_WIDTH)
        cells: list[RenderableType] = [bar, Text(self._line, style="dim")]
        line.add_row(*([Text(self._phase), *cells] if self._phase else cells))
        return line

"""What a run shows while it runs: a live table on a terminal, one line per event everywhere else.

A log file or CI gets no control characters. Called by training_run.py and rollouts.py; decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

KEPT_ROWS = 12
REFRESH_S = 0.25
HEARTBEAT_S = 30.0
"""Without a terminal, a rollout says that it is alive this often."""


class Progress:
    """Shows a run on `console`. Use in `with`; messages may be printed at any time."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._rows: deque[tuple[str, ...]] = deque(maxlen=KEPT_ROWS)
        self._phase = ""
        self._rollout = ""
        self._solved = "-"
        self._shown_s = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, auto_refresh=False, get_renderable=self._render, transient=False
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = self._rollout = ""
        if self._live is not None:
            self._live.refresh()
            self._live.stop()

    def show_phase(self, name: str) -> None:
        """A phase begins: "rollout", "evaluation", "training", ..."""
        self._phase, self._rollout = name, ""
        self._refresh()

    def show_rollout(self, num_running: int, num_responses: int, num_tokens: int, wall_s: float) -> None:
        """A rollout has come so far."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (REFRESH_S if self._live else HEARTBEAT_S):
            return
        self._rollout = (
            f"{num_running}/{num_responses} responses running, {num_tokens} tokens, "
            f"{num_tokens / max(wall_s, 1e-9):.0f} tokens/s"
        )
        if self._live is None:
            self._print(f"{self._phase}: {self._rollout}")
        self._shown_s = now_s
        self._refresh()

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

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for name in ("step", "reward", "held-out", "tokens/s", "acc. length", "rollout s", "train s"):
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, Text(f"{self._phase}  {self._rollout}", style="dim"))

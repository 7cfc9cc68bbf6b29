"""Progress without a terminal, and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from paceline.commands.interrupt import Interrupt
from paceline.commands.progress import LINE_S, Progress
from paceline.types import StepObservation


def test_without_a_terminal_progress_is_plain_lines() -> None:
    now = [0.0]
    text = io.StringIO()
    step = StepObservation(
        num_requests=4, num_draft_tokens=8, num_accepted_tokens=6, num_prefill_tokens=0, step_s=0.1
    )
    with Progress(8, Console(file=text, width=100), clock=lambda: now[0]) as progress:
        progress.count(100, 1, lambda: [step])
        assert text.getvalue() == ""
        now[0] = LINE_S
        progress.count(100, 1, lambda: [step])
    assert text.getvalue() == "2/8 responses, 20 tokens/s, acceptance length 2.50, 4 running, 10 s\n"


def test_an_interrupt_is_a_request_first() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_table_stands_below_the_bar_in_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with Progress(4, console, below=lambda: "all workers are up") as progress:
        progress.count(10, 1, list)
    assert "1/4 responses" in screen.getvalue()
    assert "all workers are up" in screen.getvalue()

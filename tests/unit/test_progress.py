"""The progress view, with and without a terminal, and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from paceline.terminal.interruption import Interrupted, Interruption
from paceline.terminal.meter import RolloutMeter
from paceline.terminal.progress import LINE_S, Progress
from paceline.terminal.screen import Screen
from paceline.types import StepObservation

STEP = StepObservation(
    num_requests=4, num_draft_tokens=8, num_accepted_tokens=6, num_prefill_tokens=0, step_s=0.1
)


def a_terminal(screen: io.StringIO) -> Console:
    return Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})


def test_without_a_terminal_progress_is_plain_lines() -> None:
    now = [0.0]
    text = io.StringIO()
    meter = RolloutMeter(8, clock=lambda: now[0])
    with Progress(Console(file=text, width=100), clock=lambda: now[0]) as progress:
        meter.count(100, 1)
        progress.show_rollout(meter, lambda: [STEP])
        assert text.getvalue() == ""
        now[0] = LINE_S
        meter.count(100, 1)
        progress.show_rollout(meter, lambda: [STEP])
    assert text.getvalue() == "2/8 responses, 20 tokens/s, acceptance length 2.50, 10 s\n"


def test_a_training_run_shows_its_rollouts_in_the_same_words() -> None:
    now = [0.0]
    text = io.StringIO()
    meter = RolloutMeter(8, clock=lambda: now[0])
    with Progress(Console(file=text, width=100), 3, clock=lambda: now[0]) as progress:
        progress.show_phase("evaluation")
        meter.count(100, 2)
        now[0] = LINE_S
        progress.show_rollout(meter)
        progress.show_step(1, reward=0.5, num_tokens=100, rollout_s=2.0, train_s=3.0, acceptance_length=1.5)
    assert text.getvalue().splitlines() == [
        "evaluation: 2/8 responses, 10 tokens/s, 10 s",
        "step 1/3: reward 0.500, held-out -, tokens/s 50, acceptance length 1.50, rollout s 2.0, train s 3.0",
    ]


def test_rates_are_those_of_the_last_seconds() -> None:
    now = [0.0]
    meter = RolloutMeter(8, clock=lambda: now[0])
    for _ in range(20):
        now[0] += 1.0
        meter.count(10 if now[0] <= 10 else 30, 0)
        line = meter.describe()
    assert "30 tokens/s" in line


def test_a_terminal_sees_steps_rollout_and_workers() -> None:
    screen = io.StringIO()
    now = [0.0]
    meter = RolloutMeter(4, clock=lambda: now[0])
    with Progress(
        a_terminal(screen), 2, below=lambda: "all workers are up", clock=lambda: now[0]
    ) as progress:
        progress.show_phase("rollout")
        meter.count(10, 1)
        now[0] = 1.0
        progress.show_rollout(meter)
        progress.show_step(1, reward=None, num_tokens=10, rollout_s=1.0, train_s=1.0, acceptance_length=1.0)
    shown = screen.getvalue()
    for text in ("1/4 responses", "held-out", "1/2", "all workers are up"):
        assert text in shown
    assert "…" not in shown


def test_the_end_of_a_rollout_is_shown() -> None:
    screen = io.StringIO()
    now = [0.0]
    meter = RolloutMeter(4, clock=lambda: now[0])
    with Progress(a_terminal(screen), clock=lambda: now[0]) as progress:
        now[0] = 1.0
        progress.show_rollout(meter)
        meter.count(10, 4)
        progress.show_rollout(meter)
    assert "4/4 responses" in screen.getvalue()


def test_an_interrupt_is_a_request_first() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.wanted
        with pytest.raises(Interrupted):
            interruption.check()
        assert signal.getsignal(signal.SIGINT) is before  # a second one is the shell's business again
    assert signal.getsignal(signal.SIGINT) is before


def test_the_answer_to_an_interrupt_goes_where_it_is_read() -> None:
    """Standard error may be a log file."""
    reader, writer = os.pipe()
    with Interruption(writer):
        os.kill(os.getpid(), signal.SIGINT)
    os.close(writer)
    with open(reader, "rb") as told:
        assert b"stopping as soon as the work in hand is kept" in told.read()


def test_a_terminal_that_is_closed_is_a_request_however_often_it_says_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interruption() as interruption:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.wanted
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption.wanted
    finally:
        signal.signal(signal.SIGHUP, before)


def show(screen: TextIO, *, is_terminal: bool) -> None:
    """All that a training run shows."""
    console = Console(file=Screen(screen), force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})  # type: ignore[arg-type]
    console.print("starting the engine")
    with Progress(console, 3) as progress:
        progress.show_phase("rollout")
        progress.show_step(1, reward=0.5, num_tokens=9, rollout_s=2.0, train_s=3.0, acceptance_length=1.5)
        progress.say("x" * 100_000)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nobody_who_reads_it_ends_no_run(is_terminal: bool) -> None:
    """Nor does the file complain when it is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as screen:
        show(screen, is_terminal=is_terminal)
    with open("/dev/full", "w", buffering=1) as screen:
        show(screen, is_terminal=is_terminal)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_program_whose_reader_has_gone_ends_well(is_full: bool) -> None:
    """With buffers as they are by default, which are flushed when it ends."""
    program = (
        "from paceline.terminal.screen import error_console\n"
        "import sys\n"
        "console = error_console()\n"
        "for _ in range(3): console.print('x' * 10_000)\n"
        "sys.stderr.flush()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stderr=full if is_full else writer, env=environment, check=False
        )
    os.close(writer)
    assert done.returncode == 0


def test_a_closed_terminal_behind_an_interrupt_does_not_end_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interruption(os.open(os.devnull, os.O_WRONLY)):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_screen_is_the_file_but_for_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "screen"
    with path.open("w") as file:
        console = Console(file=Screen(file))  # type: ignore[arg-type]
        console.print("one line")
        assert not console.is_terminal
    assert path.read_text() == "one line\n"

"""The command line: `paceline COMMAND`. Registers the commands and turns errors into one line and an exit code.

Invariant: importing this module imports nothing heavy (no torch, vllm, trl, ray), so that `--help` and every check of
the arguments answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import paceline
from paceline.commands.bench.command import bench
from paceline.commands.doctor.command import doctor
from paceline.commands.draft_server import draft_server
from paceline.commands.drafter.command import drafter
from paceline.commands.ladder import ladder
from paceline.commands.plan import plan
from paceline.commands.profile import profile
from paceline.commands.replay import replay
from paceline.commands.report import report
from paceline.commands.rollout.command import rollout
from paceline.commands.simulate import simulate
from paceline.commands.train import train
from paceline.errors import PacelineError
from paceline.terminal.interruption import INTERRUPTED

TRACEBACK = "PACELINE_TRACEBACK"
"""Set in the environment, errors are shown with everything that led to them."""

app = typer.Typer(
    name="paceline",
    help="Fast rollouts for LLM reinforcement learning, token for token the same as plain decoding.",
    epilog="First time on this machine? Run 'paceline doctor'.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(rollout)
app.command()(bench)
app.command()(report)
app.command()(replay)
app.command()(profile)
app.command()(ladder)
app.command()(plan)
app.command()(simulate)
app.command()(draft_server)
app.add_typer(drafter, name="drafter")
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `paceline` program. A PacelineError's message is printed alone; Ctrl-C and SIGTERM exit with
    130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        if os.environ.get(TRACEBACK):
            raise
        _complain(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _complain(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message))


if __name__ == "__main__":
    main()

"""`paceline report`: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.inputs.options import check_writable


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="Run folder, as written by 'paceline train --out RUN_DIR'."),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace too, for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the web browser.")] = False,
) -> None:
    """Build report.html from a run's record: reward, lengths, tail, tokens per second, where the time went.

    Works on a finished run, an interrupted one and one that is still running. The page is one file without links to
    the network.
    """
    from paceline.report import build_report

    if trace is not None:
        check_writable("--trace", trace)
    page = build_report(run_dir)
    typer.echo(f"report: {page}")
    if trace is not None:
        from paceline.report.trace import write_trace

        typer.echo(f"trace: {trace} ({write_trace(run_dir, trace)} events)")
    if open_page and typer.launch(page.resolve().as_uri()) != 0:
        typer.echo("no web browser could be started here: open the file yourself", err=True)

"""`paceline ladder`: which drafter to begin with, at every acceptance rate, from a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.commands.inputs.lists import read_rates
from paceline.commands.inputs.options import check_writable
from paceline.commands.inputs.profiles import (
    SEGMENTS,
    Acceptance,
    Context,
    MaxWindow,
    PaperRules,
    check_least,
    warn_beyond,
)
from paceline.planning.ladder import LadderSettings, build_ladder, choose_first, rank_drafters
from paceline.planning.latency_profile import LatencyModel
from paceline.planning.profile_fit import load_fits
from paceline.planning.window import Mode, Rules
from paceline.terminal.tables import make_table


def ladder(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Written by 'paceline profile'.")],
    acceptance: Acceptance,
    batch: Annotated[int, typer.Option(help="Requests drafted for and verified together.")] = 16,
    context: Context = 512,
    max_window: MaxWindow = 16,
    mode: Annotated[Mode, typer.Option(help="Whether drafter and verifier take turns or work at once.")] = (
        Mode.COUPLED
    ),
    paper: PaperRules = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ladder here.")] = None,
) -> None:
    """Rank the drafters of a profile by their speed-up over plain decoding.

    Example: paceline ladder policy.json --acceptance small=0.8 --acceptance suffix=0.6 --html ladder.html
    """
    check_least({"--batch": batch, "--context": context, "--max-window": max_window})
    rules = Rules.PAPER if paper else Rules.PROTOCOL
    made, target, fits = load_fits(profile, None if paper else SEGMENTS)
    rates = read_rates("--acceptance", acceptance, list(fits))
    if html is not None:
        check_writable("--html", html)
    warn_beyond(made, context, dict.fromkeys(("", *rates), batch))
    drafters: dict[str, LatencyModel] = {name: fits[name].model for name in rates}
    settings = LadderSettings(batch, max_window, mode, rules)
    built = build_ladder(drafters, target.model.for_requests_of(context), settings)
    title = f"{made.target}, batch {batch}, context {context}, {mode}"
    table = make_table(("drafter",), ("acceptance", "speed-up", "window"), title=title)
    for rung in rank_drafters(built, rates):
        table.add_row(rung.drafter, f"{rates[rung.drafter]:.2f}", f"{rung.speedup:.2f}", str(rung.window))
    Console().print(table)
    first = choose_first(built, rates)
    typer.echo(f"begin with: {first.drafter if first.speedup > 1.0 else 'no drafts'}")
    if html is not None:
        from paceline.report.plan_page import build_ladder_page

        facts = {"target": made.target, "batch": batch, "context": context, "mode": str(mode)}
        build_ladder_page(html, built, rates, facts)
        typer.echo(f"picture: {html}")

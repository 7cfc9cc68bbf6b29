"""`paceline replay`: the decisions of a live run, planned again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.record.decisions import DecisionReader, find_decisions
from paceline.record.tally import Tally
from paceline.terminal.tables import make_table

DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """One log."""

    name: str
    tallies: list[Tally]
    torn: bool


def replay(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|DIR|FILE",
            help="Run folder with logged decisions, folder of 'paceline rollout --decisions', or one log of them.",
        ),
    ],
) -> None:
    """Plan every logged decision of a live run again, by the same functions on the same grounds.

    The decisions are the same unless the planning has changed since: exit code 1 and the first difference of each kind
    tell what it would have decided otherwise. Needs no model and no GPU.

    Example: paceline train recipes/countdown.yaml --out runs/it --set record.decisions=true && paceline replay runs/it
    """
    logs = [_replay(log) for log in find_decisions(path)]
    console = Console(soft_wrap=True, highlight=False)
    console.print(replay_table(logs))
    for log in logs:
        if log.torn:
            console.print(f"{log.name}: the last line is torn and was passed over")
        for tally in log.tallies:
            _print_difference(console, log.name, tally)
    if any(tally.num_different for log in logs for tally in log.tallies):
        raise typer.Exit(DIFFERENT)


def _replay(path: Path) -> Replayed:
    with DecisionReader(path) as reader:
        if reader.header.kind == "engine":
            from paceline.engine.loop_replay import replay_engine

            tallies = replay_engine(reader)
        else:
            from paceline.fleet.controller_replay import replay_controller

            tallies = replay_controller(reader)
        return Replayed(path.name, tallies, reader.torn)


def replay_table(logs: list[Replayed]) -> Table:
    """One row per log and kind of decision."""
    table = make_table(("log", "decisions"), ("planned again", "different"))
    for log in logs:
        for tally in log.tallies:
            table.add_row(log.name, tally.kind, str(tally.num_planned), str(tally.num_different))
    return table


def _print_difference(console: Console, name: str, tally: Tally) -> None:
    if tally.first is None:
        return
    console.print(
        f"\n{name}, {tally.kind}: decision {tally.first.number} is the first that differs", markup=False
    )
    console.print(f"  recorded: {tally.first.recorded}", markup=False)
    console.print(f"  planned:  {tally.first.planned}", markup=False)
    if tally.num_left:
        console.print(f"  {tally.num_left} events behind it follow from what was recorded: not planned again")

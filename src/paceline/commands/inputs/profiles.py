"""What `plan` is given: profiles that were measured, and how far to trust them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from paceline.errors import ConfigError
from paceline.record.profile import Profile

SEGMENTS = 8
"""Of the curve that a target's step times are fitted with; SpecActor's formulas want a line."""

Acceptance = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RATE|NAME=RATE",
        help="Probability that a draft token is accepted if those before it were; may be given per drafter.",
    ),
]
Context = Annotated[int, typer.Option(help="Tokens of each request so far, at which the plan is made.")]
MaxWindow = Annotated[int, typer.Option(help="Longest draft window, tokens.")]
PaperRules = Annotated[
    bool, typer.Option("--paper", help="Decide by SpecActor's formulas to the letter (docs/planning.md).")
]


def warn_beyond(made: Profile, context: int, batches: Mapping[str, int]) -> None:
    """Say so where the fits are asked for more than was measured.

    batches: largest batch of each drafter, and under "" of the engine.
    """
    measured = {one.name: max(point.batch for point in one.points) for one in made.drafters}
    measured[""] = max(point.batch for point in made.steps)
    asked = [("context", context, max(point.context for point in made.steps))]
    for name, batch in batches.items():
        what = f"batch of drafter {name}" if name else "batch"
        asked.append((what, batch, measured.get(name, batch)))
    for what, value, most in asked:
        if value > most:
            typer.echo(
                f"note: a {what} of {value} is extrapolated, the profile of {made.target} ({made.num_gpus} per engine) "
                f"ends at {most}: profile that far for sure numbers",
                err=True,
            )


def check_least(values: Mapping[str, int]) -> None:
    """Raise ConfigError for an option below 1."""
    for option, value in values.items():
        if value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")

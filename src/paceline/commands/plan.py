"""`paceline ladder` and `paceline plan`: which drafter, how many devices for it, and which window, from profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.commands.lists import read_rates
from paceline.commands.options import check_writable
from paceline.errors import ConfigError
from paceline.planning.composition import Candidate, Devices, Option, best_of, rank_options
from paceline.planning.ladder import LadderSettings, build_ladder, choose_first, rank_drafters
from paceline.planning.latency_profile import LatencyModel, RequestLatency
from paceline.planning.profile_fit import load_fits
from paceline.planning.window import Mode, Rules
from paceline.record.profile import Profile

SEGMENTS = 8
"""Of the curve that a target's step times are fitted with; SpecActor's formulas want a line."""

_ON = {None: " ", Mode.COUPLED: "shared", Mode.DECOUPLED: ""}
"""Where a drafter runs that has no devices of its own."""

Acceptance = Annotated[
    list[str],
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
    _check_least({"--batch": batch, "--context": context, "--max-window": max_window})
    rules = Rules.PAPER if paper else Rules.PROTOCOL
    made, target, fits = load_fits(profile, None if paper else SEGMENTS)
    rates = read_rates("--acceptance", acceptance, list(fits))
    if html is not None:
        check_writable("--html", html)
    _warn_beyond(made, context, dict.fromkeys(("", *rates), batch))
    drafters: dict[str, LatencyModel] = {name: fits[name].model for name in rates}
    settings = LadderSettings(batch, max_window, mode, rules)
    built = build_ladder(drafters, target.model.for_requests_of(context), settings)
    table = Table(title=f"{made.target}, batch {batch}, context {context}, {mode}")
    for column in ("drafter", "acceptance", "speed-up", "window"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
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


@dataclass(frozen=True, slots=True)
class Job:
    """What is planned for."""

    devices: int
    requests: int
    max_window: int
    rules: Rules
    verify: Mapping[int, RequestLatency]
    """By engine size."""
    draft: Mapping[str, Mapping[int, LatencyModel]]
    """By drafter and its devices."""
    acceptance: Mapping[str, float]
    profiles: Sequence[Profile]


def plan(
    profiles: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROFILE...", help="One per engine size (tensor parallel size) of the target."
        ),
    ],
    acceptance: Acceptance,
    drafter: Annotated[
        str | None, typer.Option(help="Name of the drafter; default: every one with an acceptance rate.")
    ] = None,
    devices: Annotated[int, typer.Option(help="GPUs of the whole cluster.")] = 8,
    requests: Annotated[int, typer.Option(help="Responses of the whole rollout.")] = 512,
    context: Context = 512,
    max_window: MaxWindow = 16,
    paper: PaperRules = False,
    alternatives: Annotated[int, typer.Option(help="How many losing placements of a drafter are shown.")] = 2,
) -> None:
    """Rank plans: drafters on devices of their own (SpecActor, algorithm 1), inside the engine, and plain decoding.

    Example: paceline plan policy.json --acceptance 0.8 --devices 8 --requests 512
    """
    _check_least(
        {"--devices": devices, "--requests": requests, "--context": context, "--max-window": max_window}
    )
    if alternatives < 0:
        raise ConfigError(f"--alternatives {alternatives}: must be at least 0")
    job = _read_job(profiles, acceptance, drafter, devices, requests, context, max_window, paper)
    candidates = [
        Candidate(name, job.acceptance[name], job.draft[name][min(job.draft[name])], job.draft[name])
        for name in job.acceptance
    ]
    made = Devices(job.devices, job.requests, job.verify)
    options = rank_options(made, candidates, job.max_window, job.rules, alternatives)
    if best_of(options, Mode.DECOUPLED) is None:
        typer.echo(
            f"drafters of their own do not fit {devices} devices beside an engine: only coupled plans are possible",
            err=True,
        )
    for profile in job.profiles:
        _warn_beyond(profile, context, _largest_batches(options, profile.num_gpus))
    _show_plans(options, job)


def _read_job(
    profiles: Sequence[Path],
    acceptance: Sequence[str],
    drafter: str | None,
    devices: int,
    requests: int,
    context: int,
    max_window: int,
    paper: bool,
) -> Job:
    loaded = [load_fits(path, None if paper else SEGMENTS) for path in profiles]
    if len({made.num_gpus for made, _, _ in loaded}) < len(loaded):
        raise ConfigError("two profiles are of engines of the same size: give one profile per size")
    kinds = {(made.target, made.dtype) for made, _, _ in loaded}
    if len(kinds) > 1:
        raise ConfigError(
            f"the profiles are of different targets: {', '.join(' '.join(k) for k in sorted(kinds))}"
        )
    largest = max(made.num_gpus for made, _, _ in loaded)
    if largest > devices:
        raise ConfigError(f"--devices {devices}: an engine of the profiles needs {largest}")
    draft: dict[str, dict[int, LatencyModel]] = {}
    for made, _, fits in loaded:
        for one in made.drafters:
            draft.setdefault(one.name, {})[one.num_gpus] = fits[one.name].model
    rates = read_rates("--acceptance", acceptance, list(draft))
    if drafter is not None:
        if drafter not in rates:
            raise ConfigError(
                f"--drafter {drafter!r}: no profiled drafter of that name has an acceptance rate"
            )
        rates = {drafter: rates[drafter]}
    verify = {made.num_gpus: target.model.for_requests_of(context) for made, target, _ in loaded}
    rules = Rules.PAPER if paper else Rules.PROTOCOL
    return Job(devices, requests, max_window, rules, verify, draft, rates, [made for made, _, _ in loaded])


def _show_plans(options: Sequence[Option], job: Job) -> None:
    plain = best_of(options, None)
    assert plain is not None
    table = Table(
        title=f"{job.requests} responses on {job.devices} devices",
        collapse_padding=True,  # so that it fits into 80 columns
        caption="on: devices of one drafter; engine: devices of one engine; tok/s: of one request",
    )
    texts = ("plan", "drafter")
    for column in (*texts, "on", "engine", "window", "batch", "tok/s", "x plain"):
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    for at, option in enumerate(options):
        table.add_row(
            option.mode or "plain",
            option.drafter,
            _ON[option.mode] or str(option.num_draft_gpus),
            str(option.num_verify_gpus),
            str(option.window or ""),
            str(option.batch),
            f"{option.tokens_per_s:.1f}",
            f"{option.tokens_per_s / plain.tokens_per_s:.2f}",
            style="bold" if at == 0 else "",
        )
    Console().print(table)


def _warn_beyond(made: Profile, context: int, batches: Mapping[str, int]) -> None:
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


def _largest_batches(options: Sequence[Option], num_gpus: int) -> dict[str, int]:
    """The largest batch of the engines of this size, and of each drafter beside them."""
    largest: dict[str, int] = {}
    for option in options:
        if option.num_verify_gpus == num_gpus:
            for name in {"", option.drafter}:
                largest[name] = max(largest.get(name, 0), option.batch)
    return largest


def _check_least(values: Mapping[str, int]) -> None:
    for option, value in values.items():
        if value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")

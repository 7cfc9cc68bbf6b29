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
from paceline.commands.profile import load_fits, write_check
from paceline.errors import ConfigError
from paceline.planning.ladder import LadderSettings, build_ladder, choose_first, rank_drafters
from paceline.planning.latency_profile import LatencyModel, PiecewiseLatency
from paceline.planning.placement import Cluster, place
from paceline.planning.window import Mode, Rules, best_window, profiled_times

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
    made, target, fits = load_fits(profile)
    rates = read_rates("--acceptance", acceptance, list(fits))
    if html is not None:
        write_check(html)
    settings = LadderSettings(batch, max_window, mode, _rules(paper))
    drafters: dict[str, LatencyModel] = {name: fit.model for name, fit in fits.items()}
    built = build_ladder(drafters, target.model.at_context(batch * context), settings)
    table = Table(title=f"{made.target}, batch {batch}, context {context}, {mode}")
    for column in ("drafter", "acceptance", "speed-up", "window"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for rung in rank_drafters(built, rates):
        table.add_row(rung.drafter, f"{rates[rung.drafter]:.2f}", f"{rung.speedup:.2f}", str(rung.window))
    Console().print(table)
    first = choose_first(built, rates)
    typer.echo(f"begin with: {first.drafter if first.window else 'no drafts'}")
    if html is not None:
        from paceline.report.plan_page import build_ladder_page

        facts = {"target": made.target, "batch": batch, "context": context, "mode": str(mode)}
        build_ladder_page(html, built, rates, facts)
        typer.echo(f"picture: {html}")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the devices."""

    label: str
    draft_devices: int
    verify_devices: int
    window: int
    batch: int
    tokens_per_s: float
    """Of one request."""


def plan(
    profiles: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROFILE...", help="One per engine size (tensor parallel size) of the target."
        ),
    ],
    acceptance: Acceptance,
    drafter: Annotated[
        str | None, typer.Option(help="Name of the drafter; default: the ladder's first.")
    ] = None,
    devices: Annotated[int, typer.Option(help="GPUs of the whole cluster.")] = 8,
    requests: Annotated[int, typer.Option(help="Responses of the whole rollout.")] = 512,
    context: Context = 512,
    max_window: MaxWindow = 16,
    paper: PaperRules = False,
    alternatives: Annotated[int, typer.Option(help="How many losing plans are shown.")] = 4,
) -> None:
    """Choose the decoupled plan (SpecActor, algorithm 1) and show what it beat: plain and coupled decoding too.

    Example: paceline plan policy.json --acceptance 0.8 --devices 8 --requests 512
    """
    _check_least(
        {
            "--devices": devices,
            "--requests": requests,
            "--context": context,
            "--max-window": max_window,
            "--alternatives": alternatives,
        }
    )
    loaded = [load_fits(path) for path in profiles]
    if len({made.num_gpus for made, _, _ in loaded}) < len(loaded):
        raise ConfigError("two profiles are of engines of the same size: give one profile per size")
    names = [name for name in loaded[0][2] if all(name in fits for _, _, fits in loaded)]
    rates = read_rates("--acceptance", acceptance, names)
    if drafter is not None and drafter not in names:
        raise ConfigError(f"--drafter {drafter!r}: the profiles have {', '.join(names) or 'none in common'}")
    largest = max(made.num_gpus for made, _, _ in loaded)
    if largest > devices:
        raise ConfigError(f"--devices {devices}: an engine of the profiles needs {largest}")
    share = max(-(-requests * largest // devices), 1)
    verify = {made.num_gpus: target.model.at_context(share * context) for made, target, _ in loaded}
    draft: dict[str, dict[int, LatencyModel]] = {
        name: {made.num_gpus: fits[name].model for made, _, fits in loaded} for name in names
    }
    chosen = drafter or _first_drafter(verify[largest], draft, rates, largest, share, max_window)
    options = _plain_and_coupled(
        verify, draft[chosen], rates[chosen], devices, requests, max_window, _rules(paper)
    )
    if devices > min(verify):
        cluster = Cluster(devices, requests, draft[chosen], verify)
        placed = place(cluster, rates[chosen], max_window, _rules(paper), alternatives)
        options += [
            Option("decoupled", p.num_draft_gpus, p.num_verify_gpus, p.window, p.batch, p.tokens_per_s)
            for p in (placed.best, *placed.alternatives)
        ]
    else:
        typer.echo(
            "a drafter of its own needs a second engine's device: only coupled plans are possible", err=True
        )
    _show_plans(options, chosen, rates[chosen], devices, requests)


def _first_drafter(
    verify: PiecewiseLatency,
    draft: Mapping[str, Mapping[int, LatencyModel]],
    rates: dict[str, float],
    size: int,
    batch: int,
    max_window: int,
) -> str:
    models = {name: by_size[size] for name, by_size in draft.items()}
    return choose_first(build_ladder(models, verify, LadderSettings(batch, max_window)), rates).drafter


def _plain_and_coupled(
    verify: Mapping[int, PiecewiseLatency],
    draft: Mapping[int, LatencyModel],
    acceptance: float,
    devices: int,
    requests: int,
    max_window: int,
    rules: Rules,
) -> list[Option]:
    options = []
    for size, model in sorted(verify.items()):
        batch = -(-requests // (devices // size))
        times = profiled_times(draft[size], model, batch, max_window)
        best = best_window(acceptance, times, Mode.COUPLED, rules)
        options.append(Option("plain", 0, size, 0, batch, 1.0 / float(times.verify_s[0])))
        if int(best.window):
            options.append(Option("coupled", size, size, int(best.window), batch, float(best.tokens_per_s)))
    return options


def _show_plans(
    options: Sequence[Option], drafter: str, acceptance: float, devices: int, requests: int
) -> None:
    ranked = sorted(options, key=lambda option: -option.tokens_per_s)
    plain = max(option.tokens_per_s for option in options if option.label == "plain")
    table = Table(
        title=f"{requests} responses on {devices} devices, drafter {drafter}, acceptance {acceptance:.2f}"
    )
    for column in (
        "plan",
        "draft devices",
        "verify devices",
        "window",
        "batch",
        "tokens/s of one",
        "over plain",
    ):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for at, option in enumerate(ranked):
        shares = "shared" if option.label == "coupled" else str(option.draft_devices or "")
        table.add_row(
            option.label,
            shares,
            str(option.verify_devices),
            str(option.window or ""),
            str(option.batch),
            f"{option.tokens_per_s:.1f}",
            f"{option.tokens_per_s / plain:.2f}",
            style="bold" if at == 0 else "",
        )
    Console().print(table)


def _rules(paper: bool) -> Rules:
    return Rules.PAPER if paper else Rules.PROTOCOL


def _check_least(values: dict[str, int]) -> None:
    for option, value in values.items():
        if value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")

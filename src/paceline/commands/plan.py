"""`paceline plan`: which drafter, how many devices for it, and which window, from profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.commands.inputs.lists import read_rates
from paceline.commands.inputs.profiles import (
    SEGMENTS,
    Acceptance,
    Context,
    MaxWindow,
    PaperRules,
    check_least,
    warn_beyond,
)
from paceline.config import MOST_DRAFT_TOKENS
from paceline.errors import ConfigError
from paceline.planning.composition import Candidate, Devices, Option, best_of, rank_options
from paceline.planning.ladder import rate_of
from paceline.planning.latency_profile import LatencyModel, RequestLatency
from paceline.planning.profile_fit import load_fits
from paceline.planning.window import Mode, Rules
from paceline.record.ladder_file import read_ladder
from paceline.record.plan_file import PlanFile, write_plan
from paceline.record.profile import Profile
from paceline.terminal.tables import make_table

_ON = {None: " ", Mode.COUPLED: "shared", Mode.DECOUPLED: ""}
"""Where a drafter runs that has no devices of its own."""


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
    acceptance: Acceptance = None,
    ladder: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take acceptance rates as measured: a file of 'paceline ladder --out', or a run folder's.",
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Name of the drafter; default: every one with an acceptance rate.")
    ] = None,
    devices: Annotated[int, typer.Option(help="GPUs of the whole cluster.")] = 8,
    requests: Annotated[int, typer.Option(help="Responses of the whole rollout.")] = 512,
    context: Context = 512,
    max_window: MaxWindow = 16,
    paper: PaperRules = False,
    alternatives: Annotated[int, typer.Option(help="How many losing placements of a drafter are shown.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="Write the best plan, for 'paceline rollout --plan'."),
    ] = None,
) -> None:
    """Rank plans: drafters on devices of their own (SpecActor, algorithm 1), inside the engine, and plain decoding.

    Example: paceline plan policy.json --ladder ladder.json --acceptance suffix=0.6 --devices 8 --requests 512
    """
    check_least(
        {"--devices": devices, "--requests": requests, "--context": context, "--max-window": max_window}
    )
    if alternatives < 0:
        raise ConfigError(f"--alternatives {alternatives}: must be at least 0")
    if max_window > MOST_DRAFT_TOKENS:
        raise ConfigError(
            f"--max-window {max_window}: engines draft at most {MOST_DRAFT_TOKENS} tokens in a row"
        )
    job = _read_job(
        profiles, ladder, acceptance or (), drafter, devices, requests, context, max_window, paper
    )
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
        warn_beyond(profile, context, _largest_batches(options, profile.num_gpus))
    _show_plans(options, job)
    if out is not None:
        write_plan(_to_file(options[0], job), out)


def _measured_rates(ladder: Path | None, names: Sequence[str]) -> list[str]:
    """As `--acceptance` has them. Raises ConfigError for a drafter that is not among `names`."""
    tried = {} if ladder is None else read_ladder(ladder).tried
    if others := sorted(tried.keys() - set(names)):
        raise ConfigError(
            f"--ladder {ladder} is of drafter {', '.join(others)}, the profiles are of {', '.join(names)}: profile the "
            "ladder's drafters, or measure a ladder of these"
        )
    return [f"{name}={rate_of(one)}" for name, one in tried.items()]


def _read_job(
    profiles: Sequence[Path],
    ladder: Path | None,
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
    given = [*_measured_rates(ladder, list(draft)), *acceptance]
    rates = read_rates("--acceptance", given, list(draft))
    if drafter is not None:
        if drafter not in rates:
            raise ConfigError(
                f"--drafter {drafter!r}: no profiled drafter of that name has an acceptance rate"
            )
        rates = {drafter: rates[drafter]}
    verify = {made.num_gpus: target.model.for_requests_of(context) for made, target, _ in loaded}
    rules = Rules.PAPER if paper else Rules.PROTOCOL
    return Job(devices, requests, max_window, rules, verify, draft, rates, [made for made, _, _ in loaded])


def _to_file(option: Option, job: Job) -> PlanFile:
    is_ahead = option.mode is Mode.DECOUPLED
    return PlanFile(
        target=job.profiles[0].target,
        mode="plain" if option.mode is None else option.mode.value,
        drafter=option.drafter,
        window=option.window,
        verifiers=option.num_groups,
        drafters=option.num_groups if is_ahead else 0,
        engine_devices=option.num_verify_gpus,
        drafter_devices=option.num_draft_gpus,
        devices=job.devices,
        requests=job.requests,
        tokens_per_s=option.tokens_per_s,
    )


def _show_plans(options: Sequence[Option], job: Job) -> None:
    plain = best_of(options, None)
    assert plain is not None
    table = make_table(
        ("plan", "drafter"),
        ("on", "engine", "window", "batch", "tok/s", "x plain"),
        title=f"{job.requests} responses on {job.devices} devices",
        caption="on: devices of one drafter; engine: devices of one engine; tok/s: of one request",
    )
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


def _largest_batches(options: Sequence[Option], num_gpus: int) -> dict[str, int]:
    """The largest batch of the engines of this size, and of each drafter beside them."""
    largest: dict[str, int] = {}
    for option in options:
        if option.num_verify_gpus == num_gpus:
            for name in {"", option.drafter}:
                largest[name] = max(largest.get(name, 0), option.batch)
    return largest

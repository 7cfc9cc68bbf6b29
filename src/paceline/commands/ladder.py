"""`paceline ladder`: what each drafter gains at which acceptance rate, measured on the engine; which is the best?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from paceline.commands.inputs.launch import Launch, check_batch, check_model_drafter, fit_length, hush
from paceline.commands.inputs.lists import read_rates
from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.commands.inputs.options import (
    Compiled,
    Dtype,
    KvCacheGib,
    MaxTokens,
    ModelArgument,
    PromptsArgument,
    Seed,
    Temperature,
    check_seed,
    check_writable,
)
from paceline.commands.inputs.profiles import check_least
from paceline.commands.inputs.prompts import Prompt, read_prompts
from paceline.commands.inputs.sampling import Sampling
from paceline.config import EngineSettings, describe
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError
from paceline.planning.ladder import Rung, rank_drafters, rate_of
from paceline.record.ladder_file import Ladder, LadderFile, Tried, write_ladder
from paceline.terminal.screen import error_console
from paceline.terminal.tables import make_table
from paceline.types import RolloutRequest


def ladder(
    model: ModelArgument,
    prompts: PromptsArgument,
    drafter: Annotated[
        list[Path],
        typer.Option(
            metavar="DIR", help="Folder of a small model to measure; may be given up to four times."
        ),
    ],
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE|NAME=RATE",
            help="Acceptance rate of the drafters, or of one of them, in place of what it is measured to be.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Responses that run at once.")] = 8,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was measured here, as JSON.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ladder here.")] = None,
    dtype: Dtype = "auto",
    compiled: Compiled = True,
    kv_cache_gib: KvCacheGib = 1.0,
) -> None:
    """Measure how much faster than plain decoding the engine is with each drafter, at several acceptance rates.

    The engine generates responses to the first prompts, then the same again and again, while each drafter drafts and
    its tokens are right as often as wanted. The last turn is the drafters' own, which says how often they are right.

    Example: paceline ladder models/policy prompts.jsonl --drafter models/small --drafter models/tiny
    """
    check_least({"--batch": batch})
    check_seed(seed)
    if not is_cpu_build():
        raise ConfigError("ladder: several model drafters need vLLM's model runner V1, which is for the CPU")
    sampling = Sampling(max_tokens, temperature)
    for option, path in (("--out", out), ("--html", html)):
        if path is not None:
            check_writable(option, path)
    settings = _settings(drafter, seed, compiled)
    checkpoint = read_checkpoint(model)
    for folder in drafter:
        check_model_drafter(folder, checkpoint)
    names = settings.drafter_names
    given = read_rates("--acceptance", acceptance, names) if acceptance else {}
    known = read_prompts(prompts, checkpoint, ())[:batch]
    length = fit_length(checkpoint, known, max_tokens)
    kv_cache_bytes = check_batch(
        checkpoint, dtype=dtype, max_model_len=length, max_num_seqs=batch, kv_cache_gib=kv_cache_gib
    )
    launch = Launch(
        model, settings, dtype, length, batch, kv_cache_bytes, not checkpoint.has_tokenizer, compiled
    )
    console = error_console()
    made = _measure(_Job(launch, sampling, seed, known, batch, names), console)
    rates = {name: rate_of(made.tried.get(name, Tried())) for name in names} | given
    assert made.ladder is not None
    ranked = rank_drafters(made.ladder, rates)
    Console().print(ladder_table(model.resolve().name, made.ladder, ranked))
    typer.echo(f"begin with: {ranked[0].drafter if ranked[0].speedup > 1.0 else 'no model drafter'}")
    if out is not None:
        write_ladder(made, out)
        typer.echo(f"ladder: {out}")
    if html is not None:
        from paceline.report.plan_page import build_ladder_page

        build_ladder_page(html, made.ladder, rates, {"target": model.resolve().name, "responses": batch})
        typer.echo(f"picture: {html}")


def _settings(drafters: Sequence[Path], seed: int, compiled: bool) -> EngineSettings:
    folders = [str(folder.resolve()) for folder in drafters]
    fields = {
        "run_seed": seed,
        "drafter": "none",
        "model_drafter": folders[0],
        "further_drafters": folders[1:],
        "compiled": compiled,
    }
    try:
        return EngineSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"--drafter: {describe(error)}") from error


@dataclass(frozen=True, slots=True)
class _Job:
    """What is measured."""

    launch: Launch
    sampling: Sampling
    seed: int
    prompts: Sequence[Prompt]
    batch: int
    names: Sequence[str]


def _measure(job: _Job, console: Console) -> LadderFile:
    from paceline.engine.rungs import measure_ladder

    prompts = [job.prompts[place % len(job.prompts)] for place in range(job.batch)]
    requests = [
        RolloutRequest(prompt.tokens, job.sampling.max_tokens, sample=place // len(job.prompts))
        for place, prompt in enumerate(prompts)
    ]
    params = job.sampling.build()
    console.print("starting the engine")
    with hush():
        engine = job.launch.start()
    with engine:
        responses = engine.generate(requests, params)
        return measure_ladder(
            engine, responses, params, tell=lambda text: console.print(text, highlight=False)
        )


def ladder_table(target: str, made: Ladder, ranked: Sequence[Rung]) -> Table:
    """What was measured, the best drafter first."""
    by_name = {one.drafter: one.speedup for one in made.drafters}
    headings = (*(f"{rate:g}" for rate in made.rates), "acceptance", "speed-up")
    title = f"{target}, {made.batch} responses: times plain decoding by acceptance rate, and at each drafter's own"
    table = make_table(("drafter",), headings, title=title)
    for rung in ranked:
        cells = [*by_name[rung.drafter], rung.acceptance, rung.speedup]
        table.add_row(rung.drafter, *(f"{cell:.2f}" for cell in cells))
    return table

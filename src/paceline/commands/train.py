"""`paceline train`: post-train a policy from a recipe, rollouts accelerated and recorded."""

from __future__ import annotations

import os
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.commands.inputs.launch import check_batch, check_model_drafter, hush
from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.engine.arguments import check_vllm_arguments
from paceline.errors import ConfigError, PacelineError, RecordError, TrainingError
from paceline.fleet.cluster import check_fleet
from paceline.garbage import uncollected
from paceline.record import FILE_NAME
from paceline.terminal.interruption import INTERRUPTED
from paceline.terminal.screen import Screen
from paceline.training.recipe import Recipe, load_recipe
from paceline.training.run_folder import DRAFTER, GROWN, LOG, check_folder

if TYPE_CHECKING:
    from paceline.training.step_runner import Summary

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; recipes/ holds examples.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run: record, checkpoints, report.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in DIR, exactly where it stopped.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in DIR.")] = False,
    steps: Annotated[int | None, typer.Option(help="Training steps, in place of the recipe's.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Roll out on N engines in Ray actors; unset: what the recipe says."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Change a value of the recipe; may be repeated."
        ),
    ] = None,
) -> None:
    """Train a policy with reinforcement learning; rollouts draft, tokens stay those of plain decoding.

    Stop with Ctrl-C at any time and go on with --resume: the result is that of a run that was never stopped. What the
    libraries print is in DIR/log.txt; at the end DIR/report.html shows the run.

    Example: paceline train recipes/countdown.yaml --out runs/countdown --set batch.prompts=4
    """
    check_folder(out, resume=resume, overwrite=overwrite)
    given = {"steps": steps, "fleet.workers": workers}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    wanted = load_recipe(recipe, [*(overrides or []), *changes])
    if wanted.fleet is not None:
        check_fleet(wanted.fleet, len(os.sched_getaffinity(0)))
    if (drafter := wanted.engine.model_drafter) is not None:
        check_model_drafter(Path(drafter), read_checkpoint(Path(wanted.model)))
    if resume and not (out / FILE_NAME).exists():
        typer.echo(f"nothing to resume in {out}: this run begins anew", err=True)
    summary = _run(wanted, out, resume=resume, overwrite=overwrite)
    console = Console(soft_wrap=True)
    _print_summary(console, summary, out)
    if summary.reason == "interrupted":
        console.print(f"stopped after step {summary.steps}; go on with --resume", highlight=False)
        raise typer.Exit(INTERRUPTED)


def _check_capacity(recipe: Recipe) -> None:
    """Raise ConfigError for engines that cannot be, before a run that is to be overwritten is touched."""
    capacity, lengths = recipe.capacity, recipe.lengths
    checkpoint = read_checkpoint(Path(recipe.model))
    if checkpoint.max_len is not None and recipe.context_tokens > checkpoint.max_len:
        raise ConfigError(
            f"lengths.prompt_tokens + lengths.response_tokens = {lengths.prompt_tokens} + {lengths.response_tokens} "
            f"exceeds the {checkpoint.max_len} positions of {recipe.model}: lower one"
        )
    check_batch(
        checkpoint,
        dtype=capacity.dtype,
        max_model_len=recipe.context_tokens,
        max_num_seqs=capacity.max_num_seqs,
        kv_cache_gib=capacity.kv_cache_mib / 1024,
        num_engines=recipe.fleet.workers if recipe.fleet is not None else 1,
        names=("capacity.max_num_seqs", "capacity.kv_cache_mib", "lengths.response_tokens"),
    )


def _run(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> Summary:
    """Train while everything that the libraries print goes to the run's log."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot make --out {out}: {error.strerror}; choose another folder") from error
    _check_capacity(recipe)
    log = out / LOG
    with open(os.dup(1), "w", buffering=1) as screen:
        console = Console(file=Screen(screen), highlight=False)  # type: ignore[arg-type]
        console.print(f"preparing {recipe.task.name} and {recipe.model}", soft_wrap=True)
        with hush(log):
            try:
                with uncollected():
                    from paceline.training.run import TrainingRun

                check_vllm_arguments(recipe.capacity.vllm, "capacity.vllm")
                run = TrainingRun(recipe, out, console, resume=resume, overwrite=overwrite)
                return run.run(tell_fd=screen.fileno())
            except PacelineError:
                raise
            except Exception as error:
                if os.strerror(ENOSPC) in str(error):
                    raise RecordError(
                        f"the disk of {out} is full: free some space; --resume goes on from the last checkpoint"
                    ) from error
                raise TrainingError(
                    f"training failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}; {log} has the "
                    "whole story, --resume goes on from the last checkpoint"
                ) from error


def _print_summary(console: Console, summary: Summary, out: Path) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(summary, out):
        table.add_row(name, value)
    console.print(table)


def _facts(summary: Summary, out: Path) -> list[tuple[str, str]]:
    facts = [("steps", str(summary.steps))]
    if rates := list(summary.solve_rates.items()):
        (first, before), (last, after) = rates[0], rates[-1]
        facts.append(("held-out solve rate", f"{before:.1%} (step {first}) -> {after:.1%} (step {last})"))
    if summary.speed_up is not None:
        count = len(summary.comparisons)
        facts.append(("rollouts against plain", f"{summary.speed_up:.2f}x, median of {count} compared steps"))
        facts.append(
            ("same tokens", f"{summary.diverged_tokens} of {summary.compared_tokens} compared tokens differ")
        )
    if summary.acceptance_length:
        facts.append(
            ("acceptance length", f"{summary.acceptance_length:.2f} tokens per response and engine step")
        )
    total_s = sum(summary.phases_s.values())
    if total_s:
        ordered = sorted(summary.phases_s.items(), key=lambda item: -item[1])
        shares = (
            f"{name.replace('_', ' ')} {seconds:.0f} s ({seconds / total_s:.0%})" for name, seconds in ordered
        )
        facts.append(("time", ", ".join(shares)))
    if (grown := out / DRAFTER / GROWN).is_dir():
        facts.append(("drafter", str(grown)))
    return [*facts, ("run folder", str(out)), ("report", str(summary.report))]

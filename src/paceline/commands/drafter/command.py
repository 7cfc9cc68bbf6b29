"""`paceline drafter`: train a drafter on the responses of a rollout, measure it, and export it for other engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.errors import ConfigError, RecordError

drafter = typer.Typer(
    help="Train, measure and export drafters, on the responses of 'paceline rollout'.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TargetArgument = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder of the model that wrote the responses.")
]
ResponsesArgument = Annotated[
    Path, typer.Argument(metavar="RESPONSES.jsonl", help="Output of 'paceline rollout'.")
]
Threads = Annotated[int, typer.Option(help="Threads; 0: as many as torch finds cores.")]


@drafter.command()
def train(
    target: TargetArgument,
    responses: ResponsesArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the training; export it afterwards.")],
    method: Annotated[
        Literal["eagle", "hass", "eagle3", "osd"],
        typer.Option(
            help="What is trained: a head on the target's states (eagle, hass, eagle3), or a small model (osd)."
        ),
    ] = "eagle3",
    loss: Annotated[
        Literal["forward_kl", "reverse_kl", "total_variation", "disagreement", "log_disagreement"] | None,
        typer.Option(
            help="Between the distributions of target and drafter.", show_default="the method's own"
        ),
    ] = None,
    core_minutes: Annotated[float, typer.Option(help="Processor time to train for, minutes.")] = 10.0,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 4e-3,
    small_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With osd: the small language model to begin from.")
    ] = None,
    max_memory_gib: Annotated[
        float, typer.Option(help="Most memory for the target's states; responses beyond are left out.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the responses.")] = 0,
    threads: Threads = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in DIR.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DIR.")] = False,
) -> None:
    """Train a drafter on what a target has written.

    Saved every five seconds: stop with Ctrl-C at any time, and go on with --resume.

    Example: paceline drafter train models/policy responses.jsonl --out runs/head --core-minutes 10
    """
    if not 0 < core_minutes < math.inf:
        raise ConfigError(f"--core-minutes {core_minutes}: must be above 0, and finite")
    if not 0 < rate <= 1:
        raise ConfigError(f"--rate {rate}: must be above 0, and at most 1; 0.004 suits a fresh drafter")
    _check_threads(threads)
    read_checkpoint(target)
    from paceline.commands.drafter.job import TrainingJob, run_training

    job = TrainingJob(
        target,
        responses,
        out,
        method,
        loss,
        core_minutes * 60,
        rate,
        small_model,
        max_memory_gib,
        seed,
        threads,
    )
    run_training(job, resume=resume, overwrite=overwrite)


@drafter.command()
def measure(
    target: TargetArgument,
    responses: ResponsesArgument,
    drafter: Annotated[
        Path,
        typer.Argument(metavar="DRAFTER", help="Folder of 'drafter train', or of a small language model."),
    ],
    depth: Annotated[int, typer.Option(help="Draft tokens of a verification.")] = 5,
    sharpness: Annotated[
        float, typer.Option(help="Exponent on the drafter's distribution; inf: greedy drafts.")
    ] = 1.0,
    threads: Threads = 0,
) -> None:
    """Say what a drafter's drafts are worth: the very tokens that an engine with shared dice would accept.

    Every response is drafted for again, in chains of --depth tokens. Use responses that it was not trained on.
    """
    if depth < 1 or not sharpness > 0:
        raise ConfigError(f"--depth {depth}, --sharpness {sharpness}: both must be above 0")
    _check_threads(threads)
    read_checkpoint(target)
    from paceline.commands.drafter.job import run_measuring

    run_measuring(target, responses, drafter, depth, sharpness, threads)


def _check_threads(threads: int) -> None:
    if threads < 0:
        raise ConfigError(f"--threads {threads}: must be 0, as many as torch finds cores, or more")


@drafter.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of 'drafter train'.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the checkpoint.")],
    form: Annotated[
        Literal["huggingface", "speculators"],
        typer.Option(help="huggingface: vLLM and SGLang; speculators: vLLM, for eagle3 alone."),
    ] = "huggingface",
    target: Annotated[str, typer.Option(help="With speculators: the target's name or folder.")] = "",
) -> None:
    """Write a trained drafter as a checkpoint for vLLM's methods eagle, eagle3 and draft_model, and for SGLang.

    Example: vllm serve models/policy --speculative-config '{"method": "eagle3", "model": "OUT", ...}'
    """
    if form == "speculators" and not target:
        raise ConfigError("--form speculators names the target in the checkpoint: give --target")
    if (out / "config.json").exists():
        raise RecordError(f"{out} holds a checkpoint already: choose another --out")
    from paceline.distillation import export as exporting
    from paceline.distillation.training_folder import find_newest, read_folder

    found = read_folder(folder, find_newest(folder))
    if found is None:
        raise RecordError(f"{folder} holds no drafter: train one with 'paceline drafter train'")
    exporting.export(*found, out, form, target)
    typer.echo(f"exported: {out}")

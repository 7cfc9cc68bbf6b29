"""`paceline rollout`: responses for a prompts file, written as they finish, resumable token for token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from paceline.commands.inputs.best_drafter import begin_with_best
from paceline.commands.inputs.launch import (
    Launch,
    build_settings,
    check_batch,
    check_model_drafter,
    fit_length,
)
from paceline.commands.inputs.model_folder import load_tokenizer, read_checkpoint
from paceline.commands.inputs.options import (
    Compiled,
    DraftWorker,
    DraftWorkerAuto,
    Dtype,
    FurtherDrafter,
    KvCacheGib,
    LinearKernel,
    MaxNumSeqs,
    MaxTokens,
    MinP,
    ModelArgument,
    ModelDrafter,
    PromptsArgument,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_seed,
    check_writable,
)
from paceline.commands.inputs.planned import carry_out, warn_of_others
from paceline.commands.inputs.prompts import read_prompts
from paceline.commands.inputs.sampling import Sampling
from paceline.commands.rollout.fleet_job import check_fleet_job, has_journal, journal_of, run_fleet_job
from paceline.commands.rollout.job import plan_job, run_job
from paceline.commands.rollout.responses import RESERVED, ResponseFile, refuse_existing
from paceline.commands.rollout.rollout_record import RolloutRecord, refuse_existing_record
from paceline.config import FleetSettings, OnFailure, describe
from paceline.errors import ConfigError
from paceline.record.plan_file import PlanFile, read_plan
from paceline.terminal.screen import error_console


def rollout(
    model: ModelArgument,
    prompts: PromptsArgument,
    out: Annotated[
        Path, typer.Option(metavar="OUT.jsonl", help="File for the responses, one JSON line each.")
    ],
    samples: Annotated[int, typer.Option(help="Responses per prompt (the group size).")] = 1,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
    seed: Seed = 0,
    drafter: Annotated[
        Literal["suffix", "lookup", "none"],
        typer.Option(
            help="Where drafts come from: the group's suffix tree, n-gram lookup in the own response, or none. "
            "Changes the speed alone, never a token.",
            rich_help_panel="Engine",
        ),
    ] = "suffix",
    model_drafter: ModelDrafter = None,
    draft_worker: DraftWorker = False,
    draft_worker_auto: DraftWorkerAuto = False,
    further_drafter: FurtherDrafter = None,
    ladder: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of the drafters begin with the one that promises most by this draft ladder: a file of 'paceline "
            "ladder --out', or a training run's ladder.json.",
            rich_help_panel="Engine",
        ),
    ] = None,
    draft_server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Draft server to share drafts over, tcp://HOST:PORT; may be given several times. With --workers on "
            "this machine alone one is started by itself.",
            rich_help_panel="Engine",
        ),
    ] = None,
    draft_secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Secret that the draft servers were started with, at the same path everywhere.",
            rich_help_panel="Engine",
        ),
    ] = None,
    dtype: Dtype = "auto",
    compiled: Compiled = True,
    linear_kernel: LinearKernel = None,
    max_num_seqs: MaxNumSeqs = 128,
    kv_cache_gib: KvCacheGib = 1.0,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="vLLM without Paceline: its own random draws, not resumable.",
            rich_help_panel="Engine",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Roll out on N engines in Ray actors; unset: on one engine in this process.",
            rich_help_panel="Fleet",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json",
            help="Carry out a plan of 'paceline plan --out': its number of workers, their roles and the draft window.",
            rich_help_panel="Fleet",
        ),
    ] = None,
    variant: Annotated[
        Literal["even", "context", "no-context", "sticky", "group"] | None,
        typer.Option(
            help="Which responses run first and where: even (the fewest tokens), context (Seer), no-context (in "
            "order), sticky (a response stays on one worker), group (a group stays on one worker).",
            show_default="even; sticky without a KV pool",
            rich_help_panel="Fleet",
        ),
    ] = None,
    help_stragglers: Annotated[
        Literal["none", "auto", "draft", "copy", "take"] | None,
        typer.Option(
            help="What a worker does that falls free: nothing, draft ahead for another one, generate a copy of its "
            "longest response, take over some, or whichever ends the rollout first (auto).",
            show_default="none",
            rich_help_panel="Fleet",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens after which a response may go on elsewhere.",
            show_default="8192",
            rich_help_panel="Fleet",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster to join; unset: this machine alone.",
            rich_help_panel="Fleet",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve metrics of the workers for Prometheus at this port.", rich_help_panel="Fleet"
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve them at this address of the machine; 0.0.0.0: at all of its addresses.",
            show_default="127.0.0.1",
            rich_help_panel="Fleet",
        ),
    ] = None,
    on_failure: Annotated[
        OnFailure,
        typer.Option(
            help="What becomes of a response that fails (no token left to draw, NaN, or it ends its workers): deliver "
            "it as far as it came, with finish_reason 'error', while the others go on, or raise an error.",
        ),
    ] = "deliver",
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record what ran when on which worker; 'paceline report DIR' shows it.",
            rich_help_panel="Fleet",
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Log what was decided, and on what grounds, into this folder, for 'paceline replay'.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Make only what is missing in OUT.jsonl.")] = False,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="With --resume: make responses that have failed again; their lines go."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.jsonl.")] = False,
) -> None:
    """Generate responses for a file of prompts.

    Every response is written to OUT.jsonl as it finishes: tokens, text, log-probabilities, dice key, finish reason and
    what was drafted. Stop with Ctrl-C at any time and go on with --resume: the result is the same, order aside, as
    that of a run that was never stopped.

    Example: paceline rollout models/policy prompts.jsonl --out responses.jsonl --samples 8 --workers 4
    """
    planned = None if plan is None else _read_plan(plan, workers)
    fleet = _fleet_settings(
        workers if planned is None else planned.workers,
        {
            "roles": None if planned is None else planned.roles,
            "variant": variant,
            "help_stragglers": help_stragglers,
            "chunk_tokens": chunk_tokens,
            "ray_address": ray_address,
            "metrics_port": metrics_port,
            "metrics_host": metrics_host,
        },
        on_failure,
    )
    sampling = Sampling(max_tokens, temperature, top_p, top_k, min_p, tuple(stop or ()))
    if further_drafter and not (draft_worker or ladder):
        raise ConfigError(
            "--further-drafter drafts in a process of its own, or instead of the model drafter: give --draft-worker, "
            "or --ladder"
        )
    _check_switches(samples, resume, overwrite, plain, model_drafter, linear_kernel)
    if retry_failed and not resume:
        raise ConfigError("--retry-failed goes on with an output that is there: give --resume too")
    _check_record(record, fleet)
    _check_sharing(plain, draft_server or (), draft_secret_file)
    check_seed(seed)
    _check_decisions(decisions, plain)
    settings = build_settings(
        seed,
        drafter,
        model_drafter,
        draft_server or (),
        draft_secret_file,
        decisions,
        compiled=compiled,
        draft_worker="auto" if draft_worker_auto else draft_worker,
        further_drafters=further_drafter or (),
        linear_kernel=linear_kernel,
    )
    console = error_console()
    known = None
    if ladder is not None:
        helps = fleet is not None and fleet.help in {"auto", "draft"}
        settings, rung, known = begin_with_best(settings, ladder, keeps_others=draft_worker or helps)
        console.print(
            f"drafter {rung.drafter}: {rung.speedup:.2f} times plain decoding by the ladder at an acceptance rate of "
            f"{rung.acceptance:.2f}",
            highlight=False,
        )
    if planned is not None:
        settings = carry_out(planned, settings)
        warn_of_others(planned, model, settings)
    if record is not None:
        refuse_existing_record(record, may_go=resume or overwrite)
    if not (resume or overwrite):
        refuse_existing(out, is_begun=has_journal(out))
    checkpoint = read_checkpoint(model)
    for folder in (model_drafter, *(further_drafter or ())):
        check_model_drafter(folder, checkpoint)
    if sampling.stop:
        load_tokenizer(checkpoint)
    known_prompts = read_prompts(prompts, checkpoint, RESERVED)
    length = fit_length(checkpoint, known_prompts, max_tokens)
    kv_cache_bytes = check_batch(
        checkpoint,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        num_engines=1 if fleet is None or ray_address else fleet.workers,
    )
    launch = Launch(
        model=model,
        settings=None if plain else settings,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=kv_cache_bytes,
        skip_tokenizer=not checkpoint.has_tokenizer,
        compiled=compiled,
    )
    if fleet is not None:
        check_fleet_job(launch, sampling, fleet)
    if resume:
        file, done = ResponseFile.resume(out, without_failed=retry_failed)
    else:
        file, done = ResponseFile.create(out, overwrite=overwrite), {}
    with file:
        job = plan_job(checkpoint, launch, sampling, seed, known_prompts, samples, out, done)
        if fleet is None:
            if overwrite:
                journal_of(out).unlink(missing_ok=True)
            run_job(job, file, console, on_failure)
            journal_of(out).unlink(missing_ok=True)
        elif record is None:
            run_fleet_job(job, fleet, file, console, resume=resume, ladder=known)
        else:
            with RolloutRecord(record, job, fleet, resume=resume, overwrite=overwrite) as told:
                run_fleet_job(job, fleet, file, console, resume=resume, record=told, ladder=known)


def _fleet_settings(
    workers: int | None, options: Mapping[str, object], on_failure: OnFailure
) -> FleetSettings | None:
    """The fleet's, None without `--workers`. options: the other options of a fleet, None where they were not given."""
    given = {name: value for name, value in options.items() if value is not None}
    if workers is None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names}: for a fleet; add --workers N, or leave it away")
        return None
    fields = {"workers": workers, "on_failure": on_failure, **given}
    for name, field in (("ray_address", "address"), ("help_stragglers", "help")):
        if name in fields:
            fields[field] = fields.pop(name)
    try:
        return FleetSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"fleet: {describe(error)}") from error


def _read_plan(path: Path, workers: int | None) -> PlanFile:
    if workers is not None:
        raise ConfigError("--plan says how many workers there are: drop --workers")
    return read_plan(path)


def _check_record(record: Path | None, fleet: FleetSettings | None) -> None:
    if record is None:
        return
    if fleet is None:
        raise ConfigError("--record tells what ran on which worker of a fleet: give --workers too")
    if record.exists() and not record.is_dir():
        raise ConfigError(f"--record {record} is a file: give a folder")


def _check_decisions(folder: Path | None, plain: bool) -> None:
    if folder is None:
        return
    if plain:
        raise ConfigError("--plain runs vLLM without Paceline, which decides nothing: drop --decisions")
    if folder.is_file():
        raise ConfigError(f"--decisions {folder} is a file: give a folder")
    check_writable("--decisions", folder / "engine")


def _check_sharing(plain: bool, servers: Sequence[str], secret: Path | None) -> None:
    if plain and servers:
        raise ConfigError(
            "--plain runs vLLM without Paceline, so --draft-server cannot help: drop one of them"
        )
    if secret is not None and not servers:
        raise ConfigError("--draft-secret-file without --draft-server: name the server that it is for")


def _check_switches(
    samples: int,
    resume: bool,
    overwrite: bool,
    plain: bool,
    model_drafter: Path | None,
    linear_kernel: str | None,
) -> None:
    if samples < 1:
        raise ConfigError(f"--samples {samples}: at least 1 response per prompt")
    if resume and overwrite:
        raise ConfigError("--resume keeps what is there, --overwrite replaces it: give one of them")
    if plain and resume:
        raise ConfigError(
            "--plain --resume: without the dice the missing responses would be drawn anew, and as short ones finish "
            "first, too many would be short; use --drafter none for plain decoding that resumes exactly"
        )
    if plain and model_drafter is not None:
        raise ConfigError(
            "--plain runs vLLM without Paceline, so --model-drafter cannot draft: drop one of them"
        )
    if plain and linear_kernel not in (None, "vllm"):
        raise ConfigError("--plain runs vLLM without Paceline and its --linear-kernel: drop one of them")

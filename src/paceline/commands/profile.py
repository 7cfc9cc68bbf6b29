"""`paceline profile`: what steps of the target and tokens of its drafters cost on this machine, in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.commands.inputs.launch import GIB, Launch, check_batch, describe_failure, hush
from paceline.commands.inputs.lists import read_counts
from paceline.commands.inputs.model_folder import Checkpoint, check_drafter, read_checkpoint
from paceline.commands.inputs.options import Compiled, Dtype, ModelArgument, check_writable
from paceline.drafting.drafter import is_draft_head
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.planning.latency_profile import AffineLatency, LatencyFit, StepLatency
from paceline.planning.profile_fit import fit_profile
from paceline.record import describe_machine, describe_versions
from paceline.record.profile import (
    PROFILE_VERSION,
    DrafterProfile,
    Profile,
    StepPoint,
    write_profile,
)
from paceline.terminal.screen import error_console
from paceline.terminal.tables import make_table

if TYPE_CHECKING:
    from paceline.engine.profiling import Shape

SUFFIX = "suffix"
BLOCK_TOKENS = 128
"""Largest block of keys and values in which engines hand out memory, tokens."""
TELL_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""


def profile(
    model: ModelArgument,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Where the profile goes; its picture goes beside it, as .html."),
    ] = Path("profile.json"),
    drafter: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Folder of a small model to profile too; may be given several times."
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Requests per step.")] = "1,4,16,64",
    tokens: Annotated[
        str, typer.Option(help="Tokens per request and step: a draft and the token before it.")
    ] = "1,2,4,8,16",
    contexts: Annotated[str, typer.Option(help="Tokens of each request so far.")] = "128,512",
    repetitions: Annotated[int, typer.Option(help="Passes through all of it.")] = 3,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="GPUs that the engine runs on.", rich_help_panel="Engine")
    ] = 1,
    dtype: Dtype = "auto",
    compiled: Compiled = True,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory for keys and values, GiB (CPU only); default: what the largest step needs.",
            rich_help_panel="Engine",
        ),
    ] = None,
) -> None:
    """Measure step times over batch, tokens per request and context, and each drafter's time.

    `paceline plan` and `paceline simulate` read the file. Suffix trees are profiled always.

    Example: paceline profile models/policy --drafter models/small --out policy.json
    """
    from paceline.engine.profiling import Shape, longest_response, profiling_settings

    sizes, widths = read_counts("--batches", batches), read_counts("--tokens", tokens)
    lengths = read_counts("--contexts", contexts)
    if repetitions < 1:
        raise ConfigError(f"--repetitions {repetitions}: must be at least 1")
    if len({b * q for b in sizes for q in widths}) < 2:
        raise ConfigError(
            "steps of one size alone fix no step-time model: give several --batches or --tokens"
        )
    if tensor_parallel_size < 1 or (tensor_parallel_size > 1 and is_cpu_build()):
        raise ConfigError(f"--tensor-parallel-size {tensor_parallel_size}: at least 1, and 1 on a CPU engine")
    if drafter and not is_cpu_build():
        raise ConfigError(
            "--drafter: on a GPU small models draft inside vLLM, which cannot be profiled yet: leave it out"
        )
    page = _check_out(out)
    settings = profiling_settings(widths[-1], compiled)
    checkpoint = read_checkpoint(model)
    folders = _check_drafters(drafter or [], checkpoint)
    length = lengths[-1] + longest_response(widths)
    if checkpoint.max_len is not None and length > checkpoint.max_len:
        raise ConfigError(
            f"contexts of {lengths[-1]} tokens and the drafts need {length} positions, {model} has "
            f"{checkpoint.max_len}: lower --contexts"
        )
    kv_cache_bytes = _fit_cache(checkpoint, dtype, sizes[-1], length, kv_cache_gib)
    launch = Launch(
        model, settings, dtype, length, sizes[-1], kv_cache_bytes, not checkpoint.has_tokenizer, compiled
    )
    shapes = [Shape(b, q, c) for b, c, q in product(sizes, lengths, widths)]
    console = error_console()
    drafters = _measure_drafters(folders, sizes, lengths[-1], console)
    steps, used_dtype, threads = _measure_target(launch, tensor_parallel_size, shapes, repetitions, console)
    made = Profile(
        version=PROFILE_VERSION,
        target=model.resolve().name,
        dtype=used_dtype,
        compiled=compiled,
        linear_kernel=launch.linear_kernel,
        num_gpus=tensor_parallel_size,
        threads=threads,
        machine=describe_machine(),
        versions=describe_versions(),
        steps=steps,
        drafters=drafters,
    )
    write_profile(made, out)
    typer.echo(f"profile: {out}")
    target, fits = fit_profile(made)
    _show(made, target, fits)
    from paceline.report.plan_page import build_profile_page

    build_profile_page(page, made, target, fits)
    typer.echo(f"picture: {page}")


def _check_out(out: Path) -> Path:
    """Where the picture goes."""
    check_writable("--out", out)
    page = out.with_suffix(".html")
    if page == out:
        raise ConfigError(
            f"--out {out}: the picture goes there; give the profile another ending, such as .json"
        )
    check_writable("--out", out)
    check_writable("--out", page)
    return page


def _fit_cache(checkpoint: Checkpoint, dtype: str, batch: int, length: int, gib: float | None) -> int:
    """Bytes of the key-value cache. Raises ConfigError where it does not hold the largest step."""
    per_token = checkpoint.kv_bytes_per_token(dtype)
    needed = (per_token or 0) * batch * -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
    if gib is None:
        gib = max(needed / GIB * 1.1, 0.25) if per_token else 1.0
    elif is_cpu_build() and needed > gib * GIB:
        raise ConfigError(
            f"{batch} requests of {length} tokens need {needed / GIB:.2f} GiB of key-value cache, --kv-cache-gib is "
            f"{gib:g}: raise it, or lower --batches or --contexts"
        )
    return check_batch(checkpoint, dtype=dtype, max_model_len=length, max_num_seqs=batch, kv_cache_gib=gib)


def _check_drafters(folders: Sequence[Path], target: Checkpoint) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for folder in folders:
        if is_draft_head(folder):
            raise ConfigError(
                f"--drafter {folder} is a draft head, which drafts from a running target's states: give small language "
                "models"
            )
        check_drafter(read_checkpoint(folder), target)
        name = folder.resolve().name
        if name in named or name == SUFFIX:
            raise ConfigError(
                f"--drafter {folder}: drafters go by their folder's name, and {name!r} is taken; rename it"
            )
        named[name] = folder
    return named


def _teller(console: Console) -> Callable[[str], None]:
    """Progress in lines, not more often than every TELL_S seconds."""
    last_s = [float("-inf")]

    def tell(text: str) -> None:
        if time.monotonic() - last_s[0] >= TELL_S:
            last_s[0] = time.monotonic()
            console.print(text, highlight=False)

    return tell


def _measure_target(
    launch: Launch, num_gpus: int, shapes: Sequence[Shape], repetitions: int, console: Console
) -> tuple[tuple[StepPoint, ...], str, int]:
    import torch

    from paceline.engine.profiling import measure_steps

    largest = max(max(s.batch * s.tokens_per_request for s in shapes), 2048)
    own = {"tensor_parallel_size": num_gpus} if num_gpus > 1 else {}
    console.print("starting the engine")
    with hush():
        engine = launch.start(max_num_batched_tokens=largest, **own)
    tell, total = _teller(console), repetitions * len(shapes)
    done = iter(range(total))
    with engine:
        try:
            measured = measure_steps(
                engine,
                shapes,
                repetitions,
                lambda s: tell(
                    f"{next(done)} of {total}: batch {s.batch}, {s.tokens_per_request} tokens per request, context "
                    f"{s.context}"
                ),
            )
        except PacelineError:
            raise
        except Exception as error:
            raise EngineError(f"the engine failed: {describe_failure(error)}") from error
        dtype = str(engine.vllm_engine.model_config.dtype).removeprefix("torch.")
    return measured, dtype, torch.get_num_threads()


def _measure_drafters(
    folders: dict[str, Path], batches: Sequence[int], context: int, console: Console
) -> tuple[DrafterProfile, ...]:
    from paceline.drafting.profiling import measure_model, measure_suffix
    from paceline.engine.rollout_engine import prepare_environment

    prepare_environment()
    found = [DrafterProfile(SUFFIX, measure_suffix(batches, context))]
    for name, folder in folders.items():
        console.print(f"drafter {name}")
        found.append(DrafterProfile(name, measure_model(folder, batches, context, "auto")))
    return tuple(found)


def profile_tables(
    made: Profile, target: LatencyFit[StepLatency], fits: dict[str, LatencyFit[AffineLatency]]
) -> tuple[Table, Table]:
    """Step times, and what drafting costs."""
    widths = sorted({p.tokens_per_request for p in made.steps})
    title = f"{made.target}, {made.dtype}: ms of a step by tokens per request, measured (fitted)"
    table = make_table(("batch", "context", *map(str, widths)), (), title=title)
    by_shape = {(p.batch, p.context, p.tokens_per_request): p.step_s for p in made.steps}
    for batch, context in sorted({(p.batch, p.context) for p in made.steps}):
        cells = []
        for width in widths:
            step_s = by_shape.get((batch, context, width))
            fitted_s = float(target.model.seconds(batch * width, batch * context))
            cells.append("" if step_s is None else f"{1e3 * step_s:.1f} ({1e3 * fitted_s:.1f})")
        table.add_row(str(batch), str(context), *cells)
    drafting = make_table(
        ("drafter",),
        ("base", "per request", "explained", "largest error"),
        title="drafting one token for each request: base + per request, microseconds",
        caption="explained: share of the variance",
    )
    for name, fit in fits.items():
        drafting.add_row(
            name,
            f"{1e6 * fit.model.base_s:.1f}",
            f"{1e6 * fit.model.per_token_s:.2f}",
            f"{100 * fit.r_squared:.1f} %",
            f"{100 * fit.largest_relative_error:.0f} %",
        )
    return table, drafting


def _show(made: Profile, target: LatencyFit[StepLatency], fits: dict[str, LatencyFit[AffineLatency]]) -> None:
    console = Console()
    table, drafting = profile_tables(made, target, fits)
    console.print(table)
    console.print(
        f"fit of the step time: {100 * target.r_squared:.1f} % of the variance explained, largest error "
        f"{100 * target.largest_relative_error:.0f} %; {1e6 * target.model.context_s:.2f} us per token of context"
    )
    console.print(drafting)

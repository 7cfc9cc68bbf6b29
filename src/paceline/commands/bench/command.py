"""`paceline bench`: the same prompts with each drafting method; how fast each is, and whether the tokens agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.commands.bench.contender import Contender, Measurement
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
    Dtype,
    KvCacheGib,
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
from paceline.commands.inputs.prompts import Prompt, read_prompts
from paceline.commands.inputs.sampling import Sampling
from paceline.errors import ConfigError
from paceline.record import describe_machine, describe_versions
from paceline.record.whole_file import write_text
from paceline.terminal.interruption import INTERRUPTED
from paceline.terminal.screen import error_console
from paceline.terminal.tables import make_table
from paceline.types import RolloutRequest

METHODS: dict[str, tuple[str, bool] | None] = {
    "plain": None,
    "none": ("none", False),
    "suffix": ("suffix", False),
    "lookup": ("lookup", False),
    "model": ("none", True),
    "suffix+model": ("suffix", True),
    "lookup+model": ("lookup", True),
}
"""(model-free drafter, whether the model drafter drafts too); None: vLLM without Paceline."""

REFERENCE = "none"
"""The shared dice without drafts: whose tokens every other method must give."""
DIVERGED = 1


def bench(
    model: ModelArgument,
    prompts: PromptsArgument,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help=f"What to compare: {', '.join(METHODS)}. plain is vLLM without Paceline, none is Paceline without "
            "drafts. Default: plain,none,suffix, and suffix+model with --model-drafter.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Responses per prompt (the group size).")] = 8,
    limit: Annotated[int | None, typer.Option(help="Use only so many prompts of the file.")] = None,
    max_tokens: MaxTokens = 512,
    repetitions: Annotated[
        int, typer.Option(help="Measured repetitions of each method, after one that only warms up.")
    ] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results here too.")
    ] = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
    seed: Seed = 0,
    model_drafter: ModelDrafter = None,
    dtype: Dtype = "auto",
    compiled: Compiled = True,
    max_num_seqs: MaxNumSeqs = 128,
    kv_cache_gib: KvCacheGib = 1.0,
) -> None:
    """Compare drafting methods on your model and prompts.

    Each method has an engine of its own; they take turns, every repetition throws new dice and begins with nothing
    remembered of the last. Medians are shown. Every token of every method is compared with decoding without drafts:
    exit code 1 if one differs.

    Example: paceline bench models/policy prompts.jsonl --limit 8 --samples 16
    """
    sampling = Sampling(max_tokens, temperature, top_p, top_k, min_p, tuple(stop or ()))
    names = choose_methods(methods, model_drafter)
    _check_counts(samples, limit, repetitions)
    check_seed(seed)
    if json_file is not None:
        check_writable("--json", json_file)
    checkpoint = read_checkpoint(model)
    check_model_drafter(model_drafter, checkpoint)
    if sampling.stop:
        load_tokenizer(checkpoint)
    chosen = read_prompts(prompts, checkpoint)[:limit]
    length = fit_length(checkpoint, chosen, max_tokens)
    kv_cache_bytes = check_batch(
        checkpoint,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        num_engines=len(names),
    )
    launch = Launch(
        model, None, dtype, length, max_num_seqs, kv_cache_bytes, not checkpoint.has_tokenizer, compiled
    )
    launches = {name: _launch(launch, name, seed, model_drafter) for name in names}
    rounds = [make_requests(chosen, samples, max_tokens, seed + turn) for turn in range(repetitions + 1)]
    console = error_console()
    measured, complete = _measure(launches, sampling, rounds, console)
    rows = [compare(name, measured) for name in names] if measured[names[0]] else []
    if rows:
        Console().print(bench_table(rows))
        _say_verdict(rows, Console())
    if json_file is not None and rows:
        _write(
            json_file,
            rows,
            {
                "model": str(model),
                "samples": samples,
                "prompts": len(chosen),
                "compiled": compiled,
                **sampling.described(),
            },
        )
    if not complete:
        console.print(
            "stopped; only whole repetitions are counted" if rows else "stopped before the first repetition"
        )
        raise typer.Exit(INTERRUPTED)
    if any(row["diverged_tokens"] for row in rows):
        raise typer.Exit(DIVERGED)


def choose_methods(wanted: str | None, model_drafter: Path | None) -> list[str]:
    """Names of the methods, the reference among them. Raises ConfigError for an unknown or impossible one."""
    default = "plain,none,suffix" + (",suffix+model" if model_drafter is not None else "")
    names = [name.strip() for name in (default if wanted is None else wanted).split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--methods {wanted!r} names none: choose from {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--methods: there is no method {name!r}, choose from {', '.join(METHODS)}")
        method = METHODS[name]
        if method is not None and method[1] and model_drafter is None:
            raise ConfigError(f"--methods: {name!r} needs --model-drafter DIR")
    names = list(dict.fromkeys(names))
    if REFERENCE not in names and any(METHODS[name] is not None for name in names):
        names.insert(names.index("plain") + 1 if "plain" in names else 0, REFERENCE)
    return names


def _check_counts(samples: int, limit: int | None, repetitions: int) -> None:
    for option, value in (("--samples", samples), ("--limit", limit), ("--repetitions", repetitions)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")


def _launch(base: Launch, name: str, seed: int, model_drafter: Path | None) -> Launch:
    method = METHODS[name]
    if method is None:
        return base
    drafter, with_model = method
    drafting = model_drafter if with_model else None
    return replace(base, settings=build_settings(seed, drafter, drafting, compiled=base.compiled))


def make_requests(
    prompts: Sequence[Prompt], samples: int, max_tokens: int, seed: int
) -> tuple[RolloutRequest, ...]:
    """The requests of one repetition; another seed gives other keys, the same for every method."""
    from paceline.dice import derive_key

    return tuple(
        RolloutRequest(
            prompt=prompt.tokens,
            max_tokens=max_tokens,
            key=derive_key(seed, prompt.tokens, prompt.sample_of(sample)),
            sample=sample,
        )
        for prompt in prompts
        for sample in range(samples)
    )


def _measure(
    launches: Mapping[str, Launch],
    sampling: Sampling,
    rounds: Sequence[Sequence[RolloutRequest]],
    console: Console,
) -> tuple[dict[str, list[Measurement]], bool]:
    """Measurements of each method, one for each whole repetition after the first, and whether none is missing."""
    measured: dict[str, list[Measurement]] = {name: [] for name in launches}
    with ExitStack() as stack:
        try:
            console.print(f"starting {len(launches)} engines: {', '.join(launches)}", highlight=False)
            contenders = []
            for name, launch in launches.items():
                contenders.append(Contender(name, launch, sampling, 0.9 / len(launches)))
                stack.callback(contenders[-1].close)
            for contender in contenders:
                contender.wait_until_ready()
            for turn, requests in enumerate(rounds):
                order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
                results = _take_turns(order, requests, _turn_name(turn, len(rounds)), console)
                for name, result in results.items():
                    measured[name] += [result] if turn else []
        except KeyboardInterrupt:
            return measured, False
    return measured, True


def _turn_name(turn: int, num_rounds: int) -> str:
    return f"repetition {turn} of {num_rounds - 1}" if turn else "warm-up"


def _take_turns(
    order: Sequence[Contender], requests: Sequence[RolloutRequest], turn: str, console: Console
) -> dict[str, Measurement]:
    results = {}
    for contender in order:
        result = contender.measure(requests)
        results[contender.name] = result
        rate = result.num_tokens / result.wall_s
        console.print(f"{turn}: {contender.name} {result.wall_s:.2f} s, {rate:.0f} tokens/s", highlight=False)
    return results


def compare(name: str, measured: Mapping[str, Sequence[Measurement]]) -> dict[str, Any]:
    """One row of the result: medians of a method, its ratio to plain vLLM and its agreement with the reference."""
    own = measured[name]
    rate = _rate(own)
    base = measured.get("plain")
    checked = name not in {"plain", REFERENCE} and REFERENCE in measured
    tokens, diverged, responses = _disagreement(own, measured[REFERENCE]) if checked else (0, 0, 0)
    drafted = sum(m.num_draft_tokens for m in own)
    return {
        "method": name,
        "wall_s": median(m.wall_s for m in own),
        "tokens_per_s": rate,
        "ratio": rate / _rate(base) if base else None,
        "tail_s": median(m.tail_s for m in own),
        "acceptance_length": sum(m.num_tokens for m in own) / max(sum(m.num_steps for m in own), 1),
        "acceptance_rate": sum(m.num_accepted_tokens for m in own) / drafted if drafted else None,
        "repetitions": len(own),
        "tokens": sum(m.num_tokens for m in own),
        "compared_tokens": tokens,
        "diverged_tokens": diverged,
        "diverged_responses": responses,
        "each_wall_s": [m.wall_s for m in own],
        "ends_s": [round(end_s, 3) for end_s in own[-1].ends_s],
    }


def _rate(measurements: Sequence[Measurement]) -> float:
    return median(m.num_tokens / m.wall_s for m in measurements)


def _disagreement(own: Sequence[Measurement], reference: Sequence[Measurement]) -> tuple[int, int, int]:
    """(tokens compared, tokens that differ or are missing or too many, responses with such a token)."""
    compared = diverged = responses = 0
    for one, other in zip(own, reference, strict=True):
        for tokens, wanted in zip(one.tokens, other.tokens, strict=True):
            wrong = sum(a != b for a, b in zip(tokens, wanted, strict=False)) + abs(len(tokens) - len(wanted))
            compared += max(len(tokens), len(wanted))
            diverged += wrong
            responses += wrong > 0
    return compared, diverged, responses


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    show: Callable[[Mapping[str, Any]], str]


_COLUMNS = (
    _Column("wall s", lambda row: f"{row['wall_s']:.2f}"),
    _Column("tokens/s", lambda row: f"{row['tokens_per_s']:.0f}"),
    _Column("x plain", lambda row: "" if row["ratio"] is None else f"{row['ratio']:.2f}"),
    _Column("tail s", lambda row: f"{row['tail_s']:.2f}"),
    _Column("accept.\nlength", lambda row: f"{row['acceptance_length']:.2f}"),
    _Column("same tokens", lambda row: _agreement(row)),
)


def _agreement(row: Mapping[str, Any]) -> str:
    if row["method"] == "plain":
        return "own draws"
    if row["method"] == REFERENCE:
        return "reference"
    if not row["diverged_tokens"]:
        return f"yes ({row['compared_tokens']})"
    return f"NO ({row['diverged_tokens']} differ)"


def bench_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per method."""
    title = f"medians of {rows[0]['repetitions']} repetitions"
    table = make_table(("method",), [column.title for column in _COLUMNS], title=title)
    for row in rows:
        style = "bold red" if row["diverged_tokens"] else None
        table.add_row(row["method"], *(column.show(row) for column in _COLUMNS), style=style)
    return table


def _say_verdict(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    compared = sum(row["compared_tokens"] for row in rows)
    diverged = sum(row["diverged_tokens"] for row in rows)
    if diverged:
        console.print(
            f"{diverged} of {compared} compared tokens differ from decoding without drafts "
            f"({1e6 * diverged / compared:.0f} per million): run 'paceline doctor' to see whether this machine is "
            "batch-invariant",
            highlight=False,
        )
    elif compared:
        console.print(f"all {compared} compared tokens are those of decoding without drafts", highlight=False)


def _write(path: Path, rows: Sequence[Mapping[str, Any]], case: Mapping[str, Any]) -> None:
    result = {
        "benchmark": "bench",
        "machine": msgspec.to_builtins(describe_machine()),
        "versions": describe_versions(),
        "case": case,
        "rows": list(rows),
    }
    write_text(json.dumps(result, indent=2) + "\n", path, "--json")

"""`paceline doctor`: what is installed, what fits, whether this machine is batch-invariant, and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.commands.doctor.findings import (
    Finding,
    State,
    look_at_compiler,
    look_at_doors,
    look_at_environment,
    look_at_installation,
    look_at_machine,
)
from paceline.commands.inputs.launch import hush
from paceline.engine.installed import is_cpu_build
from paceline.errors import PacelineError
from paceline.record import describe_machine

UNFIT = 1
STYLES: dict[State, str] = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}
AREA = "batch invariance"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the batch-invariance check, which starts an engine.")
    ] = False,
) -> None:
    """Check this machine and installation, and say what to do.

    Looks at packages and versions, the native modules, the processor, environment variables that bite, and every
    private name of vLLM that Paceline relies on. Then generates from a tiny random model in several ways and compares
    every bit: that is what makes responses the same whatever is drafted. Exit code 0 only if everything needed fits.
    """
    before = dict(os.environ)
    findings: list[Finding] = []
    console = Console(highlight=False, soft_wrap=True)
    area = ""
    for finding in _look(before, quick):
        findings.append(finding)
        if as_json:
            continue
        if finding.area != area:
            area = finding.area
            console.print(Text(area, style="bold"))
        _print(finding, console)
    failed = [finding for finding in findings if finding.state == "fail"]
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        _print_verdict(failed, quick, console)
    if failed:
        raise typer.Exit(UNFIT)


def _look(environment: dict[str, str], quick: bool) -> Iterator[Finding]:
    from paceline.engine.rollout_engine import prepare_environment

    prepare_environment()
    with hush():
        installation = list(look_at_installation())
    yield from installation
    yield from look_at_machine()
    compiler = look_at_compiler()
    yield compiler
    yield from look_at_environment(environment, describe_machine().cores, is_cpu_build())
    usable = not any(finding.state == "fail" for finding in installation)
    with hush():
        doors = list(look_at_doors()) if any(f.name == "vllm" for f in installation) else []
    yield from doors
    if quick:
        return
    if usable and all(finding.state == "ok" for finding in doors):
        modes = (False, True) if compiler.state == "ok" else (False,)
        yield from look_at_invariance(modes)
    else:
        yield Finding(AREA, "not checked", "note", "mend the installation first, then run again")


def look_at_invariance(modes: Sequence[bool]) -> Iterator[Finding]:
    """Generate in several ways and compare bits; one finding for each number format and mode, compiled or not."""
    from paceline.commands.doctor.invariance_check import check_invariance

    dtypes = ("float32", "bfloat16") if is_cpu_build() else ("bfloat16",)
    for dtype, compiled in product(dtypes, modes):
        name = f"{dtype}, {'compiled' if compiled else 'eager'}"
        try:
            ways = check_invariance(dtype, compiled=compiled)
        except PacelineError as error:
            yield Finding(
                AREA, name, "fail", str(error), "see why with: PACELINE_TRACEBACK=1 paceline rollout ..."
            )
            continue
        tokens = sum(way.compared for way in ways)
        wrong = [way for way in ways if way.different_logprobs or way.diverged]
        if not wrong:
            yield Finding(
                AREA, name, "ok", f"{tokens} tokens and log-probabilities, the same bits in every way"
            )
            continue
        what = "; ".join(
            f"{way.name}: {way.different_logprobs} log-probabilities and {way.diverged} of {way.compared} tokens differ"
            for way in wrong
        )
        yield Finding(AREA, name, "fail" if is_cpu_build() else "warn", what, _remedy())


def _remedy() -> str:
    if not is_cpu_build():
        return (
            "export VLLM_BATCH_INVARIANT=1 (needs a recent GPU); 'paceline bench' counts tokens that differ"
        )
    return (
        "responses are right samples still, but not the same in every batch: 'paceline bench' counts the tokens that "
        "differ; please report the processor above"
    )


def _print(finding: Finding, console: Console) -> None:
    line = Text.assemble(
        "  ", (f"{finding.state:<5}", STYLES[finding.state]), f"{finding.name}: {finding.found}"
    )
    console.print(line)
    if finding.remedy:
        console.print(f"       -> {finding.remedy}", markup=False)


def _print_verdict(failed: list[Finding], quick: bool, console: Console) -> None:
    console.print()
    if failed:
        names = ", ".join(dict.fromkeys(finding.name for finding in failed))
        console.print(Text(f"{len(failed)} to mend: {names}", style="bold red"))
    elif quick:
        console.print(
            "everything looked at fits; without --quick the machine's batch invariance is checked too"
        )
    else:
        console.print("everything fits")

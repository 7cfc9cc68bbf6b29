"""`paceline doctor`: what is installed, what fits, whether this machine is batch-invariant, and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.commands.doctor.child import in_child
from paceline.commands.doctor.findings import (
    Finding,
    State,
    look_at_compiler,
    look_at_doors,
    look_at_environment,
    look_at_installation,
    look_at_machine,
)
from paceline.commands.doctor.gpu_parts import describe_device
from paceline.commands.doctor.gpu_report import Answer, check_gpu, examine_gpu, write_report
from paceline.commands.doctor.invariance_check import INVARIANT
from paceline.commands.inputs.launch import Launch, hush
from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.commands.inputs.options import check_writable
from paceline.config import EngineSettings
from paceline.engine.installed import is_cpu_build
from paceline.errors import PacelineError
from paceline.record import describe_machine

UNFIT = 1
STYLES: dict[State, str] = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}
AREA = "batch invariance"
LENGTH = 256
"""Longest sequence of an engine that is started to look at a model."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the batch-invariance check, which starts an engine.")
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Measure the GPU instead: dice, exactness, batch invariance, cost of the sampler, and with --model "
            "step times and speed beside plain vLLM.",
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a model to look at too: whether batch invariance reaches all of its layers. With --gpu: "
            "whose speed is measured.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="With --gpu: where the report goes, to attach to an issue.")
    ] = Path("paceline-gpu.json"),
) -> None:
    """Check this machine and installation, and say what to do.

    Looks at packages and versions, the native modules, the processor, environment variables that bite, and every
    private name of vLLM that Paceline relies on. Then generates from a tiny random model in several ways and compares
    every bit: that is what makes responses the same whatever is drafted. Exit code 0 only if everything needed fits.
    """
    if gpu:
        check_gpu()
        check_writable("--out", out)
    if model is not None:
        read_checkpoint(model)
    shown = Findings(Console(highlight=False, soft_wrap=True), as_json)
    shown.add(_look(dict(os.environ), quick or gpu))
    if model is not None and not gpu and not shown.failed:
        shown.add([look_at_model(model)])
    if gpu:
        looked = tuple(shown.all)
        answers: list[Answer] = []
        if not shown.failed:
            for answer in examine_gpu(model):
                answers.append(answer)
                shown.add([answer.finding])
        write_report(out, model, in_child(describe_device), looked, answers)
    if as_json:
        typer.echo(json.dumps({"ok": not shown.failed, "findings": [asdict(f) for f in shown.all]}, indent=2))
    else:
        _print_verdict(shown.failed, quick, shown.console)
        if gpu:
            shown.console.print(f"the report is in {out}")
    if shown.failed:
        raise typer.Exit(UNFIT)


class Findings:
    """What was found so far, printed as it comes."""

    def __init__(self, console: Console, silent: bool) -> None:
        self.all: list[Finding] = []
        self.console = console
        self._silent = silent

    @property
    def failed(self) -> list[Finding]:
        """Those that do not fit."""
        return [finding for finding in self.all if finding.state == "fail"]

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep and print findings, each under its area."""
        for finding in findings:
            if not self._silent:
                if not self.all or finding.area != self.all[-1].area:
                    self.console.print(Text(finding.area, style="bold"))
                _print(finding, self.console)
            self.all.append(finding)


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


def look_at_model(folder: Path) -> Finding:
    """Load a model and see whether the measures of batch invariance reach all of its layers."""
    try:
        gap = in_child(_invariance_gap, folder)
    except PacelineError as error:
        return Finding(
            AREA, folder.name, "fail", str(error), "see why with: PACELINE_TRACEBACK=1 paceline rollout ..."
        )
    if gap is not None:
        return Finding(AREA, folder.name, "warn", gap, "'paceline bench' counts the tokens that differ")
    if not is_cpu_build():
        return Finding(AREA, folder.name, "note", f"on a GPU it is vLLM's: export {INVARIANT}=1")
    return Finding(AREA, folder.name, "ok", "the measures reach every layer with weights")


def _invariance_gap(folder: Path) -> str | None:
    length = min(read_checkpoint(folder).max_len or LENGTH, LENGTH)
    launch = Launch(folder, EngineSettings(), "auto", length, 1, 1 << 28, True, False)
    with launch.start() as engine:
        return engine.invariance_gap


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

"""`paceline doctor --gpu`: its parts one after the other, each judged, and the file that an issue can carry."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.commands.doctor import gpu_parts
from paceline.commands.doctor.child import in_child
from paceline.commands.doctor.findings import Finding, State
from paceline.commands.doctor.invariance_check import INVARIANT, Way, write_model
from paceline.engine.installed import is_cpu_build
from paceline.errors import InstallError, PacelineError
from paceline.record import describe_machine, describe_versions
from paceline.record.whole_file import write_text

AREA = "gpu"
TOLD = (
    "PACELINE",
    "PACELINE_SETTINGS",
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ATTENTION_BACKEND",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that stand in the report; others may be secret."""
ROUNDING_LEAD = 1e-4
"""Scores so close that the last bits of a logarithm may decide between them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One question to the GPU."""

    name: str
    measure: Callable[[], Any]
    """Raises PacelineError where it cannot be measured."""
    judge: Callable[[Any], tuple[State, str, str | None]]
    """(state, what was found, remedy) of what was measured."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a part."""

    finding: Finding
    measured: Any
    """Built-in types; None where it could not be measured."""
    seconds: float


def check_gpu() -> None:
    """Raise InstallError where vLLM cannot run on a GPU here."""
    if is_cpu_build():
        raise InstallError(
            "--gpu: the installed vLLM is built for the CPU; on a machine with a GPU: pip install 'paceline[engine]'. "
            "On this one run 'paceline doctor' without --gpu"
        )
    import torch

    if not torch.cuda.is_available():
        raise InstallError(
            "--gpu: torch finds no GPU: run it where nvidia-smi lists one, with a driver that fits CUDA "
            f"{torch.version.cuda}; elsewhere run 'paceline doctor' without --gpu"
        )


def parts(model: Path | None, tiny: Path) -> list[Part]:
    """The questions, in their order. model: the user's, or None; tiny: folder of a random model."""
    asked = [
        Part("dice", gpu_parts.check_dice, judge_dice),
        Part("exactness", partial(gpu_parts.check_exactness, tiny), judge_exactness),
        Part("batch invariance", partial(gpu_parts.check_batches, True), partial(judge_batches, True)),
        Part("as vLLM comes", partial(gpu_parts.check_batches, False), partial(judge_batches, False)),
        Part("sampler", partial(gpu_parts.time_verifying, tiny), judge_sampler),
    ]
    if model is not None:
        asked += [
            Part("steps", partial(gpu_parts.time_steps, model), judge_steps),
            Part("speed", partial(gpu_parts.compare_with_plain, model), judge_speed),
        ]
    return asked


def examine(asked: Sequence[Part]) -> Iterator[Answer]:
    """Ask one after the other; a part that fails is a finding, and the next ones are asked all the same."""
    for part in asked:
        began_s = time.perf_counter()
        measured = None
        try:
            made = part.measure()
            state, found, remedy = part.judge(made)
            measured = msgspec.to_builtins(made)
        except PacelineError as error:
            state, found, remedy = "fail", str(error), "please attach the report to an issue"
        yield Answer(Finding(AREA, part.name, state, found, remedy), measured, time.perf_counter() - began_s)


def examine_gpu(model: Path | None) -> Iterator[Answer]:
    """All parts, on the user's model where times are measured, on a tiny random one where bits are compared."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        in_child(write_model, Path(folder))
        yield from examine(parts(model, Path(folder)))
    if model is None:
        text = "not measured: they need a model, 'paceline doctor --gpu --model DIR'"
        yield Answer(Finding(AREA, "steps, speed", "note", text), None, 0.0)


def judge_dice(made: Any) -> tuple[State, str, str | None]:
    """All tokens equal, or different only where the last bits of a logarithm decide."""
    if not made.num_different:
        return "ok", f"{made.num_rows} tokens drawn as on the host", None
    found = f"{made.num_different} of {made.num_rows} tokens differ from the host's, leads up to {made.widest_lead:.2g}"
    if made.widest_lead < ROUNDING_LEAD:
        return "note", f"{found}: last bits of a logarithm", None
    return "fail", found, "drafts will hardly be accepted: please attach the report to an issue"


def judge_exactness(ways: Sequence[Way]) -> tuple[State, str, str | None]:
    """Every token that of plain vLLM."""
    if any(way.diverged for way in ways):
        return "fail", _differences(ways), "please attach the report to an issue"
    if not all(way.num_draft_tokens for way in ways if "draft model" in way.name):
        return "fail", "nothing was drafted, so nothing was verified", "please attach the report to an issue"
    compared, drafted = sum(way.compared for way in ways), sum(way.num_draft_tokens for way in ways)
    return "ok", f"{compared} tokens, {drafted} drafted ones among them, as of plain vLLM with seed=key", None


def judge_batches(wanted: bool, ways: Sequence[Way]) -> tuple[State, str, str | None]:
    """Every bit the same; without vLLM's switch a difference is what was to be expected. wanted: with the switch."""
    if not any(way.diverged or way.different_logprobs for way in ways):
        return "ok", f"{sum(way.compared for way in ways)} tokens and log-probabilities, the same bits", None
    if wanted:
        return "warn", _differences(ways), "expect single responses to part ways at near-ties on this GPU"
    return "note", _differences(ways), f"export {INVARIANT}=1 where single tokens matter"


def _differences(ways: Sequence[Way]) -> str:
    wrong = [way for way in ways if way.diverged or way.different_logprobs]
    return "; ".join(
        f"{way.name}: {way.diverged} of {way.compared} tokens and {way.different_logprobs} log-probabilities differ"
        for way in wrong
    )


def judge_sampler(costs: Sequence[Any]) -> tuple[State, str, str | None]:
    """Times are reported, not judged."""
    each = (
        f"{c.num_requests} x {c.num_draft_tokens} drafts {c.exact_ms:.2f} ms (vLLM's own {c.vllm_ms:.2f})"
        for c in costs
    )
    return "note", ", ".join(each), None


def judge_steps(points: Sequence[Any]) -> tuple[State, str, str | None]:
    """Times are reported, not judged."""
    return (
        "note",
        ", ".join(f"{p.batch} x {p.tokens_per_request} {1e3 * p.step_s:.1f} ms" for p in points),
        None,
    )


def judge_speed(rows: Sequence[Mapping[str, Any]]) -> tuple[State, str, str | None]:
    """Ratios to plain vLLM are reported, not judged."""
    each = (
        f"{row['method']} {row['tokens_per_s']:.0f} tokens/s ({row['ratio']:.2f} x plain)" for row in rows
    )
    wrong = sum(row["diverged_tokens"] for row in rows)
    return "note", f"{', '.join(each)}; {wrong} tokens differ from those without drafts", None


def write_report(
    path: Path,
    model: Path | None,
    device: Mapping[str, Any],
    findings: Sequence[Finding],
    answers: Sequence[Answer],
) -> None:
    """Write everything that was found. Raises RecordError when the file cannot be written."""
    report = {
        "report": "paceline doctor --gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "device": device,
        "environment": {name: os.environ[name] for name in TOLD if name in os.environ},
        "model": None if model is None else model.name,
        "findings": [*findings, *(answer.finding for answer in answers)],
        "parts": {a.finding.name: {"seconds": a.seconds, "measured": a.measured} for a in answers},
    }
    write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n", path, "--out")

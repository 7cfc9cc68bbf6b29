"""What the controller tells the decision log: every event in full, and every action as text.

An action's text has what matters of it: where, which response by key or index, from which token to which, which
weights, and a digest of tokens and log-probabilities. It is what a replay compares and shows. Telemetry is left out of
the events: the controller does not look at it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import (
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    Disagree,
    DraftFor,
    EndTraining,
    Event,
    Fail,
    Keep,
    LoadWeights,
    LoseDrafter,
    Reported,
    Rest,
    RunChunk,
    StartWorker,
    StopWorker,
    TrainDrafter,
)
from paceline.errors import PacelineError
from paceline.planning.help import Help
from paceline.record.decisions import ControllerLine, DecisionHeader, DecisionWriter

EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


class ControllerLog:
    """One per fleet."""

    def __init__(self, writer: DecisionWriter) -> None:
        self._writer = writer

    def decide(self, controller: Controller, event: Event) -> list[Action]:
        """`controller.decide`, written down."""
        try:
            actions = controller.decide(event)
        except PacelineError as error:
            self._write(event, (), describe_error(error))
            raise
        self._write(event, actions, None)
        return actions

    def _write(self, event: Event, actions: Sequence[Action], error: str | None) -> None:
        if not self._writer.is_open:
            return
        if isinstance(event, Reported):
            event = replace(event, report=replace(event.report, telemetry=None))
        line = ControllerLine(
            event=type(event).__name__,
            body=msgspec.Raw(msgspec.msgpack.encode(event)),
            actions=tuple(map(describe, actions)),
            error=error,
        )
        self._writer.write(line)

    def close(self) -> None:
        """Write no more."""
        self._writer.close()


def open_log(settings: FleetSettings, folder: str | None) -> ControllerLog | None:
    """The log of a new fleet, if there is to be one."""
    if folder is None:
        return None
    header = DecisionHeader(kind="controller", settings=settings.model_dump())
    return ControllerLog(DecisionWriter.create(Path(folder), header))


def describe(action: Action) -> str:
    """An action as text; equal texts mean equal actions, up to a digest."""
    match action:
        case StartWorker(worker, life):
            return f"start {worker} (life {life})"
        case StopWorker(worker, life):
            return f"stop {worker} (life {life})"
        case LoadWeights(worker, life, version):
            return f"load weights {version} into {worker} (life {life})"
        case RunChunk(worker, life, chunk, request, version):
            digest = _digest((*request.prompt, *request.generated))
            keeps = "" if request.keep_kv else ", the last"
            if action.help is not None:
                keeps += (
                    f", a copy of {action.helped}'s"
                    if action.help is Help.COPY
                    else f", taken from {action.helped}"
                )
            return (
                f"run chunk {chunk} on {worker} (life {life}): response of key {request.key}, tokens "
                f"{len(request.generated)} to {request.max_tokens}{keeps}, weights {version}, digest {digest}"
            )
        case CancelChunk(worker, life, chunk):
            keeps = ", keys and values stay" if action.keep_kv else ""
            return f"cancel chunk {chunk} on {worker} (life {life}){keeps}"
        case Adopt(worker, life, chunk, start, tokens):
            return f"{worker} (life {life}) hears of chunk {chunk} {len(tokens) // 4} tokens from {start} on"
        case DraftFor(worker, life, helped):
            which = f" with drafter {action.drafter}" if action.drafter else ""
            return f"{worker} (life {life}) drafts for {', '.join(helped)}{which}"
        case Rest(worker, life):
            return f"{worker} (life {life}) rests"
        case LoseDrafter(worker, life):
            return f"nobody drafts for {worker} (life {life}) any more"
        case TrainDrafter(worker, life, leader):
            return f"{worker} (life {life}) trains the drafter, {leader} leads"
        case EndTraining(worker, life, leader):
            rest = f", {leader} leads the others" if leader else ""
            return f"{worker} (life {life}) trains no more{rest}"
        case Disagree(worker, index, message):
            return f"{worker} disagrees about response {index}: {message}"
        case Keep(index, start, packed):
            digest = _digest(*packed.unpack())
            return (
                f"keep response {index}: tokens {start} to {start + len(packed)}, in all {action.num_steps} steps, "
                f"{action.num_draft_tokens} drafts, {action.finish_reason}, digest {digest}"
            )
        case Fail(error, message):
            return f"fail: {error.__name__}: {message}"
        case Deliver(index, response):
            return (
                f"deliver response {index}: {len(response.tokens)} tokens, {response.num_steps} steps, "
                f"{response.num_draft_tokens} drafts, {response.num_accepted_tokens} accepted, "
                f"{response.finish_reason}, weights {response.policy_version}, "
                f"digest {_digest(response.tokens, response.logprobs)}"
            )


def describe_error(error: Exception) -> str:
    """What the controller raised, as text."""
    return f"{type(error).__name__}: {error}"


def _digest(tokens: Sequence[int], logprobs: Sequence[float] = ()) -> str:
    digest = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return f"{zlib.crc32(np.asarray(logprobs, np.float64).tobytes(), digest):08x}"

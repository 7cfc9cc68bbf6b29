"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, in the Trace Event Format.

Tracks: the trainer with its steps and phases; each engine worker with its engine steps, and counters of what runs and
of the acceptance length; each rollout group with its responses. Written as a stream: memory does not grow with the run.
Called by `paceline report --trace`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.record import (
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    Note,
    RecordReader,
    ResponseDone,
    TrainStep,
)

TRAINER, ENGINES, RESPONSES = 1, 2, 3
"""Process ids, which the viewer groups tracks by."""
PROCESSES = {TRAINER: "trainer", ENGINES: "engines", RESPONSES: "responses by group"}


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace of a run; returns the number of its events. Raises RecordError as `RecordReader`, or when it
    cannot be written."""
    draft = path.with_name(path.name + ".part")
    count = 0
    try:
        with RecordReader(run_dir) as record, draft.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for line in chain(_names(), _convert(record)):
                file.write(",\n" * (count > 0) + json.dumps(line))
                count += 1
            file.write("\n]}\n")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror}; free some space or make it writable"
        ) from error
    return count


def _names() -> Iterator[dict[str, Any]]:
    for process, name in PROCESSES.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _convert(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    tracks: dict[str, int] = {}
    for event in events:
        match event:
            case EngineStepSample():
                name = event.worker or "engine"
                if name not in tracks:
                    tracks[name] = len(tracks) + 1
                    yield {
                        "ph": "M", "name": "thread_name", "pid": ENGINES, "tid": tracks[name], "args": {"name": name}
                    }  # fmt: skip
                yield from _engine_events(event, name, tracks[name])
            case ResponseDone():
                yield _response_event(event)
            case TrainStep():
                yield from _step_events(event)
            case Evaluation():
                args = {"solve_rate": event.solve_rate, "problems": event.n}
                yield _instant(f"evaluation after step {event.step}", event.t_s, args)
            case Note() | Failure():
                yield _instant(event.text, event.t_s, {})


def _engine_events(event: EngineStepSample, name: str, track: int) -> Iterator[dict[str, Any]]:
    args = {
        "running": round(event.num_running, 2),
        "tokens": event.num_generated_tokens,
        "drafted": event.num_draft_tokens,
        "accepted": event.num_accepted_tokens,
        "prefilled": event.num_prefill_tokens,
    }
    text = "1 step" if event.num_steps == 1 else f"{event.num_steps} steps"
    yield _slice(text, ENGINES, track, event.t_s, event.step_s, args)
    for counter, value in (("running", event.num_running), ("acceptance length", event.acceptance_length)):
        yield {
            "ph": "C", "name": f"{name}: {counter}", "pid": ENGINES, "ts": _us(event.t_s), "args": {"": round(value, 3)}
        }  # fmt: skip


def _response_event(event: ResponseDone) -> dict[str, Any]:
    args = {
        "group": event.group,
        "prompt_tokens": event.prompt_tokens,
        "response_tokens": event.response_tokens,
        "accepted": event.accepted,
        "finish_reason": event.finish_reason,
        "reward": event.reward,
        "worker": event.worker,
    }
    name = f"step {event.step} sample {event.sample}: {event.response_tokens} tokens"
    track = event.group % 2**31 * 64 + event.sample % 64  # siblings side by side
    return _slice(name, RESPONSES, track, event.t_start_s, event.t_end_s - event.t_start_s, args)


def _step_events(event: TrainStep) -> Iterator[dict[str, Any]]:
    args = {"tokens": event.tokens, "reward": event.reward_mean, "tail_s": event.tail_s}
    yield _slice(f"step {event.step}", TRAINER, 1, event.t_start_s, event.phases.total_s, args)
    begin_s = event.t_start_s
    for name in event.phases.__struct_fields__:
        seconds = getattr(event.phases, name)
        if seconds > 0.0:
            yield _slice(name.removesuffix("_s").replace("_", " "), TRAINER, 1, begin_s, seconds, {})
        begin_s += seconds


def _slice(
    name: str, process: int, track: int, start_s: float, seconds: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": process, "tid": track, "ts": _us(start_s), "dur": _us(seconds), "args": args
    }  # fmt: skip


def _instant(name: str, at_s: float, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "g", "name": name, "pid": TRAINER, "tid": 1, "ts": _us(at_s), "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)

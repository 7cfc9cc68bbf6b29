"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, in the Trace Event Format.

Tracks: the trainer with its steps and phases; each engine worker with its engine steps, counters of what runs and of
the acceptance length, and on a fleet the chunks that it ran; what is drafted ahead for each engine, which worker of a
fleet helps which, and when an adaptive drafter is trained; each response of a rollout beside its siblings. Slices of
one track never overlap unless one lies within the other, and a track is named before it is used. Written as a stream:
memory does not grow with the run, only with its largest rollout. Called by `paceline report --trace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from paceline.record import (
    ChunkDone,
    DrafterSession,
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    HelpDone,
    Note,
    RecordReader,
    ResponseDone,
    TrainStep,
)
from paceline.record.whole_file import replacing
from paceline.report.chunks import pack_rows

_Span = TypeVar("_Span", ChunkDone, HelpDone)

TRAINER, ENGINES, RESPONSES, DRAFTERS = 1, 2, 3, 4
"""Process ids, which the viewer groups tracks by."""
PROCESSES = {
    TRAINER: "trainer",
    ENGINES: "engines",
    RESPONSES: "responses by group",
    DRAFTERS: "draft workers",
}

TRAINING_TRACK = "drafter's trainer"
"""There is one, so its sessions do not overlap."""

MOST_ROWS = 1 << 16
"""Tracks of one worker that the viewer is asked to keep together."""

Line = dict[str, Any]


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace of a run; returns the number of its events. Raises RecordError as `RecordReader`, or when it
    cannot be written."""
    count = 0
    with (
        replacing(path) as draft,
        RecordReader(run_dir) as record,
        draft.open("w", encoding="utf-8") as file,
    ):
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for line in chain(_names(), _Tracks().convert(record)):
            file.write(",\n" * (count > 0) + json.dumps(line))
            count += 1
        file.write("\n]}\n")
    return count


def _names() -> Iterator[Line]:
    for process, name in PROCESSES.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield _track_name(TRAINER, 1, "steps")


class _Tracks:
    """Turns events into lines, and knows which tracks there are.

    Responses, chunks and helps are kept until their rollout is over, as their places depend on each other.
    """

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, int], int] = {}  # (worker, row), row 0 for its engine steps
        self._places: dict[str, int] = {}
        self._draft_tracks: dict[str, int] = {}  # by name
        self._told_us: dict[str, float] = {}  # end of the last engine step
        self._responses: list[ResponseDone] = []
        self._chunks: list[ChunkDone] = []
        self._helps: list[HelpDone] = []
        self._num_response_tracks = 0

    def convert(self, events: Iterable[Event]) -> Iterator[Line]:
        for event in events:
            match event:
                case EngineStepSample():
                    yield from self._engine_events(event)
                case ResponseDone() | ChunkDone() | HelpDone():
                    yield from self._keep(event)
                case TrainStep():
                    yield from self._end_rollout()
                    yield from _step_events(event)
                case DrafterSession():
                    yield from self._begin_draft_track(TRAINING_TRACK)
                    yield _session_event(event, self._draft_tracks[TRAINING_TRACK])
                case Evaluation():
                    args = {"solve_rate": event.solve_rate, "problems": event.n}
                    yield _instant(f"evaluation after step {event.step}", event.t_s, args)
                case Note() | Failure():
                    yield _instant(event.text, event.t_s, {})
        yield from self._end_rollout()

    def _keep(self, event: ResponseDone | ChunkDone | HelpDone) -> Iterator[Line]:
        if any(kept[0].step != event.step for kept in (self._responses, self._chunks, self._helps) if kept):
            yield from self._end_rollout()
        match event:
            case ResponseDone():
                self._responses.append(event)
            case ChunkDone():
                self._chunks.append(event)
            case HelpDone():
                self._helps.append(event)

    def _end_rollout(self) -> Iterator[Line]:
        yield from self._chunk_events()
        yield from self._help_events()
        self._responses.sort(key=lambda one: (one.group, one.sample, one.t_start_s))
        for track, response in enumerate(self._responses, start=1):  # siblings side by side
            if track > self._num_response_tracks:
                self._num_response_tracks = track
                yield _track_name(RESPONSES, track, f"response {track}")
            yield _response_event(response, track)
        self._responses.clear()
        self._chunks.clear()
        self._helps.clear()

    def _chunk_events(self) -> Iterator[Line]:
        for worker, row, chunk in _side_by_side(self._chunks):
            yield from self._begin_track(worker, 1 + row)
            yield _chunk_event(chunk, self._tracks[worker, 1 + row])

    def _help_events(self) -> Iterator[Line]:
        for worker, row, one in _side_by_side(self._helps):
            name = f"{worker} helps" if row == 0 else f"{worker} helps {1 + row}"
            yield from self._begin_draft_track(name)
            yield _help_event(one, self._draft_tracks[name])

    def _begin_draft_track(self, name: str) -> Iterator[Line]:
        """Name a track of the draft workers before its first event."""
        if name not in self._draft_tracks:
            self._draft_tracks[name] = len(self._draft_tracks) + 1
            yield _track_name(DRAFTERS, self._draft_tracks[name], name)

    def _begin_track(self, worker: str, row: int) -> Iterator[Line]:
        """Name a worker's track before its first event."""
        if (worker, row) not in self._tracks:
            number = self._tracks[worker, row] = len(self._tracks) + 1
            name = worker or "engine"
            yield _track_name(ENGINES, number, f"{name} chunks {row:03}" if row else name)
            place = self._places.setdefault(worker, len(self._places)) * MOST_ROWS + row
            yield _metadata("thread_sort_index", ENGINES, number, {"sort_index": place})

    def _engine_events(self, event: EngineStepSample) -> Iterator[Line]:
        yield from self._begin_track(event.worker, 0)
        args = {
            "running": round(event.num_running, 2),
            "tokens": event.num_generated_tokens,
            "drafted": event.num_draft_tokens,
            "accepted": event.num_accepted_tokens,
            "prefilled": event.num_prefill_tokens,
        }
        text = "1 step" if event.num_steps == 1 else f"{event.num_steps} steps"
        # When a fleet's worker ran a step is known to some milliseconds: never before the last one ended.
        begin_us = max(_us(event.t_s), self._told_us.get(event.worker, 0.0))
        end_us = max(_us(event.t_s + event.step_s), begin_us)
        self._told_us[event.worker] = end_us
        yield _slice(text, ENGINES, self._tracks[event.worker, 0], begin_us, end_us, args)
        name = event.worker or "engine"
        for counter, value in (
            ("running", event.num_running),
            ("acceptance length", event.acceptance_length),
        ):
            yield _counter(f"{name}: {counter}", ENGINES, begin_us, value)
        yield from self._ahead_events(event, begin_us, end_us)

    def _ahead_events(self, event: EngineStepSample, begin_us: float, end_us: float) -> Iterator[Line]:
        """What was drafted ahead for an engine while these steps ran; a track for each of its drafters."""
        for place, (num_drafted, draft_s, num_accepted, num_wasted) in enumerate(_by_drafter(event)):
            engine = f" for {event.worker}" if event.worker else ""
            name = f"drafts ahead{engine}, drafter {1 + place}" if place else f"drafts ahead{engine}"
            if not num_drafted and name not in self._draft_tracks:
                continue
            yield from self._begin_draft_track(name)
            yield _counter(f"{name}: drafted", DRAFTERS, begin_us, num_drafted)
            yield _counter(f"{name}: accepted", DRAFTERS, begin_us, num_accepted)
            if num_drafted:
                args = {
                    "responses": round(event.num_running, 2),
                    "drafting_ms": round(1e3 * draft_s, 3),
                    "accepted": num_accepted,
                    "wasted": num_wasted,
                }
                track = self._draft_tracks[name]
                yield _slice(f"{num_drafted} tokens", DRAFTERS, track, begin_us, end_us, args)


def _side_by_side(events: Iterable[_Span]) -> Iterator[tuple[str, int, _Span]]:
    """Worker, row and event, so that events of one row do not overlap."""
    by_worker: dict[str, list[_Span]] = {}
    for one in events:
        by_worker.setdefault(one.worker, []).append(one)
    for worker, own in sorted(by_worker.items()):
        rows = pack_rows([(_us(one.t_start_s), _us(one.t_end_s)) for one in own])
        for row, one in zip(rows, own, strict=True):
            yield worker, row, one


def _by_drafter(event: EngineStepSample) -> Iterator[tuple[int, float, int, int]]:
    """Of each drafter that works ahead: tokens drafted, what it took, tokens accepted and drafted in vain."""
    accepted = (event.num_model_tokens - sum(event.further_tokens), *event.further_tokens)
    wasted = (event.num_wasted_tokens - sum(event.further_wasted_tokens), *event.further_wasted_tokens)
    columns = zip_longest(event.ahead_tokens, event.ahead_s, accepted, wasted, fillvalue=0)
    return islice(columns, len(event.ahead_tokens))


def _chunk_event(event: ChunkDone, track: int) -> Line:
    args = {
        "step": event.step,
        "group": event.group,
        "sample": event.sample,
        "first_token": event.start,
        "tokens": event.tokens,
        "finish_reason": event.finish_reason,
    }
    name = f"group {event.group} sample {event.sample}"
    if event.finish_reason == "lost":
        name += ", lost"
    return _slice(name, ENGINES, track, _us(event.t_start_s), _us(event.t_end_s), args)


def _help_event(event: HelpDone, track: int) -> Line:
    texts = {
        "draft": f"drafts for {event.helped}{event.drafter and f' with {event.drafter}'}",
        "copy": f"races {event.helped}{event.outcome and f', {event.outcome}'}",
        "take": f"takes over a response of {event.helped}",
    }
    args = {"step": event.step, "helped": event.helped, "leads": event.num_leads}
    name = texts.get(event.kind, event.kind)
    return _slice(name, DRAFTERS, track, _us(event.t_start_s), _us(event.t_end_s), args)


def _session_event(event: DrafterSession, track: int) -> Line:
    name = f"trains on {event.worker}" if event.worker else "trains"
    args = {"step": event.step, "core_s": event.core_s}
    return _slice(name, DRAFTERS, track, _us(event.t_start_s), _us(event.t_end_s), args)


def _response_event(event: ResponseDone, track: int) -> Line:
    args = {
        "group": event.group,
        "prompt_tokens": event.prompt_tokens,
        "response_tokens": event.response_tokens,
        "accepted": event.accepted,
        "finish_reason": event.finish_reason,
        "reward": event.reward,
        "worker": event.worker,
    }
    name = f"step {event.step} group {event.group} sample {event.sample}: {event.response_tokens} tokens"
    return _slice(name, RESPONSES, track, _us(event.t_start_s), _us(event.t_end_s), args)


def _step_events(event: TrainStep) -> Iterator[Line]:
    args = {"tokens": event.tokens, "reward": event.reward_mean, "tail_s": event.tail_s}
    end_us = _us(event.t_start_s + event.phases.total_s)
    yield _slice(f"step {event.step}", TRAINER, 1, _us(event.t_start_s), end_us, args)
    begin_s = event.t_start_s
    for name in event.phases.__struct_fields__:
        seconds = getattr(event.phases, name)
        if seconds > 0.0:
            text = name.removesuffix("_s").replace("_", " ")
            begin_us, phase_end_us = min(_us(begin_s), end_us), min(_us(begin_s + seconds), end_us)
            yield _slice(text, TRAINER, 1, begin_us, phase_end_us, {})
        begin_s += seconds


def _track_name(process: int, track: int, name: str) -> Line:
    return _metadata("thread_name", process, track, {"name": name})


def _metadata(kind: str, process: int, track: int, args: Mapping[str, Any]) -> Line:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _slice(
    name: str, process: int, track: int, begin_us: float, end_us: float, args: Mapping[str, Any]
) -> Line:
    duration_us = round(max(end_us - begin_us, 0.0), 1)
    return {
        "ph": "X", "name": name, "pid": process, "tid": track, "ts": begin_us, "dur": duration_us, "args": args
    }  # fmt: skip


def _counter(name: str, process: int, at_us: float, value: float) -> Line:
    return {"ph": "C", "name": name, "pid": process, "ts": at_us, "args": {"": round(value, 3)}}


def _instant(name: str, at_s: float, args: Mapping[str, Any]) -> Line:
    return {"ph": "i", "s": "t", "name": name, "pid": TRAINER, "tid": 1, "ts": _us(at_s), "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)

"""`rollout --record`: a fleet's rollout as a run folder, so that `paceline report` shows it.

The rollout is recorded as one step without training; each `--resume` adds a step.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from paceline.commands.rollout.job import Job
from paceline.config import FleetSettings
from paceline.errors import RecordError
from paceline.record import (
    FILE_NAME,
    Header,
    Note,
    Phases,
    RecordReader,
    RecordWriter,
    ResponseDone,
    RunEnd,
    TrainStep,
    describe_machine,
    describe_versions,
    measure_tail,
)
from paceline.types import StepObservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.fleet.fleet import Finished, Fleet
    from paceline.fleet.recording import FleetRecording
    from paceline.types import Response

TASK = "Rollout"
"""What the record of a rollout alone says that it is of."""


def refuse_existing_record(folder: Path, *, may_go: bool) -> None:
    """Raise RecordError when the folder holds a record. may_go: one of a rollout may be there, to go on or to go."""
    if not (folder / FILE_NAME).exists():
        return
    if (task := _task_of(folder)) not in {TASK, None}:
        raise RecordError(f"--record {folder} holds a run of another kind ({task!r}): give another folder")
    if not may_go:
        raise RecordError(
            f"--record {folder} already holds a run: continue with --resume, replace it with --overwrite, or give "
            "another folder"
        )


def _task_of(folder: Path) -> str | None:
    """What a record is of; None where it cannot be read."""
    try:
        with RecordReader(folder) as reader:
            return reader.header.task
    except RecordError:
        return None


class RolloutRecord:
    """Written while the fleet runs. Use it in `with`, around the loop that advances the fleet."""

    def __init__(
        self, folder: Path, job: Job, settings: FleetSettings, *, resume: bool, overwrite: bool
    ) -> None:
        """Raises RecordError when the folder cannot be written or holds a run that is not to be touched."""
        self._job = job
        self._step = 1
        if resume and (folder / FILE_NAME).exists():
            with RecordReader(folder) as reader:
                self._step += max((getattr(event, "step", 0) for event in reader), default=0)
            self._record = RecordWriter.resume(folder)
        else:
            self._record = RecordWriter.create(folder, _describe(job, settings), overwrite=overwrite)
        self._recording: FleetRecording
        self._seen: list[StepObservation] = []
        self._ends_s: list[float] = []
        self._last_s = 0.0
        self._num_tokens = 0

    def begin(self, fleet: Fleet) -> None:
        """The rollout begins: call it before requests are submitted."""
        from paceline.fleet.recording import FleetRecording

        self._recording = FleetRecording(fleet, self._record, self._step)
        if fleet.invariance_gap is not None:
            self._record.write(Note(t_s=self._record.now_s(), text=fleet.invariance_gap))

    def look(self, finished: Sequence[Finished]) -> None:
        """The fleet has advanced, and these responses have finished."""
        now_s = self._last_s = self._record.now_s()
        self._seen += [step.seen for step in self._recording.take_steps(now_s)]
        self._write_chunks()
        for one in finished:
            self._write_response(one.index, one.response, now_s)

    def take_observations(self) -> list[StepObservation]:
        """Engine steps since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def _write_chunks(self) -> None:
        from paceline.fleet.recording import describe_chunk

        for chunk in self._recording.take_chunks():
            self._num_tokens += chunk.num_tokens
            self._record.write(describe_chunk(chunk, self._step, *self._place(chunk.index)))

    def _place(self, index: int) -> tuple[int, int]:
        """Group and sample of a missing response: the line of its prompt, and which of its responses it is."""
        prompt, sample, _ = self._job.todo[index]
        return prompt.line, sample

    def _write_response(self, index: int, response: Response, now_s: float) -> None:
        group, sample = self._place(index)
        self._ends_s.append(now_s)
        self._record.write(
            ResponseDone(
                t_start_s=self._recording.begin_s,
                t_end_s=now_s,
                step=self._step,
                group=group,
                sample=sample,
                prompt_tokens=len(response.request.prompt),
                response_tokens=len(response.tokens),
                num_steps=response.num_steps,
                drafted=response.num_draft_tokens,
                accepted=response.num_accepted_tokens,
                finish_reason=response.finish_reason,
            )
        )

    def _end(self, reason: str) -> None:
        """Record what is still open, then the rollout as a whole."""
        if self._ends_s:
            self._recording.end()
            self._write_chunks()
            self._record.write(
                TrainStep(
                    step=self._step,
                    t_start_s=self._recording.begin_s,
                    phases=Phases(rollout_s=self._last_s - self._recording.begin_s),
                    tokens=self._num_tokens,
                    tail_s=measure_tail(self._ends_s),
                )
            )
        self._record.write(RunEnd(t_s=self._record.now_s(), reason=reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, typer.Exit):
                self._end("failed")
            else:
                self._end("finished" if len(self._ends_s) == len(self._job.todo) else "interrupted")
        finally:
            self._record.close()


def _describe(job: Job, settings: FleetSettings) -> Header:
    engine = job.launch.settings
    return Header(
        machine=describe_machine(),
        versions=describe_versions(),
        started_unix_s=time.time(),
        config={
            "options": dict(job.options),
            "fleet": settings.model_dump(mode="json"),
            "engine": None if engine is None else engine.model_dump(mode="json"),
        },
        model=job.launch.model.resolve().name,
        task=TASK,
    )

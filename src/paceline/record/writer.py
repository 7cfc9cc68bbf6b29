"""Writes a record.

Invariants: a line that was written is never changed; every line that the writer accepts can be read back; the
writer holds O(1) memory however long the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from paceline.config import RecordConfig
from paceline.errors import RecordError
from paceline.record.append import AppendFile
from paceline.record.machine import describe_machine, describe_versions
from paceline.record.reader import RecordReader
from paceline.record.schema import (
    FILE_NAME,
    Event,
    Header,
    Line,
    Machine,
    Resumed,
    RunEnd,
    TrainStep,
    end_of,
)
from paceline.record.steps import StepMerger
from paceline.types import StepObservation

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class RecordWriter:
    """Appends events to `<run_dir>/record.jsonl`; one per run folder (locked), safe to call from threads.

    Each event is one line, written by the rules of record/append.py; the disk is asked to keep it (fsync) every
    `config.sync_s` seconds, after each train step and at the end.
    """

    def __init__(self, file: AppendFile, config: RecordConfig, offset_s: float) -> None:
        """Use `create` or `resume`."""
        self.path = file.path
        self.config = config
        self._file = file
        self._began = time.monotonic() - offset_s
        self._mergers: dict[str, StepMerger] = {}
        self._lock = threading.RLock()

    @classmethod
    def create(
        cls,
        run_dir: Path,
        header: Header,
        config: RecordConfig | None = None,
        *,
        overwrite: bool = False,
        clear: Callable[[], None] | None = None,
    ) -> Self:
        """Start a record. RecordError if there is one (unless `overwrite`) or the folder is not writable.

        clear: removes what belongs to an older record, once no other process writes that and before this one begins.
        """
        config = config or RecordConfig()
        file = _open(run_dir, config)
        writer = cls(file, config, 0.0)
        try:
            if file.size and not overwrite:
                raise RecordError(
                    f"{file.path} already holds a run; continue it with --resume, replace it with --overwrite, "
                    "or choose another --out"
                )
            file.cut(0)
            if clear is not None:
                clear()
            writer._append(header)
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(
        cls,
        run_dir: Path,
        config: RecordConfig | None = None,
        *,
        machine: Machine | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Self:
        """Continue a record: cut off a torn last line, wind the run clock to its last event, note it.

        RecordError if there is no record, it cannot be read, or another process is writing it.
        """
        config = config or RecordConfig()
        with RecordReader(run_dir) as reader:
            file = _open(run_dir, config)
            try:
                last_s = max(map(end_of, reader), default=0.0)
                file.cut(reader.num_bytes)
            except BaseException:
                file.close()
                raise
        writer = cls(file, config, last_s)
        try:
            writer.write(
                Resumed(
                    t_s=last_s,
                    resumed_unix_s=time.time(),
                    machine=machine or describe_machine(),
                    versions=dict(describe_versions() if versions is None else versions),
                )
            )
        except BaseException:
            writer.close()
            raise
        return writer

    def now_s(self) -> float:
        """The run clock: seconds since the run began, time between interruption and resumption left out."""
        return time.monotonic() - self._began

    def write(self, event: Event) -> None:
        """Append one event. RecordError if it cannot be encoded or the disk does not take it."""
        with self._lock:
            if isinstance(event, TrainStep | RunEnd):
                self.flush_steps()
            self._append(event)
            if isinstance(event, TrainStep):
                self._file.sync()

    def add_step(
        self,
        t_s: float,
        seen: StepObservation,
        *,
        num_generated_tokens: int = 0,
        step: int = 0,
        worker: str = "",
    ) -> None:
        """Add one engine step that began at `t_s`; steps are merged into samples of `bucket_ms`."""
        with self._lock:
            merger = self._mergers.get(worker)
            if merger is None or merger.step != step:
                self._write_sample(merger)
                merger = self._mergers[worker] = StepMerger(self.config.bucket_ms / 1000, step, worker)
            if merger.add(t_s, seen, num_generated_tokens):
                self._write_sample(merger)

    def flush_steps(self) -> None:
        """Write the engine steps that are still being merged."""
        with self._lock:
            for merger in self._mergers.values():
                self._write_sample(merger)

    def close(self) -> None:
        """Write what is pending and close the file; a second call does nothing."""
        with self._lock:
            if not self._file.is_open:
                return
            try:
                self.flush_steps()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_sample(self, merger: StepMerger | None) -> None:
        sample = merger.take() if merger else None
        if sample is not None:
            self.write(sample)

    def _append(self, line: Line) -> None:
        self._file.append(_encode(line))


def _encode(line: Line) -> bytes:
    try:
        data = _encoder.encode(line)
        _decoder.decode(data)  # not-a-number becomes null on the way: refuse it where a number is needed
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise RecordError(f"cannot record {type(line).__name__}: {error}") from error
    return data + b"\n"


def _open(run_dir: Path, config: RecordConfig) -> AppendFile:
    remedy = "Free some space, then continue with --resume"
    return AppendFile.open(Path(run_dir) / FILE_NAME, "events", remedy, sync_s=config.sync_s)

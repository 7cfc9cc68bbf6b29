"""Writes a record.

Invariants: a line that was written is never changed; every line that the writer accepts can be read back; the
writer holds O(1) memory however long the run.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from paceline.config import RecordConfig
from paceline.errors import RecordError
from paceline.record.events import (
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
from paceline.record.machine import describe_machine, describe_versions
from paceline.record.reader import RecordReader
from paceline.record.steps import StepMerger
from paceline.types import StepObservation

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class RecordWriter:
    """Appends events to `<run_dir>/record.jsonl`; one per run folder (locked), safe to call from threads.

    Each event is one write of one line, handed to the operating system at once; the disk is asked to keep it
    (fsync) every `config.sync_s` seconds, after each train step and at the end. When the disk is full the
    torn line is cut off again and `RecordError` says what was kept.
    """

    def __init__(self, path: Path, fd: int, config: RecordConfig, offset_s: float) -> None:
        """Use `create` or `resume`."""
        self.path = path
        self.config = config
        self._fd = fd
        self._num_events = 0
        self._began = time.monotonic() - offset_s
        self._synced = time.monotonic()
        self._mergers: dict[str, StepMerger] = {}
        self._lock = threading.RLock()

    @classmethod
    def create(
        cls, run_dir: Path, header: Header, config: RecordConfig | None = None, *, overwrite: bool = False
    ) -> Self:
        """Start a record. RecordError if there is one (unless `overwrite`) or the folder is not writable."""
        path = Path(run_dir) / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the run folder {path.parent}: {error.strerror}") from error
        fd = _open_locked(path, os.O_CREAT)
        if os.fstat(fd).st_size and not overwrite:
            os.close(fd)
            raise RecordError(
                f"{path} already holds a run; continue it with --resume, replace it with --overwrite, "
                "or choose another --out"
            )
        os.ftruncate(fd, 0)
        writer = cls(path, fd, config or RecordConfig(), 0.0)
        try:
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
        path = Path(run_dir) / FILE_NAME
        with RecordReader(run_dir) as reader:
            fd = _open_locked(path)
            try:
                last_s = max(map(end_of, reader), default=0.0)
                os.ftruncate(fd, reader.num_bytes)
            except BaseException:
                os.close(fd)
                raise
        writer = cls(path, fd, config or RecordConfig(), last_s)
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
            if isinstance(event, TrainStep) or time.monotonic() - self._synced >= self.config.sync_s:
                self._sync()

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
            if self._fd < 0:
                return
            try:
                self.flush_steps()
                self._sync()
            finally:
                os.close(self._fd)
                self._fd = -1

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
        if self._fd < 0:
            raise RecordError(f"{self.path} is closed; open it again with RecordWriter.resume")
        data = _encode(line)
        begin = os.fstat(self._fd).st_size
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            self._cut_torn_line(begin)
            raise self._lost(error) from error
        self._num_events += 1

    def _cut_torn_line(self, begin: int) -> None:
        try:
            os.ftruncate(self._fd, begin)
        except OSError:  # the torn line stays; readers and `resume` pass over it
            return

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._lost(error) from error
        self._synced = time.monotonic()

    def _lost(self, error: OSError) -> RecordError:
        kept_bytes = os.fstat(self._fd).st_size
        return RecordError(
            f"cannot write {self.path}: {error.strerror}; {self._num_events} events of this session "
            f"({kept_bytes} bytes in the file) are kept. Free some space, then continue with --resume"
        )


def _encode(line: Line) -> bytes:
    try:
        data = _encoder.encode(line)
        _decoder.decode(data)  # not-a-number becomes null on the way: refuse it where a number is needed
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise RecordError(f"cannot record {type(line).__name__}: {error}") from error
    return data + b"\n"


def _open_locked(path: Path, flags: int = 0) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    except OSError as error:
        raise RecordError(f"cannot open {path} for writing: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise RecordError(
            f"{path} is being written by another process; wait for it or choose another --out"
        ) from error
    return fd

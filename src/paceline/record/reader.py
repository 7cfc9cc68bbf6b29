"""Reads a record as a stream; memory does not grow with the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, get_args

import msgspec

from paceline.errors import RecordError
from paceline.record.damage import UNREADABLE
from paceline.record.schema import FILE_NAME, SCHEMA_VERSION, Event, Header, Line

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Line))


class _Schema(msgspec.Struct):
    """What every version of the first line has in common."""

    event: str
    schema: int


class _Kind(msgspec.Struct):
    """What every line has."""

    event: str


class RecordReader:
    """Streams a record: `header` at once, then the events by iteration. Close it, or use it in `with`.

    A torn last line (a crash, or a run that is being written) is passed over and `torn` becomes True. Kinds of events
    that a newer Paceline has added are passed over. Any other line that cannot be read is a RecordError that names it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.torn = False
        self.num_bytes = 0
        """Bytes of the lines read so far."""
        self._line_number = 1
        self._file = self._open()
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except FileNotFoundError as error:
            raise RecordError(
                f"{self.path} does not exist; give the folder of a run (the --out of `paceline train`)"
            ) from error
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}") from error

    def _read_header(self) -> Header:
        line = self._file.readline()
        no_header = f"{self.path}, line 1: no record header; the file is empty, torn or not a Paceline record"
        if not line.endswith(b"\n"):
            raise RecordError(no_header)
        try:
            found = msgspec.json.decode(line, type=_Schema)
        except UNREADABLE as error:
            raise RecordError(no_header) from error
        if found.schema != SCHEMA_VERSION:
            raise RecordError(
                f"{self.path} has schema version {found.schema}, this Paceline reads version "
                f"{SCHEMA_VERSION}; install the Paceline that wrote the run, or a newer one"
            )
        header = self._decode(line)
        if not isinstance(header, Header):
            raise RecordError(f"{self.path}, line 1: a header was expected, found `{found.event}`")
        self.num_bytes = len(line)
        return header

    def _decode(self, line: bytes) -> Line | None:
        """The line, None for a kind of event that this Paceline does not know."""
        try:
            return _decoder.decode(line)
        except UNREADABLE as error:
            if _is_of_unknown_kind(line):
                return None
            raise RecordError(
                f"{self.path}, line {self._line_number}: not a record event ({error}); "
                "restore the file, or delete that line to go on without it"
            ) from error

    def __iter__(self) -> Iterator[Event]:
        for line in self._file:
            self._line_number += 1
            if not line.endswith(b"\n"):
                self.torn = True
                return
            event = self._decode(line)
            if isinstance(event, Header):
                raise RecordError(
                    f"{self.path}, line {self._line_number}: a second header; two runs were mixed"
                )
            self.num_bytes += len(line)
            if event is not None:
                yield event

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_of_unknown_kind(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=_Kind).event not in _KINDS
    except UNREADABLE:
        return False

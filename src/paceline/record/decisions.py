"""The decision log: what live planning was given and what it decided, so that it can be planned again.

One file per process that decides, `<folder>/engine-1.decisions`, `controller-1.decisions`, ..; the header, then a line
per input or decision, in the order in which they happened. Written by engine/loop_log.py and
fleet/controller_log.py, read by `paceline replay`. `docs/run-folder.md` describes every line.

MessagePack, not JSON as `record.jsonl` is: a replay needs every number bit for bit (not-a-number included), and half of
the bytes are path probabilities. Each line is preceded by its length as a MessagePack number of five bytes, so that the
file is a plain stream of MessagePack objects. Invariants: a line that was written is never changed, at most the last
one is torn; whatever keeps a line from being written ends the log, never the rollout.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NoReturn, Self, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from paceline import __version__
from paceline.config import describe
from paceline.errors import RecordError
from paceline.record.append import AppendFile
from paceline.record.damage import UNREADABLE
from paceline.types import Float32Array, StepObservation

LOGGER = logging.getLogger(__name__)

DECISIONS_VERSION = 1
DECISIONS_FOLDER = "decisions"
"""In a run folder."""
SUFFIX = ".decisions"

Kind = Literal["engine", "controller"]
_Settings = TypeVar("_Settings", bound=BaseModel)

_FRAME = struct.Struct(">BI")
_UINT32 = 0xCE  # MessagePack's mark of a number in the four bytes that follow


class DecisionHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    version: int = DECISIONS_VERSION
    kind: Kind
    paceline: str = __version__
    settings: dict[str, Any]
    """EngineSettings or FleetSettings, all fields."""


class _Version(msgspec.Struct):
    """What every version of the first line has in common."""

    version: int


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Path probabilities, [num_rows, width] float32: positive up to a row's end and 0 behind it."""

    width: int
    lengths: bytes  # [num_rows] uint8
    values: bytes  # [sum of lengths] float32, row by row

    @classmethod
    def pack(cls, table: Float32Array) -> Rows:
        """The rows of `table`, at most 255 wide."""
        inside = table > 0
        lengths = np.count_nonzero(inside, axis=1).astype(np.uint8)
        return cls(table.shape[1], lengths.tobytes(), table[inside].tobytes())

    def unpack(self) -> Float32Array:
        """The table again, bit for bit."""
        lengths = np.frombuffer(self.lengths, np.uint8)
        table = np.zeros((len(lengths), self.width), np.float32)
        table[np.arange(self.width) < lengths[:, None]] = np.frombuffer(self.values, np.float32)
        return table


class PathCandidates(msgspec.Struct, frozen=True, array_like=True):
    """The candidates of a `PathSnapshot`."""

    owners: tuple[int, ...]
    tokens: bytes  # [num_candidates, width] int32
    path_probability: Rows
    limits: tuple[int, ...]
    covered: tuple[int, ...]
    contexts: tuple[int, ...]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="line"):
    """Base of every line but the header."""


class BudgetLine(_Line, frozen=True, tag="budget"):
    """The draft budget of a step."""

    num_context_tokens: int
    """Of the requests that may draft, all together."""
    num_other_tokens: int
    max_total_draft_tokens: int
    drafts: Rows
    lengths: tuple[int, ...]
    """The decision: draft tokens of each request."""
    has_model_drafts: bool = False
    """Whether a model has drafted for the step."""
    weights: bytes = b""  # [num_requests] float64 of the snapshot, empty: none
    judged: bool = False
    """Whether the step was compared with what `free` alone would have made of it."""
    steps_left: float = math.inf
    """To the ends of the responses, in the mean, as far as is known; if the step was judged."""
    free: Rows | None = None
    """The model-free drafter's drafts, if the step was judged and there were any."""


class PathsLine(_Line, frozen=True, tag="paths"):
    """The alternatives of the step of the budget line before."""

    max_rows: int = 0
    candidates: PathCandidates | None = None
    """None, the first decision: none could pay, so none were made."""
    chosen: tuple[int, ...] = ()
    """The second: which candidates."""
    lengths: tuple[int, ...] = ()


class PathsGainLine(_Line, frozen=True, tag="gain"):
    """What the alternatives of a step promised and gained."""

    promised: float
    gained: float


class DrafterLine(_Line, frozen=True, tag="drafter"):
    """What the model drafter shall do after the step."""

    floor: float | None = None
    """None: it rests."""
    level_costs: bytes = b""  # [num_requests + 1] float32
    most_requests: int | None = None
    """Requests to draft for at most, in a trial; None: all."""
    for_all: bool = False
    """A trial's drafts, too, are for all requests: steps overlap."""
    num_requests: int = 0
    """That the coming step will have; 0: those of the budget line before (written before prompts counted)."""
    num_coming_tokens: int | None = None
    """Of the coming step, if it is known to do nothing but decode (`budget.draft_depth`)."""
    backlog: float = 0.0
    """Tokens that the drafter has not read."""
    steps_left: float = math.inf
    """As in `BudgetLine`."""
    is_alive: bool = True
    """Whether it is known that the drafter is not dead (planning/zero_acceptance.py)."""


class GrowthLine(_Line, frozen=True, tag="growth"):
    """What the model drafter's last drafts cost; see DraftGrowth."""

    num_levels: int
    num_rows: int
    seconds: float
    num_requests: int = 0
    """That were drafted for; 0: all (written before there was a choice)."""
    reading_s: float = 0.0
    """Catching up with what was written since the last drafts."""
    num_open: int = 0
    """Responses that are open."""
    backlog: float = 0.0
    """Tokens of theirs that the drafter had not read before."""


class NewDrafterLine(_Line, frozen=True, tag="new_drafter"):
    """The model drafter has other weights: whether it pays is learned anew."""

    is_other: bool = False
    """Another of the engine's drafters drafts from here on: what it costs is learned anew too."""


class WaitLine(_Line, frozen=True, tag="wait"):
    """Whether a step waits for drafts that a draft worker has under way; the fields of a WaitSnapshot."""

    num_requests: int
    open_probability: float
    acceptance: float
    num_tokens: int
    arrival_s: float
    step_s: float
    longer_step_s: float
    wait_s: float
    """The decision, 0: it does not."""
    drafter: int = 0
    """Whose drafts are expected: 0 the model drafter's, 1 the first further one's."""


class WindowsLine(_Line, frozen=True, tag="windows"):
    """Reconfiguration: the window and mode of every response that drafts (planning/reconfigure.py)."""

    acceptance: bytes  # [num_requests] float64
    draft_s: float
    """D, of a token of all that draft."""
    verify_s: bytes  # [max_window + 1] float64, V of the windows 0 .. max_window
    windows: tuple[int, ...]
    """The decision, as is the next."""
    is_coupled: tuple[bool, ...]
    drafter: int = 0
    """Whose windows they are, as in WaitLine."""
    num_idle: int = 0
    """Plans before this one, in a row, that found nothing worth drafting."""


class CouplingLine(_Line, frozen=True, tag="coupling"):
    """How the coming step's drafts are made, in an engine that chooses (planning/coupling.py)."""

    is_ahead: bool = False
    """The decision: ahead, on a core that the target lacks; or by turns, with all cores."""
    has_worker: bool = True
    """Whether anybody could draft ahead."""
    begins_again: bool = False
    """Drafting was switched off."""


class StepLine(_Line, frozen=True, tag="step"):
    """A measured step, as the budget learns from it."""

    step: StepObservation
    expected_tokens: float
    """Accepted tokens that its drafts promised."""


class ControllerLine(_Line, frozen=True, tag="controller"):
    """An event, and what the controller answered."""

    event: str
    """Name of its class in control/events.py."""
    body: msgspec.Raw
    actions: tuple[str, ...] = ()
    """Each as text, with a digest of its tokens (fleet/controller_log.py)."""
    error: str | None = None
    """What was raised instead."""


EngineLine = (
    BudgetLine
    | PathsLine
    | PathsGainLine
    | DrafterLine
    | GrowthLine
    | NewDrafterLine
    | WaitLine
    | WindowsLine
    | CouplingLine
    | StepLine
)
DecisionLine = EngineLine | ControllerLine

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DecisionLine] = msgspec.msgpack.Decoder(DecisionLine)


class DecisionWriter:
    """Appends to a new file (record/append.py); made by `create`. One thread."""

    def __init__(self, path: Path, file: AppendFile | None) -> None:
        self.path = path
        self._file = file

    @classmethod
    def create(cls, folder: Path, header: DecisionHeader) -> Self:
        """Begin the next file of this kind in `folder`; no file is ever replaced.

        Never raises for a disk that refuses: it warns, and the writer writes nothing.
        """
        writer = cls(folder, None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writer._file = _open_next(folder, header.kind)
            writer.path = writer._file.path
        except OSError as error:
            writer._give_up(error.strerror or str(error))
        writer._append(header)
        return writer

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._file is not None

    def write(self, line: DecisionLine) -> None:
        """Append a line. Whatever goes wrong is warned of once and ends the log."""
        self._append(line)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: DecisionHeader | DecisionLine) -> None:
        if self._file is None:
            return
        try:
            data = _encoder.encode(line)
            self._file.append(_FRAME.pack(_UINT32, len(data)) + data)
        except (RecordError, TypeError, ValueError, OverflowError, struct.error) as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        LOGGER.warning("decisions are no longer logged to %s: %s; the rollout goes on", self.path, reason)
        self.close()


class DecisionReader:
    """Streams a log: `header` at once, then the lines by iteration. Close it, or use it in `with`.

    A torn last line (a process was killed, or still writes) is passed over and `torn` becomes True.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        self._file = self._open()
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}") from error

    def settings(self, kind: type[_Settings]) -> _Settings:
        """The header's settings. Raises RecordError for those of another Paceline that do not fit this one."""
        try:
            return kind.model_validate(self.header.settings)
        except ValidationError as error:
            raise RecordError(
                f"{self.path} was written by Paceline {self.header.paceline}, whose settings this one does not know "
                f"({describe(error)}): replay it with that Paceline"
            ) from error

    def refuse(self, line: DecisionLine) -> NoReturn:
        """Raise RecordError for a line that has no place in a log of this kind."""
        raise RecordError(
            f"{self.path} is of kind {self.header.kind} and has a {type(line).__name__}: it is damaged"
        )

    def _read_header(self) -> DecisionHeader:
        try:
            line = self._read_line()
            if line is None:
                raise RecordError(f"{self.path} is empty: the process that began it was killed at once")
            version = msgspec.msgpack.decode(line, type=_Version).version
            if version != DECISIONS_VERSION:
                raise RecordError(
                    f"{self.path} is a decision log of version {version}, this Paceline reads version "
                    f"{DECISIONS_VERSION}: replay it with the Paceline that wrote it"
                )
            return msgspec.msgpack.decode(line, type=DecisionHeader)
        except UNREADABLE as error:
            raise RecordError(f"{self.path} is not a decision log ({error})") from error

    def _read_line(self) -> bytes | None:
        """The next whole line; None at the end, or where a line is torn."""
        frame = self._file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            self.torn = bool(frame)
            return None
        mark, size = _FRAME.unpack(frame)
        if mark != _UINT32:
            raise RecordError(f"{self.path} is not a decision log, or damaged at byte {self._file.tell()}")
        line = self._file.read(size)
        if len(line) < size:
            self.torn = True
            return None
        return line

    def __iter__(self) -> Iterator[DecisionLine]:
        while (line := self._read_line()) is not None:
            try:
                yield _decoder.decode(line)
            except UNREADABLE as error:
                raise RecordError(
                    f"{self.path}, the line that ends at byte {self._file.tell()}: not a decision ({error}); the file "
                    "is damaged"
                ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_decisions(path: Path) -> list[Path]:
    """The logs of a file, a folder of logs or a run folder, in order. Raises RecordError if there are none."""
    folder = path / DECISIONS_FOLDER if (path / DECISIONS_FOLDER).is_dir() else path
    found = [path] if path.is_file() else [*folder.glob(f"*{SUFFIX}")]
    if not found:
        raise RecordError(
            f"{path} holds no decision log: record one with `paceline rollout --decisions DIR`, or `paceline train "
            "--set record.decisions=true`"
        )
    return sorted(found, key=lambda file: (len(file.name), file.name))


def _open_next(folder: Path, kind: Kind) -> AppendFile:
    """Create the first file of this kind that nobody has; several processes may ask at once."""
    number = 1
    while True:
        try:
            path = folder / f"{kind}-{number}{SUFFIX}"
            return AppendFile.create(path, "decisions", "They can be replayed", sync_s=None)
        except FileExistsError:
            number += 1

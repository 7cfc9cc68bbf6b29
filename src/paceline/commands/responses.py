"""The output of `paceline rollout`: one JSON line per finished response, appended as it finishes.

Invariants: a line is one write and is never changed; at most the last line can be torn, and `resume` cuts it off; a
response is known by (prompt id, sample), and its key, policy and options must be those of the run that goes on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from paceline.errors import RecordError

Identity = tuple[str | int, int]
"""(prompt id, sample)"""


class ResponseLine(msgspec.Struct, frozen=True, omit_defaults=False):
    """One line, but for the fields that are carried through from the prompts file."""

    id: str | int
    sample: int
    group: int
    """Rollout group: responses to equal prompts share it."""
    key: int | None
    """Dice key, 64 bits; null without Paceline."""
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    """The tokens as text, special tokens left out; null for a model without a tokenizer."""
    logprobs: tuple[float, ...]
    finish_reason: str
    policy: str
    """Model folder."""
    policy_fingerprint: str
    options: dict[str, Any]
    """Everything else that decides the tokens."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    """Engine steps in which the response decoded."""


RESERVED = frozenset(ResponseLine.__struct_fields__) - {"id", "prompt_ids"}
"""Field names that a prompts file may not carry."""


class KnownResponse(msgspec.Struct, frozen=True):
    """What a resumed run reads of a line."""

    id: str | int
    sample: int
    key: int | None
    policy_fingerprint: str
    options: dict[str, Any]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(KnownResponse)


def encode_line(line: ResponseLine, fields: Mapping[str, Any]) -> bytes:
    """The line with the prompt's other fields, newline included."""
    return _encoder.encode({**msgspec.structs.asdict(line), **fields}) + b"\n"


class ResponseFile:
    """An output file that this process alone appends to. Use `create` or `resume`; close it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self.num_written = 0

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> Self:
        """Start a file. RecordError when it holds responses already (unless `overwrite`) or cannot be written."""
        if not overwrite:
            refuse_existing(path)
        file = cls(path, _open(path))
        file._cut(0)
        return file

    @classmethod
    def resume(cls, path: Path) -> tuple[Self, dict[Identity, KnownResponse]]:
        """Continue a file, or start it when there is none; also what it holds. A torn last line is cut off.

        RecordError for a line that this command has not written.
        """
        file = cls(path, _open(path))
        try:
            return file, file._read()
        except BaseException:
            file.close()
            raise

    def _read(self) -> dict[Identity, KnownResponse]:
        known: dict[Identity, KnownResponse] = {}
        end = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    found = _decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise RecordError(
                        f"{self.path}, line {number} is not a response of 'paceline rollout' ({error}): choose another "
                        "--out, or start anew with --overwrite"
                    ) from error
                known[found.id, found.sample] = found
                end += len(line)
        if end != self._size:
            self._cut(end)
        return known

    def append(self, line: bytes) -> None:
        """Write one line. RecordError when the disk refuses; what was written before stays whole."""
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            self._cut(self._size)
            raise RecordError(
                f"cannot write to {self.path}: {error.strerror}; the {self.num_written} responses of this run that "
                "are in it are whole. Free some space and go on with --resume"
            ) from error
        self._size += len(line)
        self.num_written += 1

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise RecordError(f"cannot write to {self.path}: {error.strerror}") from error
        self._size = size

    def close(self) -> None:
        """Hand the lines to the disk and close."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            except OSError as error:
                raise RecordError(f"the disk did not keep all of {self.path}: {error.strerror}") from error
            finally:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def refuse_existing(path: Path) -> None:
    """Raise RecordError when there is something in the file."""
    if path.is_file() and path.stat().st_size:
        raise RecordError(
            f"{path} already holds responses: continue with --resume, replace them with --overwrite, or choose "
            "another --out"
        )


def _open(path: Path) -> int:
    """Open for appending, under a lock that ends with the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RecordError(f"cannot write to {path}: {error.strerror}; choose another --out") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise RecordError(
            f"{path} is being written by another process: wait for it, or choose another --out"
        ) from error
    return fd


def refuse_difference(
    path: Path, known: KnownResponse, key: int | None, fingerprint: str, options: dict[str, Any]
) -> None:
    """Raise RecordError when a response in the file is not one that this run would make."""
    where = f"{path} holds responses (id {known.id!r}, sample {known.sample})"
    remedy = "run with what they were made with, or start anew with --overwrite"
    if known.policy_fingerprint != fingerprint:
        raise RecordError(f"{where} of other weights than the model's: {remedy}")
    for name in sorted(options.keys() | known.options.keys()):
        then, now = known.options.get(name), options.get(name)
        if then != now:
            raise RecordError(f"{where} made with {name}={then!r}, this run has {now!r}: {remedy}")
    if known.key != key:
        raise RecordError(f"{where} of another prompt than the prompts file now has: {remedy}")

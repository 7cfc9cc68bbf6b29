"""The output of `paceline rollout`: one JSON line per finished response, appended as it finishes.

Invariants: a line is written whole and never changed (record/append.py), taken out only if it has failed and is to be
made again; a response is known by (prompt id, sample),
and its key, policy and options must be those of the run that goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from paceline.errors import RecordError
from paceline.record.append import AppendFile, read_lines
from paceline.record.damage import UNREADABLE

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
    failure: str | None = None
    """Why the response ended early, where finish_reason is "error"."""


RESERVED = frozenset(ResponseLine.__struct_fields__) - {"id", "prompt_ids"}
"""Field names that a prompts file may not carry."""


class KnownResponse(msgspec.Struct, frozen=True):
    """What a resumed run reads of a line."""

    id: str | int
    sample: int
    key: int | None
    policy_fingerprint: str
    options: dict[str, Any]
    finish_reason: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(KnownResponse)


def encode_line(line: ResponseLine, fields: Mapping[str, Any]) -> bytes:
    """The line with the prompt's other fields, newline included."""
    return _encoder.encode({**msgspec.structs.asdict(line), **fields}) + b"\n"


class ResponseFile:
    """An output file that this process alone appends to. Use `create` or `resume`; close it."""

    def __init__(self, file: AppendFile) -> None:
        self.path = file.path
        self._file = file

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> Self:
        """Start a file. RecordError when it holds responses already (unless `overwrite`) or cannot be written."""
        if not overwrite:
            refuse_existing(path)
        file = _open(path)
        file.cut(0)
        return cls(file)

    @classmethod
    def resume(
        cls, path: Path, *, without_failed: bool = False
    ) -> tuple[Self, dict[Identity, KnownResponse]]:
        """Continue a file, or start it when there is none; also what it holds. A torn last line is cut off.

        without_failed: take out the lines of responses that have failed; the file is replaced as a whole. RecordError
        for a line that this command has not written.
        """
        file = _open(path)
        try:
            known = _read(file)
            if without_failed and any(map(_has_failed, known.values())):
                file = _replace(file)
                known = {name: one for name, one in known.items() if not _has_failed(one)}
            return cls(file), known
        except BaseException:
            file.close()
            raise

    @property
    def num_written(self) -> int:
        """Responses that this process has written."""
        return self._file.num_appended

    def append(self, line: bytes) -> None:
        """Write one line. RecordError when the disk refuses; what was written before stays whole."""
        self._file.append(line)

    def close(self) -> None:
        """Hand the lines to the disk and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open(path: Path) -> AppendFile:
    return AppendFile.open(path, "responses", "Free some space and go on with --resume")


def _read(file: AppendFile) -> dict[Identity, KnownResponse]:
    """The responses of a file, which is cut off behind them."""
    known: dict[Identity, KnownResponse] = {}
    end = 0
    for number, line in enumerate(read_lines(file.path), start=1):
        try:
            found = _decoder.decode(line)
        except UNREADABLE as error:
            raise RecordError(
                f"{file.path}, line {number} is not a response of 'paceline rollout' ({error}): choose another --out, "
                "or start anew with --overwrite"
            ) from error
        known[found.id, found.sample] = found
        end += len(line)
    file.cut(end)
    return known


def _has_failed(response: KnownResponse) -> bool:
    return response.finish_reason == "error"


def _replace(file: AppendFile) -> AppendFile:
    """The file without the responses that have failed, in its place. RecordError if the disk refuses."""
    path = file.path.resolve()
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as kept:
            kept.writelines(line for line in read_lines(path) if not _has_failed(_decoder.decode(line)))
            kept.flush()
            os.fsync(kept.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {new}: {error.strerror}; {path} is as it was. Free some space, or resume without "
            "--retry-failed"
        ) from error
    file.close()
    return _open(file.path)


def refuse_existing(path: Path, *, is_begun: bool = False) -> None:
    """Raise RecordError when there is something in the file, or where responses of it are begun elsewhere."""
    has_some = path.is_file() and path.stat().st_size > 0
    if has_some or is_begun:
        what = "already holds responses" if has_some else "has unfinished responses beside it"
        raise RecordError(
            f"{path} {what}: continue with --resume, replace them with --overwrite, or choose another --out"
        )


_REMEDY = "run with what they were made with, or start anew with --overwrite"

UNSAID = {"compiled": False, "linear_kernel": "vllm"}
"""Options that files from before there was a choice do not name, and what they were."""


def refuse_difference(
    path: Path, known: KnownResponse, key: int | None, fingerprint: str, options: dict[str, Any]
) -> None:
    """Raise RecordError when a response in the file is not one that this run would make."""
    where = f"{path} holds responses (id {known.id!r}, sample {known.sample})"
    refuse_other(where, known.policy_fingerprint, known.options, fingerprint, options)
    if known.key != key:
        raise RecordError(f"{where} of another prompt than the prompts file now has: {_REMEDY}")


def refuse_other(
    where: str, then_policy: str, then_options: dict[str, Any], policy: str, options: dict[str, Any]
) -> None:
    """Raise RecordError where what was made before (`where` says what) has other weights or options than this run."""
    if then_policy != policy:
        raise RecordError(f"{where} of other weights than the model's: {_REMEDY}")
    for name in sorted(options.keys() | then_options.keys()):
        then, now = then_options.get(name, UNSAID.get(name)), options.get(name)
        if then != now:
            raise RecordError(f"{where} made with {name}={then!r}, this run has {now!r}: {_REMEDY}")

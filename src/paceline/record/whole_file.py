"""Files that are there whole or not at all, and JSON files of a version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import RecordError
from paceline.record.damage import UNREADABLE

_File = TypeVar("_File", bound=msgspec.Struct)


def is_stream(path: Path) -> bool:
    """Whether what is there takes bytes but cannot be replaced: a device, a pipe."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def name_draft(path: Path) -> Path:
    """Where to write what will take the place of `path`: beside the file that it names, links followed."""
    return Path(os.path.realpath(path) + ".part")


@contextmanager
def replacing(path: Path, choice: str = "file") -> Iterator[Path]:
    """Gives the file to write; when the block ends it takes the place of `path`, after an error it is gone.

    choice: what names it, for the message. A link stays, and the file behind it is replaced; a device or a pipe is
    written to itself. Raises RecordError when it cannot be written.
    """
    draft = path if is_stream(path) else name_draft(path)
    try:
        yield draft
        if draft != path:
            os.replace(draft, os.path.realpath(path))
    except BaseException as error:
        if draft != path:
            with suppress(OSError):
                draft.unlink()
        if isinstance(error, OSError):
            raise RecordError(
                f"cannot write {path}: {error.strerror}; free some space or choose another {choice}"
            ) from error
        raise


class _Version(msgspec.Struct):
    version: int


def write_text(text: str, path: Path, choice: str = "file") -> None:
    """Write the file and its folder. choice: what names it. Raises RecordError when it cannot be written."""
    with replacing(path, choice) as draft:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")


def write_json(value: msgspec.Struct, path: Path) -> None:
    """Write the file, for a person to read too, and its folder. Raises RecordError when it cannot be written."""
    write_text(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n", path)


def read_json(path: Path, kind: type[_File], version: int, noun: str, command: str) -> _File:
    """Read a file that says its version; noun: what it is, and what one does to get it, command: what writes it.

    Raises RecordError when it is missing, damaged or of another version.
    """
    remedy = f"write one with '{command}'"
    try:
        text = path.read_bytes()
        found = msgspec.json.decode(text, type=_Version).version
        if found != version:
            raise RecordError(
                f"{path} is a {noun} of version {found}, this is version {version}: {noun} again"
            )
        return msgspec.json.decode(text, type=kind)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    except UNREADABLE as error:
        raise RecordError(f"{path} is not a {noun} ({error}): {remedy}") from error

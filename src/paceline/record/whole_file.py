"""Files that are there whole or not at all, and JSON files of a version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import RecordError

_File = TypeVar("_File", bound=msgspec.Struct)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the file to write; when the block ends it takes the place of `path`, after an error it is gone.

    Raises RecordError when it cannot be written.
    """
    draft = path.with_name(path.name + ".part")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise RecordError(
                f"cannot write {path}: {error.strerror}; free some space or choose another file"
            ) from error
        raise


class _Version(msgspec.Struct):
    version: int


def write_json(value: msgspec.Struct, path: Path) -> None:
    """Write the file, for a person to read too, and its folder. Raises RecordError when it cannot be written."""
    with replacing(path) as draft:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


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
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path} is not a {noun} ({error}): {remedy}") from error

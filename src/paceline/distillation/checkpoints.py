"""Checkpoints of a training that may be killed at any moment (TLT 4.2, selective asynchronous checkpointing).

Only what training changes is written (`Trainer.tensors`). Training is held up while it is copied in memory; a thread
writes the copy, asks the disk to keep it, and puts it in the old one's place in one move: whenever the process or the
machine ends, the file is there and whole, the old one or the new one. A copy that has not been written when the next
one comes is given up for it.
"""

from __future__ import annotations

import glob
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError, RecordError
from paceline.owned_folder import OwnedFolder, remove_leftovers
from paceline.record.append import sync

Note = Mapping[str, str]
"""What stands beside the tensors: progress, method, whatever the owner needs to go on."""


class CheckpointWriter:
    """Writes the newest state that it was given to one file, in the background. Close it.

    What goes wrong in the background is raised as RecordError by the next `save`, which saves nothing then, or by
    `close`; the file is the last whole one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: tuple[dict[str, Tensor], Note] | None = None
        self._spare: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, tensors: Mapping[str, Tensor], note: Note) -> None:
        """Copy the tensors and return; the file follows."""
        with self._changed:
            self._complain()
            given_up = self._waiting
            self._waiting = None
            copy = given_up[0] if given_up else self._spare
            self._spare = {}
        copy = _copy(tensors, copy)
        with self._changed:
            self._waiting = (copy, dict(note))
            self._changed.notify()

    def close(self) -> None:
        """Wait until the newest state is in the file."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self._complain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complain(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            reason = getattr(error, "strerror", None) or repr(error)
            raise RecordError(
                f"cannot write {self.path}: {reason}; the checkpoint before it is whole. Free some space"
            ) from error

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._waiting is None:
                    return
                (tensors, note), self._waiting = self._waiting, None
            try:
                write(self.path, tensors, note)
            except Exception as error:  # of the disk, or of memory: whoever saves is told
                self._error = error
            with self._changed:
                self._spare = tensors


def write(path: Path, tensors: Mapping[str, Tensor], note: Note) -> None:
    """Write a checkpoint in one move: whoever reads `path` finds the old one or the new one. Raises OSError, and leaves
    nothing on the disk then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = safetensors.torch.save(dict(tensors), dict(note))
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` when the block ends: in one move where there is nothing
    yet, else file by file, each in one move, `config.json` last. A block that fails leaves `out` as it was, and nothing
    beside it; what a killed process leaves there, the next one removes. Raises OSError.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(out) as folder:
        aside = folder / out.name
        aside.mkdir()
        yield aside
        if out.is_dir():
            for path in sorted(aside.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
                path.replace(out / path.name)
        else:
            aside.rename(out)


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A folder on the disk of `out` for the time of the block; those of processes that have died are removed."""
    prefix = f".{out.name}-"
    remove_leftovers(out.parent, glob.escape(prefix))
    with ExitStack() as opened:
        try:
            owned = OwnedFolder(out.parent, prefix)
            opened.callback(owned.close)
            folder = owned.path
        except OSError:  # a file system that locks no folders: who is killed there leaves one that stays
            plain = tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent, ignore_cleanup_errors=True)
            folder = Path(opened.enter_context(plain))
        yield folder


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """The tensors and the note of a checkpoint, None where there is none. Raises CheckpointError for another file."""
    with _opened(path) as file:
        if file is None:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def read_note(path: Path) -> dict[str, str] | None:
    """The note alone, as `read`."""
    with _opened(path) as file:
        return None if file is None else dict(file.metadata() or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        yield None
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of a drafter ({error}): remove it to begin anew"
        ) from error


def _copy(tensors: Mapping[str, Tensor], spare: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the tensors, in memory of an earlier copy where it fits."""
    copy = {
        name: spare[name]
        if name in spare and _fits(spare[name], tensor)
        else torch.empty_like(tensor, device="cpu")
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        copy[name].copy_(tensor)
    return copy


def _fits(spare: Tensor, tensor: Tensor) -> bool:
    return bool(spare.shape == tensor.shape and spare.dtype == tensor.dtype)

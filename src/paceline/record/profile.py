"""A profile: measured step times of one target and drafting times of its drafters, on one machine, as a JSON file.

Written by `paceline profile`, read by `ladder` and `plan`. It holds what was measured, not what was fitted, so that a
better fit needs no new measurement. Invariant: a file of another version is refused, never guessed at.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from paceline.errors import RecordError
from paceline.record.schema import Machine

PROFILE_VERSION = 1


class StepPoint(msgspec.Struct, frozen=True):
    """Steps of one shape."""

    batch: int
    """Requests."""
    tokens_per_request: int
    """Tokens of each that go through the target: its draft and the token before it."""
    context: int
    """Tokens of each so far."""
    step_s: float
    """Median seconds of a step, scheduling and sampling included, drafting not."""
    num_steps: int
    """Steps measured."""


class DraftPoint(msgspec.Struct, frozen=True):
    """Drafting for one batch."""

    batch: int
    token_s: float
    """Median seconds to draft one token for each request of the batch."""


class DrafterProfile(msgspec.Struct, frozen=True):
    """One drafter."""

    name: str
    points: tuple[DraftPoint, ...]
    num_gpus: int = 1
    """GPUs that it drafted on; 1 for the CPU."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what."""

    version: int
    target: str
    """The model folder's name."""
    dtype: str
    num_gpus: int
    """GPUs that one engine ran on; 1 for a CPU engine, which counts as one device."""
    threads: int
    """CPU threads of the engine."""
    machine: Machine
    versions: dict[str, str]
    steps: tuple[StepPoint, ...]
    drafters: tuple[DrafterProfile, ...]
    compiled: bool = False
    """Whether the target ran compiled."""


class _Version(msgspec.Struct):
    version: int


def write_profile(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all. Raises RecordError when it cannot be written."""
    draft = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise RecordError(
            f"cannot write {path}: {error.strerror}; free some space or choose another file"
        ) from error


def read_profile(path: Path) -> Profile:
    """Read the file. Raises RecordError when it is missing, damaged or of another version."""
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).version
        if version != PROFILE_VERSION:
            raise RecordError(
                f"{path} is a profile of version {version}, this is version {PROFILE_VERSION}: profile again"
            )
        return msgspec.json.decode(text, type=Profile)
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror}; write one with 'paceline profile'"
        ) from error
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path} is not a profile ({error}): write one with 'paceline profile'") from error

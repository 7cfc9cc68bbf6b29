"""A profile: measured step times of one target and drafting times of its drafters, on one machine, as a JSON file.

Written by `paceline profile`, read by `plan` and `simulate`. It holds what was measured, not what was fitted, so that a
better fit needs no new measurement. Invariant: a file of another version is refused, never guessed at.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.record.schema import Machine
from paceline.record.whole_file import read_json, write_json

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
    linear_kernel: str = "vllm"
    """Whose linear layers the target had (`EngineSettings.linear_kernel`)."""


def write_profile(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all. Raises RecordError when it cannot be written."""
    write_json(profile, path)


def read_profile(path: Path) -> Profile:
    """Read the file. Raises RecordError when it is missing, damaged or of another version."""
    return read_json(path, Profile, PROFILE_VERSION, "profile", "paceline profile")

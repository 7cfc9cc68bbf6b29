"""A plan as a file: how a rollout uses its devices, chosen by `paceline plan --out`, carried out by `rollout --plan`.

Invariant: a file of another version is refused, never guessed at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.record.whole_file import read_json, write_json

PLAN_VERSION = 1


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the devices, and what it was planned for."""

    version: int = PLAN_VERSION
    target: str
    """The model folder's name."""
    mode: Literal["plain", "coupled", "decoupled"]
    drafter: str
    """Its name in the profile; empty: none."""
    window: int
    """Draft tokens; 0: none."""
    verifiers: int
    """Engines."""
    drafters: int
    """Workers that draft for them and verify nothing."""
    engine_devices: int
    """Of one engine."""
    drafter_devices: int
    """Of one drafter; 0: it has none of its own."""
    devices: int
    requests: int
    tokens_per_s: float
    """Predicted, of one response."""

    @property
    def workers(self) -> int:
        """Of the fleet that carries it out."""
        return self.verifiers + self.drafters

    @property
    def roles(self) -> str:
        """`FleetSettings.roles`."""
        return f"{self.verifiers} verifiers + {self.drafters} drafters" if self.drafters else "auto"


def write_plan(plan: PlanFile, path: Path) -> None:
    """Write the file, whole or not at all. Raises RecordError when it cannot be written."""
    write_json(plan, path)


def read_plan(path: Path) -> PlanFile:
    """Read the file. Raises RecordError when it is missing, damaged or of another version."""
    return read_json(path, PlanFile, PLAN_VERSION, "plan", "paceline plan --out")

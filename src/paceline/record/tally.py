"""The tally of a replay: decisions planned again, how many came out differently, and the first of those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that is another one now."""

    number: int
    """Which decision of its kind in the log, from 1."""
    recorded: str
    planned: str


@dataclass(slots=True)
class Tally:
    """Decisions of one kind in one log."""

    kind: str
    num_planned: int = 0
    num_different: int = 0
    num_left: int = 0
    """Recorded decisions that could not be planned again, because an earlier one was another."""
    first: Difference | None = None

    def compare(self, recorded: Any, planned: Any, tell: Callable[[Any, Any], str]) -> bool:
        """Count a decision; returns whether both are equal. tell(one, other): what to show of one where they differ."""
        self.num_planned += 1
        if recorded == planned:
            return True
        self.num_different += 1
        if self.first is None:
            self.first = Difference(self.num_planned, tell(recorded, planned), tell(planned, recorded))
        return False

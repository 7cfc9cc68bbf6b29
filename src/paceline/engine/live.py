"""Responses while they run in an engine: one by one, and as the arrays in which a step counts them.

Called by scheduler.py alone. Knows nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.types import Float32Array, Int64Array, UInt64Array


@dataclass(slots=True)
class ScheduledResponse:
    """What the scheduler knows of a request beyond vLLM's own state."""

    response: int
    group: int
    key: int
    temperature: float
    drafts_allowed: bool
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Tokens of the response beyond one per step; drafts accepted behind its end do not count."""
    num_steps: int = 0
    is_withdrawn: bool = False
    """Whether its last step did not count, because its drafts gave NaN: the next token is computed without drafts."""
    failure: str | None = None
    """Why the response ends here and now, where it was Paceline that gave it up."""


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """Responses that go through steps together, counted in arrays until `settle`. Arrays: [num_responses]"""

    responses: list[ScheduledResponse]
    groups: Int64Array
    numbers: Int64Array
    keys: UInt64Array
    temperatures: Float32Array
    num_steps: Int64Array
    num_accepted_tokens: Int64Array
    num_draft_tokens: Int64Array

    @classmethod
    def of(cls, responses: list[ScheduledResponse]) -> LiveBatch:
        """The batch of these responses, which must be settled."""
        return cls(
            responses,
            groups=np.array([x.group for x in responses], np.int64),
            numbers=np.array([x.response for x in responses], np.int64),
            keys=np.array([x.key for x in responses], np.uint64),
            temperatures=np.array([x.temperature for x in responses], np.float32),
            num_steps=np.array([x.num_steps for x in responses], np.int64),
            num_accepted_tokens=np.array([x.num_accepted_tokens for x in responses], np.int64),
            num_draft_tokens=np.array([x.num_draft_tokens for x in responses], np.int64),
        )

    def grow(self, made: Int64Array) -> None:
        """Count a step. made: tokens that it brought to each, 0 where it did not count."""
        grew = made > 0
        self.num_steps[:] += grew
        self.num_accepted_tokens[:] += made - grew

    def settle(self) -> None:
        """Write what was counted to the responses; one that has grown is withdrawn no longer."""
        for live, steps, accepted, drafted in zip(
            self.responses,
            self.num_steps.tolist(),
            self.num_accepted_tokens.tolist(),
            self.num_draft_tokens.tolist(),
            strict=True,
        ):
            live.is_withdrawn = live.is_withdrawn and steps == live.num_steps
            live.num_steps, live.num_accepted_tokens, live.num_draft_tokens = steps, accepted, drafted

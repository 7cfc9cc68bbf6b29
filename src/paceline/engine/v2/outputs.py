"""A step's tokens on V2, without those that are none: requests that have no next token are told to the scheduler.

Invariant: the device is waited for only where vLLM waits for the step's tokens anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np

from paceline.engine.compat import ModelRunnerOutput
from paceline.engine.runner import report_drafts, report_undrawable, report_withdrawn
from paceline.engine.v2.speculator import LateDrafts

NO_TOKEN = (
    "the model gave NaN for its next token, or its sampling options leave no token to draw; check the weights and the "
    "prompt, or loosen allowed_token_ids, bad_words or min_tokens"
)


class Missing:
    """Which requests' last token is none, on its way to the host. Made before the model drafter is asked to draft, so
    that whoever waits for it does not wait for the drafts.
    """

    def __init__(self, missing: torch.Tensor) -> None:
        """missing: [num_requests] bool, on the device"""
        self._rows = async_copy_to_np(missing)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def rows(self) -> list[int]:
        """The requests' places in the batch; waits for the copy."""
        self._copied.synchronize()
        return np.flatnonzero(self._rows).tolist()  # type: ignore[no-any-return]


class CheckedOutput(AsyncOutput):  # type: ignore[misc]
    """vLLM's message, on its way to the host, with the requests whose last token is none."""

    def check(self, missing: Missing, drafted: Collection[str], late: LateDrafts | None) -> None:
        """Finish the change of class. Arguments as of the function `check`."""
        self._missing, self._drafted, self._late = missing, drafted, late

    def get_output(self) -> ModelRunnerOutput:
        """vLLM's own, in which such a request has no token.

        Where it had drafts the NaN may be theirs: attention gives weight zero to what lies behind a row, and zero times
        NaN is NaN. Its step is withdrawn, and it computes its next token without drafts.
        """
        output: Any = super().get_output()
        if self._late is not None:
            report_drafts(output, self._late.read())
        rows = [row for row in self._missing.rows() if output.sampled_token_ids[row]]
        if rows:  # a prompt that is not finished needs no token
            names = [output.req_ids[row] for row in rows]
            for row in rows:
                output.sampled_token_ids[row] = []
            report_undrawable(output, {name: NO_TOKEN for name in names if name not in self._drafted})
            report_withdrawn(output, [name for name in names if name in self._drafted])
        return output


def has_arrived(output: Any) -> bool:
    """Whether a step's tokens are on the host. Waits for nothing."""
    query = getattr(output.copy_event, "query", None)  # without a device there is nothing to wait for
    return query is None or bool(query())


def check(output: Any, missing: Missing, drafted: Collection[str], late: LateDrafts | None = None) -> Any:
    """Make vLLM's message one that is checked.

    drafted: requests whose drafts were verified, by id. late: the model drafter's, made before the step.
    """
    output.__class__ = CheckedOutput
    output.check(missing, drafted, late)
    return output

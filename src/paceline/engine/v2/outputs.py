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
from paceline.engine.runner import report_undrawable, report_withdrawn

NO_TOKEN = (
    "the model gave NaN for its next token, or its sampling options leave no token to draw; check the weights and the "
    "prompt, or loosen allowed_token_ids, bad_words or min_tokens"
)


class CheckedOutput(AsyncOutput):  # type: ignore[misc]
    """vLLM's message, on its way to the host, with the requests whose last token is none."""

    def check(self, missing: torch.Tensor, drafted: Collection[str]) -> None:
        """Finish the change of class.

        Args:
            missing: whether each request's last token is none. [num_requests] bool, on the device
            drafted: requests whose drafts were verified, by id.
        """
        self._missing, self._drafted = async_copy_to_np(missing), drafted
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        """vLLM's own, in which such a request has no token.

        Where it had drafts the NaN may be theirs: attention gives weight zero to what lies behind a row, and zero times
        NaN is NaN. Its step is withdrawn, and it computes its next token without drafts.
        """
        output: Any = super().get_output()
        self._copied.synchronize()
        rows = [row for row in np.flatnonzero(self._missing).tolist() if output.sampled_token_ids[row]]
        if rows:  # a prompt that is not finished needs no token
            names = [output.req_ids[row] for row in rows]
            for row in rows:
                output.sampled_token_ids[row] = []
            report_undrawable(output, {name: NO_TOKEN for name in names if name not in self._drafted})
            report_withdrawn(output, [name for name in names if name in self._drafted])
        return output


def check(output: Any, missing: torch.Tensor, drafted: Collection[str]) -> Any:
    """Make vLLM's message one that is checked."""
    output.__class__ = CheckedOutput
    output.check(missing, drafted)
    return output

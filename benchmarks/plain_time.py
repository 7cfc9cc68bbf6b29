"""How long plain vLLM takes for responses of given lengths: step times fitted to its own runs, summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rollouts import TAIL_SHARE, Timed
from scipy.optimize import nnls


class PlainTime:
    """How long plain vLLM takes for responses of given lengths."""

    def __init__(self, runs: Sequence[Timed]) -> None:
        """From all of plain vLLM's rollouts of one case: a single one may lack steps of few requests."""
        steps = np.array([step[:3] for run in runs for step in run.steps if step.is_decode])
        seconds = np.array([step.step_s for run in runs for step in run.steps if step.is_decode])
        self._weights, _ = nnls(_features(steps[:, 0], steps[:, 2]), seconds)
        self._prefill_s = 0.0
        rest_s = [run.wall_s - self.seconds(run)[0] for run in runs]
        self._prefill_s = max(sum(rest_s) / len(runs), 0.0)

    def seconds(self, run: Timed) -> tuple[float, float]:
        """(all, from the end of TAIL_SHARE of the responses to the end of the last) for the lengths of `run`."""
        lengths, prompts = np.array(run.lengths), np.array([len(prompt) for prompt in run.prompts])
        at = np.arange(1, lengths.max())
        running = lengths[:, None] > at
        context = (running * (prompts[:, None] + at)).sum(axis=0)
        steps_s = _features(running.sum(axis=0), context) @ self._weights
        tail_from = np.sort(lengths)[int(TAIL_SHARE * (len(lengths) - 1))]
        return self._prefill_s + float(steps_s.sum()), float(steps_s[tail_from - 1 :].sum())


def _features(requests: Any, context: Any) -> Any:
    """What a decoding step's time is affine in; the slope over the requests changes where arithmetic binds."""
    few = np.minimum(requests, 32)
    return np.stack([np.ones(len(requests)), few, requests - few, context], axis=1)

"""How long plain vLLM takes for responses of given lengths: step times fitted to its own runs, summed up."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import nnls

TAIL_SHARE = 0.9
"""The tail begins when this share of the responses has finished."""


class PlainTime:
    """How long plain vLLM takes for responses of given lengths."""

    def __init__(self, repetitions: list[list[dict[str, Any]]]) -> None:
        """From all repetitions of the plain system in one case: a single one may lack steps of few requests."""
        runs = [run for one in repetitions for run in one]
        steps = np.array([step for run in runs for step in run["decode_steps"]])
        self._weights, _ = nnls(_features(steps[:, 0], steps[:, 1]), steps[:, 2])
        self._prefill_s = 0.0
        rest_s = [run["wall_s"] - self.seconds(run)[0] for run in runs]
        self._prefill_s = max(sum(rest_s) / len(runs), 0.0)

    def seconds(self, run: dict[str, Any]) -> tuple[float, float]:
        """(all, from the end of TAIL_SHARE of the responses to the end of the last)."""
        lengths = np.array([len(ids) for ids in run["ids"]])
        prompts = np.array(run["prompt_tokens"])
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

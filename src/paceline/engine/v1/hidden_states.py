"""Hidden states of the target, read out of the engine's own steps: which tokens they belong to, and keeping some.

vLLM's runner has the hidden states of all tokens of a step between the forward pass and the sampling. Those of rejected
drafts are dropped; an accepted draft's come from whichever draft path won. Tokens that were not computed here (prefix
cache, KV pool) have none, so what is kept of a response begins behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.distillation.packing import Sample
from paceline.drafting.model_cache import ranges
from paceline.drafting.token_states import TokenStates
from paceline.engine.v1.sampler import Rows, Verdict
from paceline.errors import ConfigError
from paceline.types import Float64Array, Int32Array, Int64Array, UInt64Array


def select_standing(
    hidden: torch.Tensor, sampled: torch.Tensor, scheduled: Int64Array, rows: Rows, verdict: Verdict
) -> tuple[Int64Array, torch.Tensor]:
    """(tokens of each request that stand, their states request by request).

    Args:
        hidden: of the step's tokens, request by request; more may follow. [at least sum(scheduled), hidden]
        sampled: of the rows that were sampled. [num_rows, hidden]
        scheduled: tokens of each request, drafts included. [num_requests]
    """
    before = scheduled - 1 - rows.num_drafts[: len(scheduled)]  # prefill, of which no row was sampled
    counts = before + 1 + verdict.accepted
    winners = rows.first[verdict.winners]
    if not before.any():
        return counts, sampled[torch.from_numpy(ranges(winners, counts))]
    begins = len(sampled) + np.cumsum(scheduled) - scheduled
    places = np.stack([begins, winners], axis=1).ravel()
    lengths = np.stack([before, 1 + verdict.accepted], axis=1).ravel()
    return counts, torch.cat([sampled, hidden])[torch.from_numpy(ranges(places, lengths))]


def uniform(keys: UInt64Array) -> Float64Array:
    """A number in [0, 1) for each key, the same everywhere: SplitMix64's output function (Steele, Lea, Flood 2014)."""
    z = keys + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    made: Float64Array = ((z ^ z >> np.uint64(31)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return made


@dataclass(slots=True)
class _Collected:
    """Tokens `start` to `stop` of one response."""

    start: int
    stop: int
    num_prompt_tokens: int
    ids: list[Int32Array] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.ids, *self.states))

    def cut(self, stop: int) -> None:
        """Keep what lies before `stop`; outside of what there is: nothing, to begin there."""
        length = stop - self.start if self.start <= stop <= self.stop else 0
        self.ids = [np.concatenate(self.ids)[:length].copy()] if length else []
        self.states = [torch.cat(self.states)[:length].clone()] if length else []
        self.start, self.stop = stop - length, stop


class StateCollector:
    """Keeps the hidden states of some responses while they are generated, and hands them over as samples.

    share: of the responses, chosen by their keys, so that a response that moves is chosen everywhere or nowhere.
    max_bytes: of all that is kept. Whole responses go, those that have grown least lately first, which are the finished
    ones. Raises ConfigError for values out of range.
    """

    def __init__(self, share: float, max_bytes: int) -> None:
        if not 0.0 < share <= 1.0 or max_bytes < 1:
            raise ConfigError(
                f"hidden states of a share of {share} of the responses in {max_bytes} bytes: give a share above 0, at "
                "most 1, and at least a byte"
            )
        self._share, self._max_bytes = share, max_bytes
        self._kept: dict[int, _Collected] = {}  # by response, the one that has just grown last
        self.num_bytes = 0

    def chosen(self, keys: UInt64Array) -> Int64Array:
        """Which of these responses are kept. keys: [num_requests]"""
        return np.flatnonzero(uniform(keys) < self._share)

    def add(self, step: TokenStates, requests: Int64Array, num_prompt_tokens: Int64Array) -> None:
        """Take over what a step has shown of `requests`; rows that begin before the last ones' end replace them.

        num_prompt_tokens: of each of `requests`.
        """
        ends = np.cumsum(step.counts)
        for request, num_prompt in zip(requests.tolist(), num_prompt_tokens.tolist(), strict=True):
            if not step.counts[request]:
                continue
            rows = slice(int(ends[request] - step.counts[request]), int(ends[request]))
            self._put(
                int(step.responses[request]),
                int(step.starts[request]),
                step.ids[rows].copy(),
                step.states[rows].clone(),
                num_prompt,
            )
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.pop(next(iter(self._kept))).num_bytes

    def _put(self, response: int, start: int, ids: Int32Array, states: torch.Tensor, num_prompt: int) -> None:
        kept = self._kept.pop(response, None) or _Collected(start, start, num_prompt)
        self._kept[response] = kept
        if start != kept.stop:
            self.num_bytes -= kept.num_bytes
            kept.cut(start)
            self.num_bytes += kept.num_bytes
        kept.ids.append(ids)
        kept.states.append(states)
        kept.stop += len(ids)
        self.num_bytes += ids.nbytes + states.nbytes

    def take(self) -> list[Sample]:
        """What has been collected since the last call; a running response goes on being collected from here.

        A sample begins with the first token that was computed here. Responses without a response token, or with a state
        that is not finite, are left out.
        """
        kept, self._kept, self.num_bytes = list(self._kept.values()), {}, 0
        return [
            Sample(
                torch.from_numpy(np.concatenate(one.ids)),
                max(one.num_prompt_tokens - one.start, 1),
                states,
            )
            for one in kept
            if one.stop > max(one.num_prompt_tokens, one.start + 1)
            and (states := torch.cat(one.states)).isfinite().all()
        ]

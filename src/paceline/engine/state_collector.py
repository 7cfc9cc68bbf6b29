"""Keeps hidden states of some responses while they are generated, for those who train a drafter on them.

What a step shows of a token is told by the runner (v1/hidden_states.py, v2/hidden_states.py). Tokens that were not
computed here (prefix cache, KV pool) have none, so what is kept of a response begins behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.distillation.packing import Sample
from paceline.drafting.model_cache import ranges
from paceline.drafting.token_states import TokenStates
from paceline.errors import ConfigError
from paceline.noise import uniform
from paceline.types import Int32Array, Int64Array, UInt64Array


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of some responses, response by response."""

    responses: Int64Array  # [num_responses]
    starts: Int64Array  # [num_responses] position of the first
    counts: Int64Array  # [num_responses]
    num_prompt_tokens: Int64Array  # [num_responses]
    ids: Int32Array  # [sum(counts)]
    states: torch.Tensor  # [sum(counts), num_states * hidden]

    @property
    def num_bytes(self) -> int:
        return int(self.ids.nbytes + self.states.nbytes)

    def without(self, count: int) -> _Part:
        """All but the first `count` responses."""
        begin = int(self.counts[:count].sum())
        return _Part(
            self.responses[count:],
            self.starts[count:],
            self.counts[count:],
            self.num_prompt_tokens[count:],
            self.ids[begin:].copy(),
            self.states[begin:].clone(),
        )


class StateCollector:
    """Keeps the hidden states of some responses while they are generated, and hands them over as samples.

    A step's rows are put aside as they are and sorted by response when they are asked for, or do not fit any more.

    share: of the responses, chosen by their keys, so that a response that moves is chosen everywhere or nowhere.
    max_bytes: of all that is kept. Beyond it whole responses go until a quarter is free, those that have grown least
    lately first, which are the finished ones. Raises ConfigError for values out of range.
    """

    def __init__(self, share: float, max_bytes: int) -> None:
        if not 0.0 < share <= 1.0 or max_bytes < 1:
            raise ConfigError(
                f"hidden states of a share of {share} of the responses in {max_bytes} bytes: give a share above 0, at "
                "most 1, and at least a byte"
            )
        self._share, self._max_bytes = share, max_bytes
        self._kept: _Part | None = None
        self._steps: list[tuple[TokenStates, Int64Array]] = []  # behind it
        self.num_bytes = 0
        self.seconds = 0.0
        """Time that steps have spent on it."""

    def chosen(self, keys: UInt64Array) -> NDArray[np.bool_]:
        """Which of these responses are kept. keys, result: [num_requests]"""
        return uniform(0, 0, keys) < self._share

    def add(self, step: TokenStates, num_prompt_tokens: Int64Array) -> None:
        """Take over what a step has shown of the chosen responses; a newer row of a position replaces an older.

        num_prompt_tokens: of each of them.
        """
        self._steps.append((step, num_prompt_tokens))
        self.num_bytes += step.ids.nbytes + step.states.nbytes
        if self.num_bytes > self._max_bytes:
            part = self._sorted()
            bytes_of_all = np.cumsum(part.counts[::-1]) * (part.num_bytes / max(len(part.ids), 1))
            kept = int((bytes_of_all <= 0.75 * self._max_bytes).sum())
            self._kept = part.without(len(part.counts) - kept)
            self.num_bytes = self._kept.num_bytes

    def settle(self) -> None:
        """Called before all that was shown is given out: keep what has not been kept yet; here there is nothing."""

    def take(self) -> list[Sample]:
        """What has been collected since the last call; a running response goes on being collected from here.

        A sample begins with the first token behind which there is no gap in what was computed here. Responses without a
        response token, or with a state that is not finite, are left out.
        """
        self.settle()
        if self._kept is None and not self._steps:
            return []
        part = self._sorted()
        self._kept, self.num_bytes = None, 0
        counts = part.counts.tolist()
        prompts = np.maximum(part.num_prompt_tokens - part.starts, 1).tolist()
        pieces = zip(
            torch.from_numpy(part.ids).split(counts), prompts, part.states.split(counts), strict=True
        )
        return [
            Sample(ids.clone(), num_prompt, states.clone())
            for ids, num_prompt, states in pieces
            if len(ids) > num_prompt and states.isfinite().all()
        ]

    def _sorted(self) -> _Part:
        """All that is kept, by response."""
        steps, self._steps = self._steps, []
        parts = [
            _Part(step.responses, step.starts, step.counts, prompts, step.ids, step.states)
            for step, prompts in steps
        ]
        return _merge(parts if self._kept is None else [self._kept, *parts])


def _merge(parts: list[_Part]) -> _Part:
    """What is known of each response without gaps up to its last token; those that grew last come last."""
    responses, starts, counts, prompts = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("responses", "starts", "counts", "num_prompt_tokens")
    )
    owners, positions = np.repeat(responses, counts), ranges(starts, counts)
    order = np.lexsort((positions, owners))  # stable: of equal positions the newest comes last
    newest_rows = order[_is_last(owners[order], positions[order])]
    owners, positions = owners[newest_rows], positions[newest_rows]
    ends = np.flatnonzero(_is_last(owners, positions - np.arange(len(owners)))) + 1  # of what has no gaps
    lengths, is_last = np.diff(ends, prepend=0), _is_last(owners[ends - 1])
    begins, lengths = (ends - lengths)[is_last], lengths[is_last]
    grew = np.flatnonzero(counts)[::-1]
    _, newest = np.unique(responses[grew], return_index=True)  # by response, as `begins`
    newest = grew[newest]
    by_growth = np.argsort(newest)
    begins, lengths, newest = begins[by_growth], lengths[by_growth], newest[by_growth]
    tokens = newest_rows[ranges(begins, lengths)]
    return _Part(
        responses[newest],
        positions[begins],
        lengths,
        prompts[newest],
        np.concatenate([part.ids for part in parts])[tokens],
        torch.cat([part.states for part in parts])[torch.from_numpy(tokens)],
    )


def _is_last(*columns: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which rows are the last ones of rows that are equal in every column. [num_rows]"""
    last = np.ones(len(columns[0]), np.bool_)
    last[:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return last

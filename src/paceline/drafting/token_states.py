"""What the target thought at tokens that it has decided: the record that draft heads and their training feed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafting.model_cache import ranges
from paceline.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class TokenStates:
    """Of one engine step: the target's hidden states of each request's tokens.

    Only of tokens that stand: prompt tokens, the last decided token and accepted drafts. Request-major. A token's
    states are the inputs of the layers that the drafter fuses (`drafter.read_fused_layers`), and behind them the last
    layer's output after the final norm.
    """

    responses: Int64Array  # [num_requests] response ids
    starts: Int64Array  # [num_requests] position of each request's first token here
    counts: Int64Array  # [num_requests] its tokens here; 0 where the step does not count
    ids: Int32Array  # [sum(counts)]
    next_ids: Int32Array  # [sum(counts)] the token behind each
    states: Tensor  # [sum(counts), num_states * hidden]

    def newest(self, most: int) -> TokenStates:
        """Of each request the last `most` tokens at most."""
        counts = np.minimum(self.counts, most)
        tokens = ranges(np.cumsum(self.counts) - counts, counts)
        return TokenStates(
            self.responses,
            self.starts + self.counts - counts,
            counts,
            self.ids[tokens],
            self.next_ids[tokens],
            self.states[torch.from_numpy(tokens)],
        )


def join_steps(steps: Sequence[TokenStates]) -> TokenStates:
    """The last step with what steps before it have shown of its requests, as far back as no token is missing."""
    last, before = steps[-1], [_places(step) for step in steps[:-1]]
    parts: list[tuple[int, int, int]] = []  # step, its first token of the request, tokens
    starts, counts = last.starts.copy(), last.counts.copy()
    begins = np.cumsum(last.counts) - last.counts
    for request, response in enumerate(last.responses.tolist()):
        own = [(len(before), int(begins[request]), int(last.counts[request]))]
        for number in range(len(before) - 1, -1, -1):
            if response not in before[number]:
                continue
            start, begin, count = before[number][response]
            if start + count != starts[request]:
                break
            own.append((number, begin, count))
            starts[request] -= count
            counts[request] += count
        parts += reversed(own)
    offsets = np.cumsum([0, *(len(step.ids) for step in steps)])
    firsts = np.array([offsets[number] + begin for number, begin, _ in parts], np.int64)
    tokens = ranges(firsts, np.array([count for _, _, count in parts], np.int64))
    ids, next_ids = (
        np.concatenate([getattr(step, name) for step in steps])[tokens] for name in ("ids", "next_ids")
    )
    states = torch.cat([step.states for step in steps])[torch.from_numpy(tokens)]
    return TokenStates(last.responses, starts, counts, ids, next_ids, states)


def _places(step: TokenStates) -> dict[int, tuple[int, int, int]]:
    """By response: the position of its first token here, that token's place among all, its tokens."""
    begins = np.cumsum(step.counts) - step.counts
    columns = (column.tolist() for column in (step.responses, step.starts, begins, step.counts))
    return {response: (start, begin, count) for response, start, begin, count in zip(*columns, strict=True)}

"""What the target thought at tokens that it has decided: the record that draft heads and their training feed on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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

"""Hidden states of the target, read out of the engine's own steps: which tokens do they belong to?

vLLM's runner has the hidden states of all tokens of a step between the forward pass and the sampling. Those of rejected
drafts are dropped; an accepted draft's come from whichever draft path won.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafting.model_cache import ranges
from paceline.engine.compat import shows_inner_states
from paceline.engine.v1.sampler import Rows, Verdict
from paceline.errors import CheckpointError, UnsupportedError
from paceline.types import Int64Array


def show_layers(target: Any, layers: tuple[int, ...], num_layers: int) -> None:
    """Have the loaded target hand out the inputs of these of its `num_layers` layers with its last states.

    Raises UnsupportedError for an architecture of which vLLM cannot do that, CheckpointError for layers that are not
    there.
    """
    if not shows_inner_states(target):
        raise UnsupportedError(
            f"vLLM's {type(target).__name__} does not hand out the inner states that an EAGLE-3 head reads: give an "
            "EAGLE head or a small language model"
        )
    if max(layers) >= num_layers:
        raise CheckpointError(
            f"the draft head fuses the inputs of layers {list(layers)}, and the target has layers 0 to "
            f"{num_layers - 1}: train a head on this target (paceline drafter train)"
        )
    target.set_aux_hidden_state_layers(layers)


def select_standing(
    scheduled: Int64Array, rows: Rows, verdict: Verdict, requests: Int64Array, stands: NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array]:
    """(tokens of each of `requests` that stand, their places among the step's tokens, request by request).

    The step's tokens are those of the requests, one request behind another, and then those of the alternative paths.

    Args:
        scheduled: tokens of each request of the batch, drafts included. [num_requests]
        requests: which to tell of, by their place in the batch. [num_told]
        stands: whether the step counts for them. [num_told]
    """
    count = len(scheduled)
    prefill = scheduled - 1 - rows.num_drafts[:count]  # tokens of which no row was sampled
    begins = np.cumsum(scheduled) - scheduled
    before, after = prefill[requests], 1 + verdict.accepted[requests]
    counts = (before + after) * stands
    if len(rows.num_drafts) == count:
        return counts, ranges(begins[requests], counts)
    winners = verdict.winners[requests]
    behind = np.cumsum(prefill)[np.minimum(winners, count - 1)]  # such tokens before each winner
    places = np.stack([begins[requests], rows.first[winners] + behind], axis=1).ravel()
    lengths = (np.stack([before, after], axis=1) * stands[:, None]).ravel()
    return counts, ranges(places, lengths)

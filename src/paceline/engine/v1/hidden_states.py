"""Hidden states of the target, read out of the engine's own steps: which tokens do they belong to?

vLLM's runner has the hidden states of all tokens of a step between the forward pass and the sampling. Those of rejected
drafts are dropped; an accepted draft's come from whichever draft path won.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._step import standing
from paceline.drafting.token_states import TokenStates
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


@dataclass(frozen=True, slots=True)
class Told:
    """Requests of a batch whose states are told, and what stays as it is while the batch is the same."""

    names: list[str]
    """Of the whole batch."""
    requests: Int64Array  # [num_told] their places in it
    responses: Int64Array  # [num_told] response ids
    num_prompt_tokens: Int64Array  # [num_told] without what a resumed request carries
    stand: NDArray[np.bool_]  # [num_told] that the step counts for all of them, as almost every one does

    @staticmethod
    def of(names: Sequence[str], states: Mapping[str, Any], requests: Int64Array) -> Told:
        """states: the runner's, by name."""
        told = [states[names[request]] for request in requests.tolist()]
        extras = [state.sampling_params.extra_args for state in told]
        return Told(
            list(names),
            requests,
            np.array([extra["paceline_response"] for extra in extras], np.int64),
            np.array([len(state.prompt_token_ids) - num_carried(state) for state in told], np.int64),
            np.ones(len(told), np.bool_),
        )


def num_carried(state: Any) -> int:
    """Response tokens that a resumed request carries in its prompt."""
    return int((state.sampling_params.extra_args or {}).get("paceline_generated") or 0)


def show(
    told: Told, stands: NDArray[np.bool_], step: Any, batch: Any, rows: Rows, verdict: Verdict
) -> TokenStates:
    """What a step has shown of the requests that are told of, once its tokens are decided.

    stands: whether the step counts for them. [num_told]
    step: vLLM's, between the forward pass and the sampling.
    """
    planned = step.scheduler_output.num_scheduled_tokens
    counts, starts, places, ids, next_ids = standing(
        np.fromiter(map(planned.__getitem__, told.names), np.int64, len(told.names)),
        rows.num_drafts,
        rows.first,
        verdict.winners,
        verdict.accepted,
        batch.num_computed_tokens_cpu,
        batch.token_ids_cpu,
        told.requests,
        stands,
    )
    tokens = torch.from_numpy(places)
    shown = [layer.index_select(0, tokens) for layer in (*(step.aux_hidden_states or []), step.hidden_states)]
    states = shown[0] if len(shown) == 1 else torch.cat(shown, 1)
    return TokenStates(told.responses, starts, counts, ids, next_ids, states)

"""Full CUDA graphs for steps in which requests verify different numbers of draft tokens.

vLLM captures full graphs of decoding steps in one of two ways: for requests that all have 1 + max_draft_tokens tokens,
or for requests that have any number up to it. It takes the second way for its own adaptive verification alone, without
which the ragged steps of Paceline would run in piecewise graphs. Where the attention backends can replay ragged steps,
the second way is taken here, before anything is captured. Elsewhere full graphs are of steps without drafts, as in an
engine without speculation: only a step in which every request has max_draft_tokens could use vLLM's own.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

LOGGER = logging.getLogger(__name__)


def graphs_for_ragged_steps(runner: Any) -> ModelCudaGraphManager:
    """The runner's list of graphs to capture, with full ones for ragged steps where they can be replayed.

    runner: V2's, whose attention backends are known.
    """
    made = runner.cudagraph_manager
    if not made.cudagraph_mode.separate_routine():
        return made  # full graphs of any step, or none of decoding
    if (obstacle := _obstacle(runner)) is not None:
        LOGGER.warning("steps with drafts run in piecewise CUDA graphs: %s", obstacle)
        if runner.fast_prefill is not None:
            return made
    return ModelCudaGraphManager(
        runner.vllm_config,
        runner.device,
        made.cudagraph_mode,
        made.decode_query_len if obstacle is None else 1,
        lora_capture_cases=made.lora_capture_cases,
        varlen_decode=obstacle is None,
        ubatch_runner=made.ubatch_runner,
    )


def _obstacle(runner: Any) -> str | None:
    """Why full graphs cannot replay ragged steps; None if they can."""
    longest = runner.cudagraph_manager.decode_query_len
    refused = get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, longest)
    if refused is not None:
        return f"full ones of {refused[0]} cannot replay requests of 1 to {longest} tokens each"
    support, backend = runner.model_state.get_additional_cg_support()
    if support is not AttentionCGSupport.ALWAYS:
        return f"full ones of {backend} cannot replay all steps"
    if runner.fast_prefill is not None:
        return "kv_sharing_fast_prefill is on"
    return None

"""Buffers of vLLM's runner that are larger than Paceline needs, made anew.

vLLM sizes them for the speculative method that stands in for Paceline's drafts: for a GPU of 80 GB, with 1024 requests,
33 rows each and 152,064 ids, 640 MB of grammar masks, and with 131,072 tokens a request 540 MB of texts.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker


def keep_texts_on_host(states: Any) -> None:
    """Put the tokens of V2's request states into host memory, as vLLM does where no drafter on the GPU searches them.

    states: without requests yet.
    """
    shape = states.max_num_reqs, states.max_model_len
    states.all_token_ids = StagedWriteTensor(
        shape, dtype=torch.int32, device=states.device, uva_instead_of_gpu=True
    )


def grammar_worker(runner: Any) -> StructuredOutputsWorker:
    """What masks the rows of requests with a grammar, which have one each: nothing is drafted for them."""
    return StructuredOutputsWorker(
        max_num_logits=runner.max_num_reqs,
        vocab_size=runner.vocab_size,
        device=runner.device,
        mask_stride=runner.decode_query_len,
        num_bonus_tokens=runner.structured_outputs_worker.num_bonus_tokens,
    )

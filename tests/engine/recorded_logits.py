"""The auditor: a sampler that remembers the logits behind every token, for the exactness benchmark and the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from paceline.engine.rollout_engine import RolloutEngine
from paceline.engine.v1.sampler import KeyedSampler, Rows, Verdict
from paceline.types import Int64Array, UInt64Array


class RecordingSampler(KeyedSampler):
    """`digests[key, position]` is a digest of the raw logits that decided the token at `position`, to the bit."""

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__(logprobs_mode)
        self.digests: dict[tuple[int, int], bytes] = {}

    def sample(
        self,
        logits: torch.Tensor,
        rows: Rows,
        drafts: Int64Array,
        keys: UInt64Array,
        metadata: Any,
        outputs: Sequence[Sequence[int]],
    ) -> tuple[Any, Verdict]:
        raw = logits.float().clone().numpy()
        result, verdict = super().sample(logits, rows, drafts, keys, metadata, outputs)
        for row in range(len(rows.requests)):
            request = int(rows.requests[row])
            won = rows.paths[row] == verdict.winners[request]
            if won and rows.offsets[row] <= verdict.accepted[request]:
                name = int(keys[request]), int(rows.positions[row])
                self.digests[name] = blake2b(raw[row].tobytes(), digest_size=16).digest()
        return result, verdict


@contextmanager
def recorded(engine: RolloutEngine) -> Iterator[dict[tuple[int, int], bytes]]:
    """Record the logits of everything that `engine` generates inside the block."""
    runner = engine.vllm_engine.model_executor.driver_worker.model_runner
    own = runner.keyed_sampler
    runner.keyed_sampler = recorder = RecordingSampler(runner.model_config.logprobs_mode)
    try:
        yield recorder.digests
    finally:
        runner.keyed_sampler = own

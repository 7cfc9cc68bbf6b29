"""What every accelerated rollout is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams


def plain_tokens(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], params: SamplingParams
) -> list[tuple[int, ...]]:
    """Tokens of these requests by plain decoding on an engine that drafts."""
    engine.set_drafting(False)
    responses = engine.generate(requests, params)
    engine.set_drafting(True)
    assert all(response.num_draft_tokens == 0 for response in responses)
    return [response.tokens for response in responses]

"""What tests of a fleet give it: a policy, requests and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.fleet.rewards import RewardFunction
from paceline.types import Response, RolloutRequest

POLICY = Path(__file__).resolve().parents[2] / "assets/countdown-policy"
MAX_LEN = 1400
ENGINE = {"dtype": "float32", "max_model_len": MAX_LEN, "max_num_seqs": 32, "block_size": 128}
"""vLLM's blocks, not Paceline's shorter ones: the tests' sizes are counted in them."""
KV_BYTES = 1 << 26
"""128 blocks of 128 tokens: too few for all responses of a test at their limits."""

Generate = Callable[[Sequence[RolloutRequest], Any], list[Response]]


def make_score() -> RewardFunction:
    """The reward function of the fleet; a local one, because reward workers cannot import test modules."""

    def score(index: int, response: Response) -> float:
        return len(response.tokens) + index / 1000

    return score


def make_requests(prompts: Sequence[tuple[int, ...]], samples: int, max_tokens: int) -> list[RolloutRequest]:
    """`samples` responses to each prompt; keys and groups are derived."""
    return [
        RolloutRequest(prompt, max_tokens, sample=sample) for prompt in prompts for sample in range(samples)
    ]

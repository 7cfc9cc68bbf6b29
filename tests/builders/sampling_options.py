"""Sampling options whose tokens must not depend on drafts, in vLLM's terms, by a name for each."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "logit bias": {"logit_bias": {5: 4.0, 9: -100.0}},
    "allowed ids": {"allowed_token_ids": list(range(2, 40))},
    "min tokens": {"min_tokens": 30},
    "stop token": {"stop_token_ids": [40, 41]},
}

"""Sampling options of the command line, checked without vLLM, and the engine's parameters made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Raises ConfigError for a value that cannot work."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules: list[tuple[str, Any, bool, str]] = [
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            (
                "--temperature",
                self.temperature,
                math.isfinite(self.temperature) and self.temperature >= 0,
                "0 (greedy) or more",
            ),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (1: off)"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("--min-p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1"),
        ]
        for option, value, fits, limit in rules:
            if not fits:
                raise ConfigError(f"{option} {value}: must be {limit}")
        if "" in self.stop:
            raise ConfigError("--stop '': a stop text must have at least one character")

    def described(self) -> dict[str, Any]:
        """The options as they stand in the output."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": list(self.stop),
        }

    def build(self) -> SamplingParams:
        """vLLM's parameters. Imports vLLM. `max_tokens` travels with each request."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=list(self.stop),
            max_tokens=self.max_tokens,
        )

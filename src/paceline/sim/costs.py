"""What a simulated engine and its drafters cost: step times, prefill, KV room and moves.

Plain records, made by presets from published measurements or from `paceline profile`; called by the simulated workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ConfigError
from paceline.planning.latency_profile import LatencyModel, StepLatency
from paceline.sim.acceptance_model import AcceptanceProcess
from paceline.sim.alternatives import second_choice


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """One engine (worker) of the target. Raises ConfigError for a value out of range."""

    num_gpus: int
    step: StepLatency
    """T(n, C) of a step over n tokens of requests with C tokens of context in all."""
    prefill_token_s: float
    """Seconds per token of a prefill, the engine doing nothing else."""
    kv_tokens: int
    """Tokens of context that fit into the engine's KV memory."""
    max_requests: int = 1 << 30
    """Requests the engine runs at once."""
    kv_load_token_s: float | None = None
    """Seconds per token of KV that moves between workers instead of being computed again; None: it does not move."""
    num_ranks: int = 1
    """Data-parallel ranks: each has requests of its own, and every step waits for the slowest (experts are spread over
    all of them)."""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "kv_tokens", "max_requests", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine {name} is {getattr(self, name)}: must be at least 1")
        if min(self.prefill_token_s, self.kv_load_token_s or 0.0) < 0.0:
            raise ConfigError("an engine's seconds per token must not be negative")

    def skewed(self, tokens: float, context: float) -> EngineCosts:
        """The costs of a step whose slowest rank has so many times the mean's tokens and context, at least 1."""
        step = StepLatency(self.step.by_tokens.scaled(tokens), self.step.context_s * context)
        return replace(self, step=step)


@dataclass(frozen=True, slots=True)
class Drafter:
    """Something that drafts."""

    name: str
    token: LatencyModel
    """D(b): seconds to draft one token for each of b requests."""
    acceptance: AcceptanceProcess
    kind: Literal["model", "free"] = "model"
    """free: no model, so it drafts inside the engine and never needs devices of its own."""
    engine_token: LatencyModel | None = None
    """D(b) where it runs inside the target's engine, on its devices and in its steps; None: the same."""
    is_attached: bool = False
    """Whether it needs the target's hidden states, and so never drafts on devices of its own."""
    tree_level: float | None = None
    """Acceptance level if its second choice counts too; None: it proposes lines only."""

    @property
    def second_choice(self) -> float:
        """Probability that its second choice is right where the first is not; 0 without trees."""
        return 0.0 if self.tree_level is None else second_choice(self.acceptance.level, self.tree_level)

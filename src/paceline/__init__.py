"""Paceline: fast rollouts for LLM reinforcement learning, token for token the same as plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
    from paceline.engine.arguments import engine_arguments
    from paceline.engine.rollout_engine import RolloutEngine, TokenEvent
    from paceline.errors import PacelineError
    from paceline.types import Response, RolloutRequest

__version__ = "0.1.0"

_HOMES = {
    "BudgetSettings": "paceline.config",
    "EngineSettings": "paceline.config",
    "KvPoolSettings": "paceline.config",
    "PacelineError": "paceline.errors",
    "Response": "paceline.types",
    "RolloutEngine": "paceline.engine.rollout_engine",
    "RolloutRequest": "paceline.types",
    "TokenEvent": "paceline.engine.rollout_engine",
    "engine_arguments": "paceline.engine.arguments",
}

__all__ = [
    "BudgetSettings",
    "EngineSettings",
    "KvPoolSettings",
    "PacelineError",
    "Response",
    "RolloutEngine",
    "RolloutRequest",
    "TokenEvent",
    "engine_arguments",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import paceline` stays light."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

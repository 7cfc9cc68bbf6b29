"""TRL's trainers with Paceline's rollouts. TRL is imported on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.integrations.trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainers on first use, so that options can be checked without TRL."""
    if name in __all__:
        from paceline.integrations.trl import trainers

        return getattr(trainers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

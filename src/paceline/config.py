"""The configuration tree: pydantic models, unknown keys refused, a docstring under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RecordConfig(Section):
    """How finely a run is recorded (`record.jsonl`)."""

    bucket_ms: float = Field(default=50.0, ge=0.0)
    """Engine steps are merged into samples of about this many milliseconds; 0 records every step."""
    sync_s: float = Field(default=5.0, ge=0.0)
    """Seconds after which the disk is asked to keep what was written; a power cut loses at most so much."""
    decision_every: int = Field(default=0, ge=0)
    """Record every n-th decision of the planning policies for replay; 0 records none."""

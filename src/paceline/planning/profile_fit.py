"""The models that plans and simulations are made of, from a profile that was measured.

Called by `paceline plan` and `simulate`.
"""

from __future__ import annotations

from pathlib import Path

from paceline.planning.latency_profile import AffineLatency, LatencyFit, StepLatency, fit_affine, fit_step
from paceline.record.profile import Profile, read_profile


def fit_profile(
    made: Profile, num_segments: int | None = 8
) -> tuple[LatencyFit[StepLatency], dict[str, LatencyFit[AffineLatency]]]:
    """The target's model, and each drafter's by name.

    num_segments: as `fit_step`; None fits a line, as SpecActor does.
    """
    target = fit_step(
        [p.batch * p.tokens_per_request for p in made.steps],
        [p.batch * p.context for p in made.steps],
        [p.step_s for p in made.steps],
        num_segments,
    )
    fits = {}
    for one in made.drafters:
        batches, seconds = [p.batch for p in one.points], [p.token_s for p in one.points]
        if len(set(batches)) == 1:  # a level line through the one batch that is known
            batches, seconds = [*batches, 2 * batches[0]], [*seconds, seconds[0]]
        fits[one.name] = fit_affine(batches, seconds)
    return target, fits


def load_fits(
    path: Path, num_segments: int | None = 8
) -> tuple[Profile, LatencyFit[StepLatency], dict[str, LatencyFit[AffineLatency]]]:
    """A profile file and its models. Raises RecordError as `read_profile`, ConfigError for too few points."""
    made = read_profile(path)
    return made, *fit_profile(made, num_segments)

"""Does it pay to train the drafter, and is the newest one to draft?

Training pays while acceptance still rises, and again once it has fallen. The policy drifts slowly, and a drafter that
was trained on it holds for many steps (published runs: 36), so training rests once several new drafters in a row have
brought nothing, and goes on when acceptance has fallen by more than it varies. Called once a rollout, with the
acceptance of the drafter that was used in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.planning.zero_acceptance import HEALTHY

RISE = 0.01
"""Acceptance that counts as risen."""
FALL = 0.02
"""Acceptance that counts as fallen."""
PATIENCE = 4
"""New drafters without a rise after which training rests."""
MARGIN = FALL / PATIENCE
"""By which a new drafter may seem worse than the present one. Of two that are as good the newer one is wanted, as it
knows the newest policy, and what tells them apart is measured on a few thousand tokens. But what a drafter loses has no
time to add up: after `PATIENCE` new ones without a rise training rests, and they have lost `FALL` at most."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What is known of a drafter; Growth() begins."""

    reached: float = 0.0
    """Acceptance from which rises and falls are counted."""
    num_flat: int = 0
    """New drafters since the last rise, those among them that were found worse."""

    @property
    def pays(self) -> bool:
        """Whether to train."""
        return self.num_flat < PATIENCE


def may_replace(agreement: float | None, present: float | None) -> bool:
    """Whether a new drafter is to draft from now on.

    agreement: how often it agrees with the target; None: not measured. present: the same of the drafter that drafts, on
    the same tokens; None: none does. What agrees more seldom than `HEALTHY` could not be told from a dead drafter. A
    new one of which nothing can be said (None, NaN) is not used.
    """
    least = HEALTHY if present is None else max(HEALTHY, present - MARGIN)
    return agreement is not None and agreement >= least


def observe(growth: Growth, acceptance: float | None, is_new: bool) -> Growth:
    """The growth after a rollout.

    acceptance: of the first draft token, None: the drafter was not used. is_new: whether there was a new drafter, used
    for the first time or found worse than the present one.
    """
    if acceptance is None:
        return growth
    if not growth.pays:
        return Growth(acceptance) if acceptance < growth.reached - FALL else growth
    if acceptance > growth.reached + RISE:
        return Growth(acceptance)
    flat = replace(growth, num_flat=growth.num_flat + is_new)
    has_fallen = acceptance < growth.reached - FALL  # rises are counted from there
    return flat if flat.pays and not has_fallen else replace(flat, reached=acceptance)

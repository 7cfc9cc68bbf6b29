"""The draft ladder: with which drafter does a rollout begin? (SpecActor 4.2)

The ladder has been measured on the running engine (engine/rungs.py): the speed-up of each drafter over plain decoding
at several acceptance rates, between which it is interpolated. A drafter's own rate is that of earlier steps. Owns the
choice, what the rates are made of, and what is known of a drafter that may help from another worker.

Differs: the paper's history is given. Here a drafter that was never used counts as always right, and what is known of
one that is not used fades, so that each is tried again while it could be the best, and never where it could not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError
from paceline.planning.help import Drafting
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried

KEPT = 0.9
"""Of what is known of every drafter, from step to step: after some 70 steps a thousand tokens have faded."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One drafter at one acceptance rate."""

    drafter: str
    acceptance: float
    speedup: float
    """Over plain decoding."""


def rank_drafters(ladder: Ladder, acceptance: Mapping[str, float]) -> tuple[Rung, ...]:
    """Every drafter at its own acceptance rate, the fastest first; ties in the ladder's order.

    Beyond the rates that were measured the speed-up is that of the nearest. Raises ConfigError for a drafter of the
    ladder without a rate.
    """
    missing = [rungs.drafter for rungs in ladder.drafters if rungs.drafter not in acceptance]
    if missing:
        raise ConfigError(
            f"no acceptance rate of drafter {missing[0]!r}, only of {sorted(acceptance)}: give one, or measure it"
        )
    rungs = [
        Rung(one.drafter, rate, float(np.interp(rate, ladder.rates, one.speedup)))
        for one in ladder.drafters
        for rate in [acceptance[one.drafter]]
    ]
    return tuple(sorted(rungs, key=lambda rung: -rung.speedup))


def rank_tried(ladder: Ladder, tried: Mapping[str, Tried]) -> tuple[Rung, ...]:
    """The drafters by history, the one to begin a rollout with first (SpecActor v2, figure 11 b)."""
    names = [rungs.drafter for rungs in ladder.drafters]
    return rank_drafters(ladder, {name: rate_of(tried.get(name, Tried())) for name in names})


def choose_first(ladder: Ladder, tried: Mapping[str, Tried]) -> Rung:
    """The drafter to begin a rollout with."""
    return rank_tried(ladder, tried)[0]


def rate_of(tried: Tried) -> float:
    """The acceptance rate, as if one token more had been right: 1 where nothing is known."""
    return (tried.right + 1.0) / (tried.tried + 1.0)


def observe(tried: Mapping[str, Tried], drafter: str, num_right: int, num_tried: int) -> dict[str, Tried]:
    """What is known after a step in which this drafter was used."""
    known = {name: Tried(KEPT * one.right, KEPT * one.tried) for name, one in tried.items()}
    before = known.get(drafter, Tried())
    return {**known, drafter: Tried(before.right + num_right, before.tried + num_tried)}


def known_draftings(known: LadderFile, names: Sequence[str]) -> tuple[Drafting, ...]:
    """The drafters whose cost and acceptance were measured. names: of the engines' drafters, by place."""
    if known.ladder is None:
        return ()
    return tuple(
        _drafting(one, known.ladder.batch, tried, names.index(one.drafter))
        for one in known.ladder.drafters
        if one.draft_s and one.drafter in names and (tried := known.tried.get(one.drafter, Tried())).tried
    )


def _drafting(rungs: Rungs, batch: int, tried: Tried, place: int) -> Drafting:
    """D between one response and the ladder's batch, and beyond, as a straight line through what was measured."""
    lone_s = rungs.lone_draft_s or rungs.draft_s
    more_s = max(rungs.draft_s - lone_s, 0.0) / max(batch - 1, 1)
    return Drafting(lone_s, tried.right / tried.tried, place, more_s)

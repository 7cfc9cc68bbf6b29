"""Who drafts for whom: the free workers of a rollout's tail, and the stragglers that they help.

Owns the pairs of helper and helped worker, and the predicted ends by which they are chosen (planning/help.py). Used by
the controller, which says who is idle and who is busy. Invariants: a helper has no chunks, a helped worker has some; a
worker is helped by one other at most; the end of a pair is told to both sides that are still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.control.events import Action, DraftFor, LoseDrafter, Rest
from paceline.planning.help import Drafting, Ends, Help, Helper, Load, decide_help
from paceline.types import StepCosts

SWITCH_S = 0.1
"""Until a free worker drafts for another one: its drafter is in memory, and has to read the running responses."""


class Place(NamedTuple):
    """A worker in one of its lives."""

    worker: str
    life: int


class Remainder(NamedTuple):
    """What is left of a running response."""

    rest_tokens: int
    """Predicted, at least 1."""
    context_tokens: int
    """Prompt and response so far."""


@dataclass(slots=True)
class Helping:
    """One per controller."""

    _ends: Ends = field(default_factory=Ends)
    _busy: dict[str, tuple[Load, StepCosts]] = field(default_factory=dict)
    _pairs: dict[str, tuple[Place, Place]] = field(default_factory=dict)  # by helper: it, and whom it helps
    _helped: set[str] = field(default_factory=set)

    def predict(self, worker: str, left: Sequence[Remainder], costs: StepCosts | None) -> None:
        """What a worker has left to do. Without responses or costs it cannot be helped."""
        if costs is None or not left:
            self._ends.remove(worker)
            self._busy.pop(worker, None)
            return
        load = _make_load(left, costs, worker not in self._helped and costs.draft_s > 0.0)
        self._ends.put(worker, load.end_s)
        self._busy[worker] = load, costs

    def is_helping(self, worker: str) -> bool:
        """Whether a worker drafts for another one."""
        return worker in self._pairs

    @property
    def has_pairs(self) -> bool:
        """Whether anyone helps."""
        return bool(self._pairs)

    def end(self, idle: set[Place], busy: set[Place]) -> list[Action]:
        """End the pairs whose helper is no longer idle, or whose helped worker is no longer busy."""
        actions: list[Action] = []
        for helper, helped in list(self._pairs.values()):
            if helper in idle and helped in busy:
                continue
            del self._pairs[helper.worker]
            self._helped.remove(helped.worker)
            if helper in idle:
                actions.append(Rest(*helper))
            if helped in busy:
                actions.append(LoseDrafter(*helped))
        return actions

    def assign(self, drafters: Iterable[Place], doors: Mapping[str, tuple[Place, str]]) -> list[Action]:
        """Workers that do nothing but draft: each for the busy worker without a drafter that ends last, ties by name.

        doors: the busy workers that can be drafted for, and at which address.
        """
        actions: list[Action] = []
        free = [one for one in drafters if one.worker not in self._pairs]
        alone = sorted(name for name in doors if name not in self._helped) if free else []
        alone.sort(key=lambda name: -self._busy[name][0].end_s if name in self._busy else -math.inf)
        for helper, name in zip(free, alone, strict=False):
            actions.append(self._pair(helper, name, doors))
        return actions

    def _pair(self, helper: Place, name: str, doors: Mapping[str, tuple[Place, str]]) -> DraftFor:
        helped, address = doors[name]
        self._pairs[helper.worker] = helper, helped
        self._helped.add(name)
        if name in self._busy:
            load, costs = self._busy[name]
            self._busy[name] = replace(load, can_be_drafted_for=False), costs
        return DraftFor(*helper, helped=name, address=address)

    def begin(self, idle: Iterable[Place], doors: Mapping[str, tuple[Place, str]]) -> list[Action]:
        """Let idle workers draft where that ends the rollout sooner. doors: as of `assign`."""
        actions: list[Action] = []
        for helper in idle:
            if helper.worker in self._pairs:
                continue
            latest = self._ends.latest()
            if latest is None or latest not in doors:
                break
            load, costs = self._busy[latest]
            drafting = Drafting(costs.draft_s, costs.acceptance)
            choice = decide_help(load, Helper(ahead=drafting, switch_s=SWITCH_S))
            if choice.kind is not Help.DRAFT:
                break
            self._ends.put(latest, choice.end_s)
            actions.append(self._pair(helper, latest, doors))
        return actions


def _make_load(left: Sequence[Remainder], costs: StepCosts, can_be_drafted_for: bool) -> Load:
    rests = np.array([one.rest_tokens for one in left], dtype=np.float64)
    contexts = np.array([one.context_tokens for one in left], dtype=np.float64)
    order = np.argsort(-rests, kind="stable")
    return Load(
        rests[order] / costs.tokens_per_step,
        contexts[order],
        costs.tokens_per_step,
        costs.step_tokens,
        costs.base_s,
        costs.token_s,
        costs.inside_s,
        can_be_drafted_for,
    )

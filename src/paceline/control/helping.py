"""Who helps whom: the free workers of a rollout's tail, and the stragglers that they help.

Owns the pairs of helper and helped worker, and the predicted ends by which they are chosen (planning/help.py). Used by
the controller, which says who is idle, busy and racing, and carries out what is chosen here. Invariants: a helper has
no chunks of its own, a helped worker has some; a worker is helped by one other at most, and one whose role it is to
draft may help several; the end of drafting is told to both sides that are still there.

What an event costs grows with the workers that it concerns and with their responses, not with the fleet; but a tick may
look at each worker once. An end is predicted from what was known when the worker was heard last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import numpy as np

from paceline.control.events import Action, DraftFor, LoseDrafter, Rest
from paceline.planning.help import (
    EARLY_S,
    TRIAL_S,
    Drafting,
    Ends,
    Help,
    HelpChoice,
    Helper,
    Load,
    decide_help,
    judge_help,
)
from paceline.types import Progress, StepCosts

SWITCH_S = 0.1
"""Until a free worker helps another one: its models are in memory, and have to read the running responses."""

LEAST_LEAD = 0.2
"""Workers are taken for equally fast unless one's steps are so much shorter: they were measured at other batches. That
of a helper counts as far as it goes beyond: it may be so wrong too.
"""


class Place(NamedTuple):
    """A worker in one of its lives."""

    worker: str
    life: int


Door: TypeAlias = tuple[Place, tuple[str, ...]]
"""A busy worker that can be drafted for, and at which address with each of the drafters, by place."""


class Standing(Enum):
    """What a worker is to those that help."""

    GONE = auto()
    """In another life, or not up."""
    IDLE = auto()
    UNABLE = auto()
    """Idle, but drafting has failed there."""
    RACING = auto()
    """It runs a copy."""
    BUSY = auto()


class Remainder(NamedTuple):
    """What is left of a running response."""

    chunk: int
    """Its number."""
    rest_tokens: int
    """Predicted, at least 1."""
    context_tokens: int
    """Prompt and response so far."""
    may_race: bool
    """It may be copied."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Who helps whom, and how."""

    helper: Place
    helped: Place
    kind: Help
    chunks: tuple[int, ...] = ()
    """copy, take: of which responses, those with the longest rests."""
    address: str = ""
    """draft: where."""
    drafter: int = 0
    """draft: with which, by place."""


class _Trial(NamedTuple):
    """Help for a worker, until it is known whether that pays."""

    before: Progress
    """Of a stretch without help; of a response, where a copy is tried."""
    begun: Progress
    """Of the worker's life, when drafting was ordered or the copy had caught up."""
    num_copied: int = 0
    """Tokens of the copied response then."""


class _CatchingUp(NamedTuple):
    """A copy that reads its context, and then what the other worker has generated meanwhile: no help yet."""

    before: Progress
    """As in `_Trial`."""
    generated: int
    """By the helper in its life, when it got the copy."""
    num_copied: int
    """Tokens of the copied response then."""
    first_s: float | None = None
    """Of the helped worker's steps, when the copy had its first token."""


class _Busy(NamedTuple):
    """A worker that may be helped."""

    place: Place
    load: Load
    costs: StepCosts
    chunks: tuple[int, ...]  # longest rest first
    can_copy: bool
    can_take: bool


@dataclass(slots=True)
class Helping:
    """One per controller."""

    kinds: frozenset[Help]
    """How workers that fall free may help."""
    _drafter: int = 0  # the engines' own, by place
    _others: tuple[Drafting, ...] = ()  # that they have too
    _ends: Ends = field(default_factory=Ends)
    _busy: dict[str, _Busy] = field(default_factory=dict)
    _pairs: dict[str, list[Pair]] = field(default_factory=dict)  # by helper; those that draft or run a copy
    _helped: dict[str, Pair] = field(default_factory=dict)
    _doors: dict[str, Door] = field(default_factory=dict)
    _stale: dict[str, None] = field(default_factory=dict)  # workers that may have other ends than predicted
    _seen: dict[str, Progress] = field(default_factory=dict)  # of busy workers, at the last look
    _seen_before: dict[str, Progress] = field(default_factory=dict)  # the same, at the look before
    _trials: dict[str, _Trial] = field(default_factory=dict)  # by helped worker
    _catching_up: dict[str, _CatchingUp] = field(default_factory=dict)  # by helped worker
    _refused: set[tuple[str, Help]] = field(default_factory=set)  # what made which worker slower

    def use_drafters(self, drafter: int, others: Sequence[Drafting]) -> None:
        """A rollout begins: with which drafter the engines draft, and what is known of the others (`Submitted`)."""
        self._drafter, self._others = drafter, tuple(others)
        for found in (self._refused, self._seen, self._seen_before):
            found.clear()

    def look(self, told: dict[str, Progress]) -> None:
        """Time has passed. told: of busy workers, what they have generated in their lives."""
        self._seen_before, self._seen = self._seen, told

    def judge(
        self, worker: str, told: Mapping[str, Progress], count_copied: Callable[[Pair], int]
    ) -> Pair | None:
        """A worker tells what it has generated: is it slower now that it has help? Then that is over, and nobody helps
        it in that way any more in this rollout. Gives what is over.

        A copy is judged by its response, whoever of the two generates it. told: as for `look`. count_copied: tokens of
        the response that a pair runs twice.
        """
        if (now := told.get(worker)) is None:
            return None
        for pair in self.find(worker):
            name = pair.helped.worker
            if name in self._catching_up and name in told:
                self._catch_up(name, now, told[name], count_copied(pair))
        if (trial := self._trials.get(worker)) is None:
            return None
        pair, since = self._helped[worker], now - trial.begun
        if pair.kind is Help.COPY:
            since = replace(since, num_tokens=count_copied(pair) - trial.num_copied, response_s=since.step_s)
        pays = judge_help(trial.before, since)
        if pays is None:
            return None
        del self._trials[worker]
        if pays:
            return None
        self._refused.add((worker, pair.kind))
        self._remove(pair)
        return pair

    def _catch_up(self, helped: str, racer: Progress, now: Progress, num_copied: int) -> None:
        """The trial of a copy begins once it has all of the response, or has tried to for as long as a trial takes."""
        copy = self._catching_up[helped]
        generated = racer.num_tokens - copy.generated
        if generated and copy.first_s is None:
            copy = self._catching_up[helped] = copy._replace(first_s=now.step_s)
        is_there = generated and copy.num_copied + generated >= num_copied
        if is_there or (copy.first_s is not None and now.step_s >= copy.first_s + TRIAL_S):
            del self._catching_up[helped]
            self._trials[helped] = _Trial(copy.before, now, num_copied)

    def note(self, worker: str, door: Door | None) -> None:
        """Something has happened to a worker: its prediction is stale. door: if it is busy and can be drafted for."""
        self._stale[worker] = None
        if door is None:
            self._doors.pop(worker, None)
        else:
            self._doors[worker] = door

    def take_stale(self) -> Iterable[str]:
        """The workers that have to be predicted anew."""
        stale, self._stale = self._stale, {}
        return stale

    def predict(
        self, place: Place, left: Sequence[Remainder], costs: StepCosts | None, *, can_move: bool
    ) -> None:
        """What a worker has left to do. Without responses or costs it cannot be helped, nor while it races.

        can_move: whether its responses may be copied and taken over now.
        """
        worker, pair = place.worker, self._helped.get(place.worker)
        if costs is None or not left or (pair is not None and pair.kind is Help.COPY):
            self._ends.remove(worker)
            self._busy.pop(worker, None)
            return
        ordered = sorted(left, key=lambda one: -one.rest_tokens)
        load = _make_load(ordered, costs, pair is not None, self._drafter)
        self._ends.put(worker, load.end_s)
        chunks = tuple(one.chunk for one in ordered)
        self._busy[worker] = _Busy(place, load, costs, chunks, can_move and ordered[0].may_race, can_move)

    @property
    def helpers(self) -> Set[str]:
        """Who helps others by drafting or by a copy."""
        return self._pairs.keys()

    def find(self, worker: str) -> list[Pair]:
        """Whom a worker helps by drafting or by a copy."""
        return self._pairs.get(worker, [])

    def end(self, changed: Iterable[str], standing: Callable[[Place], Standing]) -> list[Action]:
        """End the pairs whose copy is over, whose drafter is no longer able, or whose helped worker no longer busy.

        changed: the workers whose standing may have changed since the last call.
        """
        actions: list[Action] = []
        left: set[Place] = set()
        for pair in self._pairs_with(changed):
            helper, helped = standing(pair.helper), standing(pair.helped)
            if pair.kind is Help.COPY:
                if helper is not Standing.RACING:
                    self._remove(pair)
            elif helper is not Standing.IDLE or helped is not Standing.BUSY:
                self._remove(pair)
                if helper in {Standing.IDLE, Standing.UNABLE}:
                    left.add(pair.helper)
                if helped is not Standing.GONE:
                    actions.append(LoseDrafter(*pair.helped))
        return [*actions, *(self._order(helper) for helper in sorted(left))]

    def _pairs_with(self, workers: Iterable[str]) -> list[Pair]:
        """The pairs that one of these is in, each once."""
        found: dict[Pair, None] = {}
        for name in workers:
            found |= dict.fromkeys(self.find(name))
            if (pair := self._helped.get(name)) is not None:
                found[pair] = None
        return list(found)

    def assign(self, drafters: Collection[Place]) -> list[Action]:
        """Workers that do nothing but draft: whoever is busy and has no help gets the one that helps the fewest.

        Who ends last goes first, ties by name. They draft with the engines' own drafter.
        """
        alone = sorted(name for name in self._doors if name not in self._helped) if drafters else []
        alone.sort(key=lambda name: -self._busy[name].load.end_s if name in self._busy else -math.inf)
        changed: dict[Place, None] = {}
        for name in alone:
            helper = min(drafters, key=lambda place: len(self.find(place.worker)))
            place, addresses = self._doors[name]
            pair = Pair(helper, place, Help.DRAFT, address=addresses[self._drafter], drafter=self._drafter)
            self.add(pair)
            changed[helper] = None
        return [self._order(helper) for helper in changed]

    def draft(self, pair: Pair) -> Action:
        """A worker drafts for another one from now on."""
        name = pair.helped.worker
        self.add(replace(pair, address=self._doors[name][1][pair.drafter]))
        if (now := self._seen.get(name)) is not None:
            self._trials[name] = _Trial(self._lately(name), now)
        return self._order(pair.helper)

    def stop_drafting(self, pair: Pair) -> list[Action]:
        """What both are told when this is over."""
        return [LoseDrafter(*pair.helped), self._order(pair.helper)]

    def race(self, pair: Pair, generated: int, num_copied: int) -> None:
        """A worker, which has generated so many tokens in its life, runs a copy of a response of so many tokens."""
        name = pair.helped.worker
        self.add(pair)
        if name in self._seen and (before := self._lately(name)).response_s:
            share = before.step_s / before.response_s
            before = replace(before, num_tokens=round(share * before.num_tokens), response_s=before.step_s)
            self._catching_up[name] = _CatchingUp(before, generated, num_copied)

    def _order(self, helper: Place) -> Action:
        """What an idle worker is told to do for others."""
        pairs = self.find(helper.worker)
        if not pairs:
            return Rest(*helper)
        return DraftFor(
            *helper,
            tuple(pair.helped.worker for pair in pairs),
            tuple(pair.address for pair in pairs),
            pairs[0].drafter,
        )

    def add(self, pair: Pair) -> None:
        """A worker drafts for another one, or runs a copy, from now on."""
        self._pairs.setdefault(pair.helper.worker, []).append(pair)
        self._helped[pair.helped.worker] = pair
        self._mark(pair.helped.worker)

    def _remove(self, pair: Pair) -> None:
        """The help is over."""
        pairs = self._pairs[pair.helper.worker]
        pairs.remove(pair)
        del self._helped[pair.helped.worker]
        self._trials.pop(pair.helped.worker, None)
        self._catching_up.pop(pair.helped.worker, None)
        self._seen.pop(pair.helped.worker, None)  # the next look is not one from help to no help
        self._stale[pair.helped.worker] = None
        if not pairs:
            del self._pairs[pair.helper.worker]

    def _mark(self, worker: str) -> None:
        """A worker is helped: until the next prediction nobody else drafts for it or runs a copy."""
        if (busy := self._busy.get(worker)) is not None:
            self._busy[worker] = busy._replace(load=replace(busy.load, is_helped=True))

    def choose(
        self, free: Iterable[tuple[Place, StepCosts | None]], rested: Collection[str] | None = None
    ) -> list[Pair]:
        """Whom free workers help so that the rollout ends sooner.

        free: who helps nobody yet, with what their own steps cost when they had some; read as far as help pays.
        rested: those that did nothing since the last look but one: only they help a worker whose speed is measured, so
        that it is known what it was without them. None: all.
        """
        pairs: list[Pair] = []
        if self._ends.latest() is None:
            return pairs
        for helper, costs in free:
            if (latest := self._ends.latest()) is None:
                break
            helped = self._busy[latest]
            if latest in self._seen and not helped.load.is_helped:
                if self._lately(latest).step_s < EARLY_S:
                    break
                if rested is not None and helper.worker not in rested:
                    continue
            able = self._describe(helped, costs)
            choice = decide_help(helped.load, able)
            if choice.kind is Help.NOTHING:
                break
            chunks = _chosen(helped.chunks, choice)
            pairs.append(Pair(helper, helped.place, choice.kind, chunks, drafter=choice.drafter))
            if choice.kind is Help.DRAFT:
                self._ends.put(latest, choice.end_s)
                self._mark(latest)
            else:  # until the next prediction
                self._ends.remove(latest)
            self._stale[latest] = None
        return pairs

    def _lately(self, worker: str) -> Progress:
        """What a busy worker has generated between the last two looks."""
        now = self._seen[worker]
        return now - self._seen_before.get(worker, now)

    def _describe(self, helped: _Busy, own: StepCosts | None) -> Helper:
        """What a free worker can do for that one. own: what its steps cost."""
        costs, name = helped.costs, helped.place.worker
        kinds = {kind for kind in self.kinds if (name, kind) not in self._refused}
        can_draft = name in self._doors and (name, Help.DRAFT) not in self._refused
        drafting = Drafting(costs.draft_s, costs.acceptance, self._drafter) if costs.draft_s > 0.0 else None
        ahead = self._others if drafting is None else (drafting, *self._others)
        slowness = 1.0
        if own is not None:
            step_s, own_s = (one.base_s + one.token_s * costs.step_tokens for one in (costs, own))
            slowness = own_s / step_s
            if slowness < 1.0 / (1.0 - LEAST_LEAD):
                slowness = min(slowness / (1.0 - LEAST_LEAD), 1.0)
        return Helper(
            ahead=ahead if can_draft and Help.DRAFT in kinds else (),
            inside=drafting if can_draft and not costs.inside_s else None,  # else the helped one has the same
            can_copy=helped.can_copy and Help.COPY in kinds,
            can_take=helped.can_take and Help.TAKE in kinds,
            switch_s=SWITCH_S,
            load_token_s=slowness * costs.token_s,
            slowness=slowness,
        )


def _chosen(chunks: tuple[int, ...], choice: HelpChoice) -> tuple[int, ...]:
    """The responses that are copied or taken over."""
    return chunks[: {Help.COPY: 1, Help.TAKE: choice.num_taken}.get(choice.kind, 0)]


def _make_load(ordered: Sequence[Remainder], costs: StepCosts, is_helped: bool, drafter: int) -> Load:
    """ordered: the longest rest first."""
    return Load(
        np.array([one.rest_tokens for one in ordered], dtype=np.float64) / costs.tokens_per_step,
        np.array([one.context_tokens for one in ordered], dtype=np.float64),
        costs.tokens_per_step,
        costs.step_tokens,
        costs.base_s,
        costs.token_s,
        costs.inside_s,
        is_helped,
        drafter,
    )

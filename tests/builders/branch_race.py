"""A verifier and a draft worker that prepares corrections, in simulated time: one response, steps of V, tokens of D.

The worker knows how likely each of its tokens is to be accepted, `likely` or `unlikely`, as a calibrated one does, and
drafts what `choose_leaves` says, a token at a time: two at once take twice as long. Engine and worker as in
draft_race.py: the engine waits by `decide_wait`, and a call in progress does not know of the step that has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.planning.draft_ahead import choose_leaves
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.wait import WaitSnapshot, decide_wait

FLOOR = 0.05
VOID = -2
CHAIN = -1


@dataclass(frozen=True, slots=True)
class Token:
    """A draft token: how likely it is to be right, and whether it is."""

    acceptance: float
    is_right: bool


@dataclass
class BranchRace:
    """Run it once."""

    unlikely: float
    likely: float
    share: float
    """Of likely tokens."""
    rival: float
    """How often the runner-up is the correction."""
    draft_s: float
    has_branches: bool
    window: int = 8
    seed: int = 0
    verify_s: float = 1.0
    num_hits: int = 0
    _chain: list[Token] = field(default_factory=list)
    _branches: dict[int, list[Token]] = field(default_factory=dict)  # by the place of the token they replace
    _job: int | None = None  # CHAIN, VOID or the place of a branch
    _job_ends_s: float = 0.0
    _step_ends_s: float = 0.0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._level_time = StepTimeModel.initial()
        for rows in (1, 2, 4, 8, 16, 32):
            for _ in range(2):
                self._level_time = update_measured_time(self._level_time, rows, self.draft_s * rows)

    def run(self, num_steps: int) -> float:
        """Tokens per second."""
        now_s, num_tokens = 0.0, 0
        for _ in range(num_steps):
            now_s = self._wait(now_s)
            offered = len(self._chain)
            now_s += self.verify_s * float(self._rng.normal(1.0, 0.03))
            self._draft_until(now_s)
            num_tokens += self._decide(offered)
            self._step_ends_s = now_s + self.verify_s
        return num_tokens / now_s

    def _wait(self, now_s: float) -> float:
        began_s = now_s
        while now_s - began_s <= self.verify_s:
            whole = _product(self._chain) if len(self._chain) < 2 * self.window else 0.0
            running_s = self._job_ends_s - now_s if self._job is not None else self.draft_s
            arrival_s = max(running_s + self.draft_s * (self._job not in {None, CHAIN}), 0.1 * self.draft_s)
            mean = self.share * self.likely + (1.0 - self.share) * self.unlikely
            if not decide_wait(WaitSnapshot(1, whole, mean, 1, arrival_s, self.verify_s, self.verify_s)):
                break
            now_s += arrival_s
            self._draft_until(now_s)
        return now_s

    def _draft_until(self, now_s: float) -> None:
        while True:
            if self._job is None:
                self._job = self._choose()
                if self._job is None:
                    self._job_ends_s = max(self._job_ends_s, now_s)
                    return
                self._job_ends_s += self.draft_s
            if self._job_ends_s > now_s:
                return
            if self._job == CHAIN:
                self._chain.append(self._draw())
            elif self._job != VOID:
                self._branches.setdefault(self._job, []).append(self._draw())
            self._job = None

    def _choose(self) -> int | None:
        leaves = {CHAIN: _product(self._chain)} if len(self._chain) < 2 * self.window else {}
        before = 1.0
        for place, token in enumerate(self._chain if self.has_branches else []):
            branch = self._branches.get(place, [])
            if place + 1 + len(branch) < 2 * self.window:
                leaves[place] = before * (1.0 - token.acceptance) * self.rival * _product(branch)
            before *= token.acceptance
        leaves = {place: probability for place, probability in leaves.items() if probability >= FLOOR}
        names, probability = list(leaves), np.array(list(leaves.values()))
        is_branch = np.array([name != CHAIN for name in names], np.bool_)
        left_s = self._step_ends_s - self._job_ends_s
        rest = np.ones(len(names), np.int64)
        chosen = choose_leaves(probability, rest, is_branch, self._level_time, left_s)
        return names[int(chosen[0])] if len(chosen) else None

    def _draw(self) -> Token:
        acceptance = self.likely if self._rng.random() < self.share else self.unlikely
        return Token(acceptance, bool(self._rng.random() < acceptance))

    def _decide(self, offered: int) -> int:
        """The step has verified so many tokens; returns how many the response has grown by."""
        chain, job = self._chain, self._job
        num_right = next((i for i, token in enumerate(chain[:offered]) if not token.is_right), offered)
        if num_right == offered < len(chain) and chain[offered].is_right:
            self._chain = chain[offered + 1 :]
            later = {place - offered - 1: made for place, made in self._branches.items() if place > offered}
            self._branches = later
            if job is not None and job >= 0:
                self._job = job - offered - 1 if job > offered else VOID
            return num_right + 1
        prepared = self._branches.get(num_right)
        is_hit = num_right < len(chain) and prepared is not None and self._rng.random() < self.rival
        self.num_hits += is_hit
        self._chain, self._branches = (prepared or []) if is_hit else [], {}
        if job is not None:
            self._job = CHAIN if is_hit and job == num_right else VOID
        return num_right + 1


def _product(tokens: list[Token]) -> float:
    return float(np.prod([token.acceptance for token in tokens]))

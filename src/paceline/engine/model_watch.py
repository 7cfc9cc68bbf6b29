"""Watches a model drafter, of an engine or a draft worker: is it used, how often is it right, and is it dead?"""

from __future__ import annotations

import logging

from paceline.planning import zero_acceptance
from paceline.planning.zero_acceptance import Trial, likely_cause
from paceline.types import DraftBatch, DrafterScore, Int32Array

LOGGER = logging.getLogger(__name__)


class ModelWatch:
    """One of the engine's own, and one per draft worker. folder: of the model drafter; None: there is none.

    is_elsewhere: it belongs to a draft worker, whose weights stay: it is tried again when the target has others.
    """

    def __init__(self, folder: str | None, *, is_elsewhere: bool = False) -> None:
        self._is_elsewhere = is_elsewhere
        self.is_used = folder is not None
        self.score = DrafterScore()
        self._folder, self._trial = folder, Trial()
        self._was_alive = self._is_pushed = False

    @property
    def is_alive(self) -> bool:
        """Whether the test has found that; False while it goes on."""
        return self._trial.verdict == "alive"

    def drop(self) -> None:
        """Its weights are no good: use it no more until `renew`."""
        self.is_used = False

    def renew(self, folder: str | None = None) -> None:
        """It has other weights. folder: those of another drafter, from there; None: they were pushed to it."""
        self._folder, self._is_pushed = folder or self._folder, folder is None
        self.is_used, self._trial, self._was_alive = True, Trial(), False

    def begin_trial(self) -> None:
        """The target may have other weights: a drafter that was alive need not be any more."""
        if self._trial.verdict is not None:
            self._trial = Trial()
            self.is_used = self.is_used or self._is_elsewhere

    def observe(self, drafts: DraftBatch, first: Int32Array) -> None:
        """Compare the first token of each draft, verified or not, with the target's. A dead drafter is dropped.

        first: the target's tokens, -1 where there is none. [num_requests]
        """
        told = (drafts.num_tokens > 0) & (first >= 0)
        self.count(int(told.sum()), int((drafts.tokens[told, 0] == first[told]).sum()))

    def count(self, tried: int, right: int) -> None:
        """`right` of `tried` first tokens of its drafts were the target's, in one step. A dead drafter is dropped."""
        self.score += DrafterScore(tried, right)
        self._trial = zero_acceptance.observe(self._trial, tried, right)
        self._was_alive = self._was_alive or self._trial.verdict == "alive"
        if self._trial.verdict == "dead" and self.is_used:
            LOGGER.warning(
                "the target accepts nothing from the model drafter %s, likely because of %s; going on without it until "
                "%s has other weights",
                self._folder,
                likely_cause(was_alive=self._was_alive, is_pushed=self._is_pushed),
                "the policy" if self._is_elsewhere else "it",
            )
            self.score += DrafterScore(alarms=1)
            self.drop()

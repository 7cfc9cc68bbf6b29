"""Watches the model drafter inside an engine: whether it is used, how often it is right, and whether it is dead."""

from __future__ import annotations

import logging

from paceline.planning import zero_acceptance
from paceline.planning.zero_acceptance import Trial
from paceline.types import DraftBatch, DrafterScore, Int32Array

LOGGER = logging.getLogger(__name__)


class ModelWatch:
    """One per engine. folder: of the model drafter; None: there is none."""

    def __init__(self, folder: str | None) -> None:
        self.is_used = folder is not None
        self.score = DrafterScore()
        self._folder, self._trial = folder, Trial()

    def drop(self) -> None:
        """Its weights are no good: use it no more until `renew`."""
        self.is_used = False

    def renew(self) -> None:
        """It has other weights."""
        self.is_used, self._trial = True, Trial()

    def begin_trial(self) -> None:
        """The target may have other weights: a drafter that was alive need not be any more."""
        if self._trial.verdict is not None:
            self._trial = Trial()

    def observe(self, drafts: DraftBatch, first: Int32Array) -> None:
        """Compare the first token of each draft, verified or not, with the target's. A dead drafter is dropped.

        first: the target's tokens, -1 where there is none. [num_requests]
        """
        told = (drafts.num_tokens > 0) & (first >= 0)
        tried, right = int(told.sum()), int((drafts.tokens[told, 0] == first[told]).sum())
        self.score += DrafterScore(tried, right)
        self._trial = zero_acceptance.observe(self._trial, tried, right)
        if self._trial.verdict == "dead" and self.is_used:
            LOGGER.warning(
                "the target accepts nothing from the model drafter %s: random, stale or lost weights, or another "
                "tokenizer; going on without it until weights are pushed to it",
                self._folder,
            )
            self.score += DrafterScore(alarms=1)
            self.drop()

"""The fast loop's model-free drafter: told what responses grow by, here and on other workers, asked for drafts.

Owns the drafter, how sure its drafts are, the numbers by which it knows responses, and the end of the draft servers. A
part of the fast loop, which decides whose drafts are worth their time. Knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paceline.config import EngineSettings
from paceline.drafting.drafter import Drafter, PathDrafter, ThreadedDrafter
from paceline.drafting.learned import Learned
from paceline.engine.early_drafts import EarlyDrafts
from paceline.engine.sharing import SharedDrafts, drafter_number
from paceline.errors import RequestError
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import (
    DraftBatch,
    DraftChains,
    DraftPaths,
    DraftQuery,
    DraftSharingCounters,
    Float32Array,
    Int32Array,
    Int64Array,
)

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)

NO_RESPONSES = np.empty(0, np.int64)

FIRST_COPY = 1 << 62
"""Numbers in the drafter begin here for responses whose key is running in their group already."""


class ModelFreeDrafts:
    """One per engine; its drafter may be None, and rest. Used by the scheduler's thread."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        """Raises ConfigError for draft servers or a secret that cannot be."""
        self._settings = settings
        self.drafter, prior = _make_drafter(settings)
        self.learned = Learned(prior, settings.sharpness)
        self.calibration = self.learned.calibration
        """Acceptance by cell as the present step believes it. [num_cells]"""
        self._sharing = _connect(settings, vocab_size)
        self._resting: Drafter | None = None
        self._early: EarlyDrafts | None = None
        # a drafter, and the same if it is one: it is not looked up in every step
        self._threaded: tuple[Drafter | None, ThreadedDrafter | None] = None, None
        self._numbers: dict[int, int] = {}  # the drafter's, of each open response
        self._numbered = NO_RESPONSES, NO_RESPONSES  # responses, and the drafter's numbers of them
        self._running: set[tuple[int, int]] = set()  # group and drafter's number of each

    # -- responses

    def open(
        self, group: int, response: int, prompt: Sequence[int], generated: Sequence[int], key: int
    ) -> None:
        """A response begins, or resumes, as `FastLoop.open`."""
        if self.drafter is None:
            return
        with contextlib.suppress(RequestError):
            self.drafter.open_group(group, np.asarray(prompt, dtype=np.int32))
        number = drafter_number(key)
        is_copy = (group, number) in self._running
        if is_copy:
            number = FIRST_COPY + response
        self._numbers[response] = number
        self._numbered = NO_RESPONSES, NO_RESPONSES
        self._running.add((group, number))
        self.drafter.resync(group, number, np.asarray(generated, dtype=np.int32))
        if self._sharing is not None and not is_copy:
            self._sharing.open(group, response, key, generated)

    def grow(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        *,
        drafter_knows: bool,
    ) -> None:
        """Responses have new tokens, as `FastLoop.grow`."""
        if self._sharing is not None:
            for group, response, new in zip(
                groups.tolist(), responses.tolist(), np.split(tokens, offsets[1:-1]), strict=True
            ):
                self._sharing.grow(group, response, new.tolist())
        if self.drafter is not None and not drafter_knows:
            self.drafter.append_batch(groups, self.numbers_of(responses), offsets, tokens)

    def close(self, group: int, response: int) -> None:
        """A response has ended; its tokens go on serving its group."""
        number = self._numbers.pop(response, response)
        self._numbered = NO_RESPONSES, NO_RESPONSES
        self._running.discard((group, number))
        if self.drafter is not None:
            self.drafter.close_response(group, number)
        if self._sharing is not None:
            self._sharing.close(group, response)

    def numbers_of(self, responses: Int64Array) -> Int64Array:
        """The drafter's numbers of these responses, which most often are those of the step before. [num_responses]"""
        if responses is not self._numbered[0]:
            names = responses.tolist()
            numbers = np.fromiter(map(self._numbers.get, names, names), np.int64, len(names))
            self._numbered = responses, numbers
        return self._numbered[1]

    def forget(self) -> None:
        """Drop all groups; what was learned about acceptance stays."""
        if self.drafter is not None:
            self.drafter.clear()
        if self._sharing is not None:
            self._sharing.forget()
        self._early = None

    def switch(self) -> None:
        """Have the drafter rest, or go on; only between responses."""
        self.drafter, self._resting = self._resting, self.drafter

    # -- other workers

    def use_epoch(self, epoch: int) -> None:
        """Share drafts with the workers of this epoch; by default each `forget` begins the next."""
        if self._sharing is not None:
            self._sharing.epoch = epoch

    def sharing_counters(self) -> DraftSharingCounters:
        """What this engine has told the draft servers and heard from them; zeros without any."""
        return DraftSharingCounters() if self._sharing is None else self._sharing.counters()

    def shut_down(self) -> None:
        """Disconnect from the draft servers."""
        if self._sharing is not None:
            self._sharing.close_client()
            self._sharing = None

    # -- a step

    def draft_early(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        query: DraftQuery,
    ) -> None:
        """Take the arguments of `grow` and then draft for `query`, on a thread of the drafter's own: `take_early` has
        what has come of it. Only where `can_draft_early` says so.
        """
        drafter = self._threaded[1]
        assert drafter is not None
        if self._sharing is not None:
            self._sharing.take_over(drafter)
        wait = drafter.draft_later(
            groups,
            self.numbers_of(responses),
            offsets,
            tokens,
            self.by_number(query),
            **self._draft_settings(),
            num_paths=1 + self._num_branches(len(query.groups)),
        )
        self._early = EarlyDrafts(drafter, query, wait)

    @property
    def can_draft_early(self) -> bool:
        """Whether the drafter has a thread of its own."""
        if self._threaded[0] is not self.drafter:
            self._threaded = self.drafter, self.drafter if isinstance(self.drafter, ThreadedDrafter) else None
        return self._threaded[1] is not None

    def take_early(self, query: DraftQuery) -> tuple[DraftBatch, DraftPaths | None] | None:
        """What was drafted early, and the paths that were made with it, if it suits the step. Waits for it."""
        early, self._early = self._early, None
        if early is None or early.drafter is not self.drafter:
            return None
        made = early.lined_up(query)
        if made is None or (made[1] is None and self._num_branches(len(query.groups))):
            return None
        return made

    def take_over(self) -> None:
        """Give the drafter what other workers have told."""
        if self._sharing is not None and self.drafter is not None:
            self._sharing.take_over(self.drafter)

    def by_number(self, query: DraftQuery) -> DraftQuery:
        """The query by the drafter's own numbers of the responses."""
        return replace(query, responses=self.numbers_of(query.responses))

    def draft(self, query: DraftQuery) -> DraftBatch:
        """Each request's draft. query: `by_number`; there is a drafter."""
        assert self.drafter is not None
        return self.drafter.draft(query, **self._draft_settings())

    def _draft_settings(self) -> dict[str, Any]:
        return {
            "sharpness": self.learned.beta,
            "sharpness_grid": GRID,
            "calibration": self.calibration,
            "floor": self._settings.draft_floor,
        }

    def paths(self, query: DraftQuery) -> Callable[[], DraftPaths] | None:
        """What has the drafter propose several paths; None if it cannot. query: `by_number`."""
        if not isinstance(self.drafter, PathDrafter):
            return None
        return partial(
            self.drafter.draft_paths,
            query,
            num_paths=self._settings.num_paths,
            sharpness=self.learned.beta,
            calibration=self.calibration,
            floor=self._settings.draft_floor,
        )

    def branches(
        self, query: DraftQuery, batch: DraftChains, ahead: Int32Array, paths: DraftPaths | None
    ) -> DraftPaths | None:
        """Further paths, of which one goes on where a request's draft does not: those that leave it among its first
        `ahead` tokens. query: `by_number`. paths: that have been made already.
        """
        num_branches = self._num_branches(len(ahead))
        if not num_branches or not batch.num_tokens.any():
            return None
        if paths is None:
            draft_paths = self.paths(query)
            if draft_paths is None:
                return None
            paths = draft_paths()
        decided = np.where(np.arange(paths.tokens.shape[2]) < ahead[:, None, None], paths.tokens, -1)
        num_tokens = paths.num_tokens[:, 1:].copy()
        for place in range(num_branches):  # of those that are alike so far the likeliest stands for all
            is_like = (decided[:, : place + 1] == decided[:, place + 1, None]).all(axis=2).any(axis=1)
            num_tokens[is_like, place] = 0
        return DraftPaths(
            np.ascontiguousarray(paths.tokens[:, 1:]),
            num_tokens,
            np.ascontiguousarray(paths.acceptance[:, 1:]),
            paths.cells[:, 1:],
        )

    def _num_branches(self, num_requests: int) -> int:
        """Paths beyond one through a step under way: none for more requests than `max_alternatives` allows."""
        wanted = self._settings.num_paths - 1
        return wanted if num_requests * wanted <= self._settings.max_alternatives else 0


def _make_drafter(settings: EngineSettings) -> tuple[Drafter | None, Float32Array]:
    """The drafter and the prior of its calibration cells."""
    if settings.drafter == "suffix":
        from paceline.drafting import suffix

        forest = suffix.SuffixForest(
            settings.suffix_depth, settings.suffix_memory_bytes, num_threads=settings.suffix_threads
        )
        return forest, suffix.prior_calibration()
    if settings.drafter == "lookup":
        from paceline.drafting import lookup

        return lookup.LookupDrafter(memory_bytes=settings.suffix_memory_bytes), lookup.prior_calibration()
    return None, np.zeros(1, dtype=np.float32)


def _connect(settings: EngineSettings, vocab_size: int) -> SharedDrafts | None:
    """The end of the draft servers, if there are any. Raises ConfigError for addresses or a secret that cannot be."""
    if not settings.draft_servers:
        return None
    from paceline.drafting.client import DraftClient
    from paceline.drafting.wire import read_secret

    secret = read_secret(settings.draft_secret_file)
    return SharedDrafts(DraftClient(settings.draft_servers, secret=secret, vocab_size=vocab_size))

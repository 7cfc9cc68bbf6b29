"""Drafts from what other workers generate: the fast loop's end of the draft server.

Translates between the engine's response numbers and the dice keys by which workers speak of responses. Foreign
responses get numbers of their own in the drafter. All of it is in memory; the client's thread does the rest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from paceline.drafting.client import DraftClient
from paceline.drafting.drafter import Drafter

FIRST_FOREIGN = 1 << 62
"""Numbers of foreign responses begin here; the engine's own are counted from 0."""

MOST_GROWTHS = 4096
"""Pieces of foreign responses that one step takes over; the others wait for the next."""


class SharedDrafts:
    """One per engine. Used by the scheduler's thread."""

    def __init__(self, client: DraftClient) -> None:
        self._client = client
        self._keys: dict[int, int] = {}  # by own response
        self._num_open: Counter[int] = Counter()  # own responses of each group
        self._foreign: dict[tuple[int, int], int] = {}  # by group and key
        self._numbers = itertools.count(FIRST_FOREIGN)

    def open(self, group: int, response: int, key: int, generated: Sequence[int]) -> None:
        """A response begins here, or resumes with `generated` tokens."""
        self._keys[response] = key
        self._num_open[group] += 1
        self._client.watch(group, key)
        if generated:
            self._client.report(group, key, generated)

    def grow(self, group: int, response: int, tokens: Sequence[int]) -> None:
        """A response has new tokens."""
        if (key := self._keys.get(response)) is not None:
            self._client.report(group, key, tokens)

    def close(self, group: int, response: int) -> None:
        """A response has ended."""
        if self._keys.pop(response, None) is None:
            return
        self._num_open[group] -= 1
        if not self._num_open[group]:
            del self._num_open[group]
            self._client.unwatch(group)

    def take_over(self, drafter: Drafter) -> None:
        """Give the drafter what has arrived."""
        for growth in self._client.take(MOST_GROWTHS):
            place = growth.group, growth.key
            if place not in self._foreign:
                self._foreign[place] = next(self._numbers)
            drafter.append(growth.group, self._foreign[place], growth.tokens)

    def forget(self) -> None:
        """The policy has changed: all tokens are of the old one."""
        self._client.forget()
        self._keys.clear()
        self._num_open.clear()
        self._foreign.clear()

    def close_client(self) -> None:
        """Disconnect."""
        self._client.close()

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

MOST_GROWTHS = 256
"""Pieces (of at most client.MOST_TOKENS) that one step takes over; the others wait for the next."""

_EPOCH_STRIDE = 0x9E3779B97F4A7C15
_GROUP_MASK = (1 << 63) - 1


class SharedDrafts:
    """One per engine. Used by the scheduler's thread."""

    def __init__(self, client: DraftClient) -> None:
        self._client = client
        self._own: dict[int, tuple[int, int]] = {}  # key and number of tokens, by own response
        self._num_open: Counter[int] = Counter()  # own responses of each group
        self._foreign: dict[tuple[int, int], int] = {}  # by shared group and key
        self._local: dict[int, int] = {}  # the engine's number of a shared group
        self._numbers = itertools.count(FIRST_FOREIGN)
        self.epoch = 0
        """Workers share the groups of an equal epoch; set it between responses only."""

    def open(self, group: int, response: int, key: int, generated: Sequence[int]) -> None:
        """A response begins here, or resumes with `generated` tokens."""
        self._own[response] = key, len(generated)
        self._num_open[group] += 1
        self._local[self._shared(group)] = group
        self._client.watch(self._shared(group), key, generated)

    def grow(self, group: int, response: int, tokens: Sequence[int]) -> None:
        """A response has new tokens."""
        if response in self._own:
            key, start = self._own[response]
            self._own[response] = key, start + len(tokens)
            self._client.report(self._shared(group), key, start, tokens)

    def close(self, group: int, response: int) -> None:
        """A response has ended."""
        if self._own.pop(response, None) is None:
            return
        self._num_open[group] -= 1
        if not self._num_open[group]:
            del self._num_open[group]
            self._client.unwatch(self._shared(group))

    def take_over(self, drafter: Drafter) -> None:
        """Give the drafter what has arrived."""
        for growth in self._client.take(MOST_GROWTHS):
            place = growth.group, growth.key
            if place not in self._foreign:
                self._foreign[place] = next(self._numbers)
            drafter.append(self._local[growth.group], self._foreign[place], growth.tokens)

    def forget(self) -> None:
        """The policy has changed: all tokens are of the old one, and groups are others from now on."""
        self._client.forget()
        self._own.clear()
        self._num_open.clear()
        self._foreign.clear()
        self._local.clear()
        self.epoch += 1

    def _shared(self, group: int) -> int:
        """The number by which workers speak of the group under the present policy."""
        return (group + self.epoch * _EPOCH_STRIDE) & _GROUP_MASK

    def close_client(self) -> None:
        """Disconnect."""
        self._client.close()

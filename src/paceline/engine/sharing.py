"""Drafts from what other workers generate: the fast loop's end of the draft server.

Translates between the engine's groups and responses and the numbers by which workers speak of them. In the drafter a
response is known by its key, wherever it runs: it moves without being counted twice. All of it is in memory; the
client's thread does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.drafting.client import DraftClient
from paceline.drafting.drafter import Drafter
from paceline.types import DraftSharingCounters

MOST_GROWTHS = 256
"""Pieces (of at most client.MOST_TOKENS) that one step takes over; the others wait for the next."""

_EPOCH_STRIDE = 0x9E3779B97F4A7C15
_GROUP_MASK = (1 << 63) - 1


def drafter_number(key: int) -> int:
    """The number of a response in the drafter: its 64-bit key, signed."""
    return key - ((key >> 63) << 64)


class SharedDrafts:
    """One per engine. Used by the scheduler's thread."""

    def __init__(self, client: DraftClient) -> None:
        self._client = client
        self._own: dict[int, tuple[int, int]] = {}  # key and number of tokens, by own response
        self._num_open: Counter[int] = Counter()  # own responses of each group
        self.epoch = 0
        """Workers share the groups of an equal epoch; set it between responses only."""

    def open(self, group: int, response: int, key: int, generated: Sequence[int]) -> None:
        """A response begins here, or resumes with `generated` tokens."""
        self._own[response] = key, len(generated)
        self._num_open[group] += 1
        self._client.watch(self._shared(group), key, generated)

    def grow(self, group: int, response: int, tokens: Sequence[int]) -> None:
        """A response has new tokens."""
        if response in self._own:
            key, start = self._own[response]
            self._own[response] = key, start + len(tokens)
            self._client.report(self._shared(group), key, start, tokens)

    def close(self, group: int, response: int) -> None:
        """A response has ended."""
        if response not in self._own:
            return
        self._client.leave(self._shared(group), *self._own.pop(response))
        self._num_open[group] -= 1
        if not self._num_open[group]:
            del self._num_open[group]
            self._client.unwatch(self._shared(group))

    def take_over(self, drafter: Drafter) -> None:
        """Give the drafter what has arrived."""
        for growth in self._client.take(MOST_GROWTHS):
            tell = drafter.append if growth.start else drafter.resync
            tell(self._local(growth.group), drafter_number(growth.key), growth.tokens)

    def forget(self) -> None:
        """The policy has changed: all tokens are of the old one, and groups are others from now on."""
        self._client.forget()
        self._own.clear()
        self._num_open.clear()
        self.epoch += 1

    def _shared(self, group: int) -> int:
        """The number by which workers speak of the group under the present policy."""
        return (group + self.epoch * _EPOCH_STRIDE) & _GROUP_MASK

    def _local(self, shared: int) -> int:
        """The engine's number of such a group."""
        return (shared - self.epoch * _EPOCH_STRIDE) & _GROUP_MASK

    def counters(self) -> DraftSharingCounters:
        """What has been told and heard so far, and what went wrong."""
        return self._client.counters()

    def close_client(self) -> None:
        """Disconnect."""
        self._client.close()

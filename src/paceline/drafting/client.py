"""The draft server's client, inside an engine process: tells what grew here, hears what grew elsewhere.

All network work is done by a thread of its own; `watch`, `report`, `forget` and `take` touch memory alone, so that an
engine step never waits. What a server lacks (it was started anew, or dropped the group) is sent to it again. Whatever
fails, drafting goes on from what is here. `watch` to `take` are for one thread, the scheduler's.

Responses move between workers. Invariant: `watch`, `report` and `take` together give the tokens of each response in
order and without a gap; what was given before may come again after a `watch`, or from the response's beginning on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.drafting.wire import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED,
    MAX_TEXT_BYTES,
    TOKEN_BYTES,
    Append,
    Fetch,
    News,
    Piece,
    Seal,
    Want,
)
from paceline.errors import ConfigError
from paceline.types import Int32Array

LOGGER = logging.getLogger(__name__)

MOST_DORMANT = 1024
"""Groups without a response here whose place in the log is remembered, in case one comes back."""

MOST_WAITING = 1 << 14
"""Pieces that wait to be taken; while there are more, nothing is fetched."""

MOST_TOKENS = 256
"""Longer pieces are handed over in parts."""

ANSWER_MS = 1000.0
"""A fetch without an answer for so long is given up, and the next one sent."""


class Growth(NamedTuple):
    """Tokens of a response that is generated elsewhere."""

    group: int
    key: int
    start: int
    """Index of the first one; 0 again where the client begins anew with a group that it had forgotten."""
    tokens: Int32Array  # [num_tokens]


@dataclass(slots=True)
class _Own:
    """A response that is or was generated here: its tokens so far, or until it left."""

    tokens: bytearray = field(default_factory=bytearray)
    num_sent: int = 0  # bytes
    is_here: bool = True

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Add what is new of the tokens from the `start`-th on; beyond a gap nothing."""
        known = len(self.tokens) // TOKEN_BYTES
        if start <= known < start + len(tokens):
            self.tokens += np.asarray(tokens[known - start :], dtype="<i4").tobytes()


@dataclass(slots=True)
class _Group:
    """What the thread knows of a watched group."""

    log: int = 0
    since: int = 0
    is_ending: bool = False
    """Nothing is generated here any more; what was is still to be sent."""
    own: dict[int, _Own] = field(default_factory=dict)  # by key
    heard: dict[int, int] = field(default_factory=dict)
    """Tokens of each response, by key, from which on more is handed over; those that the log has while it is here."""


class DraftClient:
    """Shares the tokens of the groups that it watches. Close it."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        secret: bytes | None = None,
        interval_ms: float = 20.0,
        vocab_size: int = 1 << 31,
    ) -> None:
        """addresses: of all servers, in the same order for every client; a group's number chooses one of them.

        vocab_size: what is told of other token ids is dropped.

        Raises ConfigError for addresses that cannot be connected to, or a secret of the wrong length.
        """
        if not addresses or not interval_ms > 0:
            raise ConfigError(f"{len(addresses)} draft servers every {interval_ms} ms: both must be above 0")
        import zmq

        self._seal, self._interval_s = Seal(secret), interval_ms / 1e3
        self._vocab_size = vocab_size
        self._epoch = 0
        """Answers to what was asked in an earlier one are dropped."""
        self._lock = threading.Lock()  # held for moments: around the groups' small tables
        self._groups: dict[int, _Group] = {}
        self._arrived: deque[Growth] = deque()
        self._context = zmq.Context()
        self._links = [_Link(self._context, address) for address in addresses]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline draft client", daemon=True)
        self._thread.start()

    # -- the scheduler's side

    def watch(self, group: int, key: int, generated: Sequence[int] = ()) -> None:
        """A response of the group is generated here, with these tokens so far."""
        with self._lock:
            known = self._groups.pop(group, None) or _Group()
            self._groups[group] = known  # the last one: dormant ones at the front are the oldest
            known.is_ending = False
            own = known.own.setdefault(key, _Own())
            own.is_here = True
            if heard := known.heard.get(key, 0):
                if heard * TOKEN_BYTES > len(own.tokens):  # the server told it, so it need not be told
                    own.num_sent = heard * TOKEN_BYTES
                self._arrived = deque(one for one in self._arrived if (one.group, one.key) != (group, key))
            own.put(0, generated)

    def report(self, group: int, key: int, start: int, tokens: Sequence[int]) -> None:
        """A watched response has grown by `tokens`, from its `start`-th on; what is known already is passed over."""
        with self._lock:
            known = self._groups.get(group)
            if known is not None and (own := known.own.get(key)) is not None:
                own.put(start, tokens)

    def leave(self, group: int, key: int, num_tokens: int) -> None:
        """A watched response is not generated here any more; from its `num_tokens`-th on it may be elsewhere."""
        with self._lock:
            known = self._groups.get(group)
            if known is not None and key in known.own:
                known.own[key].is_here = False
                if known.heard.get(key, 0) > num_tokens:  # others were ahead: the log is read again
                    known.since = 0
                    self._epoch += 1
                known.heard[key] = num_tokens

    def unwatch(self, group: int) -> None:
        """The last response of the group here has ended. What was reported is still sent."""
        with self._lock:
            if group in self._groups:
                self._groups[group].is_ending = True

    def forget(self) -> None:
        """Stop watching all groups at once: their tokens are those of an old policy."""
        with self._lock:
            self._groups.clear()
            self._arrived.clear()
            self._epoch += 1

    def take(self, most: int) -> list[Growth]:
        """What has arrived since the last call, in order, at most so many pieces."""
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), most))]

    def close(self) -> None:
        """Stop the thread; what was reported and not sent yet is lost."""
        self._stop.set()
        self._thread.join()
        for link in self._links:
            link.socket.close()
        self._context.term()

    # -- the thread's side

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                for at, link in enumerate(self._links):
                    self._exchange(at, link)
            except Exception:  # drafts are a help: nothing here may end the engine
                LOGGER.exception("the draft client goes on after an error")

    def _exchange(self, at: int, link: _Link) -> None:
        for frame in link.receive():
            news = self._seal.open_news(frame)
            if news is not None:
                self._hear(news, link)
        with self._lock:
            epoch = self._epoch  # of what is asked for below
            mine = [
                (number, group) for number, group in self._groups.items() if number % len(self._links) == at
            ]
            appends = _unsent(mine)
            dormant = [number for number, group in self._groups.items() if group.is_ending]
            for number in dormant[: max(len(dormant) - MOST_DORMANT, 0)]:
                del self._groups[number]
            is_full = len(self._arrived) > MOST_WAITING
            wants = tuple(
                Want(number, group.log, group.since) for number, group in mine if not group.is_ending
            )
        for append in appends:
            link.send(self._seal.pack(append))
        link.waited_ms += 1e3 * self._interval_s
        if wants and not is_full and (link.answered or link.waited_ms > ANSWER_MS):
            link.number, link.answered, link.waited_ms, link.epoch = link.number + 1, False, 0.0, epoch
            link.send(self._seal.pack(Fetch(link.number, wants)))

    def _hear(self, news: News, link: _Link) -> None:
        if news.number != link.number:  # a late answer: another question has been asked since
            return
        link.answered = True
        with self._lock:
            if link.epoch != self._epoch:
                return
            for one in news.groups:
                group = self._groups.get(one.group)
                if group is None:
                    continue
                if one.log != group.log:
                    group.log = one.log
                    for own in group.own.values():
                        own.num_sent = 0
                group.since = one.until
                for key, known in one.behind:
                    if key in group.own:
                        own = group.own[key]
                        own.num_sent = min(known * TOKEN_BYTES, len(own.tokens))
                for piece in one.pieces:
                    self._pass_on(one.group, group, piece)

    def _pass_on(self, number: int, group: _Group, piece: Piece) -> None:
        """Hand over what is new of a foreign response."""
        heard = group.heard.get(piece.key, 0)
        count, odd = divmod(len(piece.tokens), TOKEN_BYTES)
        if odd or not piece.start <= heard < piece.start + count:
            return
        tokens = np.frombuffer(piece.tokens, dtype="<i4")[heard - piece.start :].astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            return
        group.heard[piece.key] = heard + len(tokens)
        own = group.own.get(piece.key)
        if own is not None and own.is_here:
            return
        for first in range(0, len(tokens), MOST_TOKENS):
            part = tokens[first : first + MOST_TOKENS]
            self._arrived.append(Growth(number, piece.key, heard + first, part))


class _Link:
    """The connection to one server."""

    def __init__(self, context: Any, address: str) -> None:
        import zmq

        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self.epoch = 0
        self.number, self.answered, self.waited_ms = 0, True, 0.0
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"draft server {address!r}: {error}; give addresses such as tcp://HOST:PORT"
            ) from error

    def receive(self) -> list[bytes]:
        """The frames that have arrived."""
        import zmq

        frames = []
        while self.socket.poll(0, zmq.POLLIN):
            frames.append(self.socket.recv())
        return frames

    def send(self, frame: bytes) -> None:
        """Send, or drop it where the server takes no more: it will name the gap, and hear it again."""
        import zmq

        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)


def _unsent(groups: list[tuple[int, _Group]]) -> list[Append]:
    """What the server has not been told, at most MAX_TEXT_BYTES; counted as told."""
    appends, room = [], MAX_TEXT_BYTES
    for number, group in groups:
        pieces = []
        for key, own in group.own.items():
            if own.num_sent < len(own.tokens) and room > 0:
                fresh = bytes(own.tokens[own.num_sent : own.num_sent + room // TOKEN_BYTES * TOKEN_BYTES])
                pieces.append(Piece(key, own.num_sent // TOKEN_BYTES, fresh))
                own.num_sent += len(fresh)
                room -= len(fresh)
        if pieces:
            appends.append(Append(number, tuple(pieces)))
    return appends

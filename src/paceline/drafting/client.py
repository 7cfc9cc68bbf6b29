"""The draft server's client, inside an engine process: tells what grew here, hears what grew elsewhere.

All network work is done by a thread of its own; `watch`, `report`, `forget` and `take` touch memory alone, so that an
engine step never waits. What a server lacks (it was started anew, or dropped the group) is sent to it again. Whatever
fails, drafting goes on from what is here. `watch` to `take` are for one thread, the scheduler's.

All that has grown goes out in one message per server and tick. What the server has not taken yet stays here, and the
next message begins with what has waited longest; so it is with what is asked for. No group starves, however many.

Memory: a group without a response here is only remembered (`MOST_DORMANT`), with text as long as that is unsent. In a
group that lives on, what has ended is kept for a server that comes to lack it (`MOST_ENDED_BYTES`), and how far each
response was heard of (`MOST_HEARD`).

Responses move between workers. Invariant: `watch`, `report` and `take` together give the tokens of each response in
order and without a gap; what was given before may come again after a `watch`, or from the response's beginning on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.drafting.wire import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED,
    MAX_TEXT_BYTES,
    PIECE_BYTES,
    TOKEN_BYTES,
    Append,
    Fetch,
    GroupNews,
    GroupPieces,
    News,
    Piece,
    Seal,
    Want,
)
from paceline.errors import ConfigError
from paceline.types import DraftSharingCounters, Int32Array

LOGGER = logging.getLogger(__name__)

MOST_DORMANT = 1024
"""Groups without a response here whose place in the log is remembered, in case one comes back."""

MOST_UNSENT_BYTES = 64 << 20
"""Text of dormant groups that waits for a server that takes nothing; beyond this whole groups go, the oldest first."""

MOST_ENDED_BYTES = 64 << 20
"""Responses that have ended in groups that live on; beyond this they go, sent or not, the first to end first."""

RESPONSE_BYTES = 300
"""What such a response costs beyond its tokens, about."""

MOST_HEARD = 1 << 16
"""Responses of one group of which it is known how far they were heard of, as many as a server's log takes."""

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
    """What the thread knows of a group."""

    log: int = 0
    since: int = 0
    heard_at: int = 0
    """When news of it came last, in answers of its server: the others are asked for first."""
    own: dict[int, _Own] = field(default_factory=dict)  # by key
    heard: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens of each response, by key, from which on more is handed over; those that the log has while it is here. The
    one that has not grown for the longest time comes first."""

    def note_heard(self, key: int, num_tokens: int) -> None:
        """So much of a response is known here."""
        self.heard[key] = num_tokens
        self.heard.move_to_end(key)
        if len(self.heard) > MOST_HEARD:
            self.heard.popitem(last=False)

    def num_unsent(self) -> int:
        """Bytes of text that no server has taken."""
        return sum(max(len(own.tokens) - own.num_sent, 0) for own in self.own.values())


class _Part(NamedTuple):
    """Text that is being sent."""

    name: tuple[int, int]
    own: _Own
    start: int  # bytes
    text: bytes


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
        self._dormant: dict[int, _Group] = {}
        """Groups without a response here, the longest without first."""
        self._ended: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes of each response that has ended in a group that lives on, the first to end first."""
        self._ended_bytes = 0
        self._counts: Counter[str] = Counter()  # the fields of DraftSharingCounters
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
            known = self._groups.get(group)
            if known is None:
                known = self._groups[group] = self._dormant.pop(group) if group in self._dormant else _Group()
                for other, unsent in known.own.items():
                    self._note_ended(group, other, unsent)
            self._note_ended(group, key, None)
            own = known.own.setdefault(key, _Own())
            own.is_here = True
            if heard := known.heard.get(key, 0):
                if heard * TOKEN_BYTES > len(own.tokens):  # the server told it, so it need not be told
                    own.num_sent = heard * TOKEN_BYTES
                self._arrived = deque(one for one in self._arrived if (one.group, one.key) != (group, key))
            self._put(group, key, own, 0, generated)

    def report(self, group: int, key: int, start: int, tokens: Sequence[int]) -> None:
        """A watched response has grown by `tokens`, from its `start`-th on; what is known already is passed over."""
        with self._lock:
            known = self._groups.get(group)
            if known is not None and (own := known.own.get(key)) is not None:
                self._put(group, key, own, start, tokens)

    def leave(self, group: int, key: int, num_tokens: int) -> None:
        """A watched response is not generated here any more; from its `num_tokens`-th on it may be elsewhere."""
        with self._lock:
            known = self._groups.get(group)
            if known is not None and key in known.own:
                known.own[key].is_here = False
                self._note_ended(group, key, known.own[key])
                if known.heard.get(key, 0) > num_tokens:  # others were ahead: the log is read again
                    known.since = 0
                    self._epoch += 1
                known.note_heard(key, num_tokens)
                self._drop_ended()

    def unwatch(self, group: int) -> None:
        """The last response of the group here has ended. What was reported is still sent."""
        with self._lock:
            if (known := self._groups.pop(group, None)) is not None:
                self._dormant[group] = known
                for key in known.own:
                    self._note_ended(group, key, None)
                self._trim(known)
                self._drop_dormant()

    def forget(self) -> None:
        """Stop watching all groups at once: their tokens are those of an old policy."""
        with self._lock:
            self._groups.clear()
            self._dormant.clear()
            self._ended.clear()
            self._ended_bytes = 0
            for link in self._links:
                link.unsent.clear()
            self._arrived.clear()
            self._epoch += 1

    def take(self, most: int) -> list[Growth]:
        """What has arrived since the last call, in order, at most so many pieces."""
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), most))]

    def counters(self) -> DraftSharingCounters:
        """What has been told and heard so far, and what went wrong."""
        with self._lock:
            return DraftSharingCounters(**self._counts)

    def close(self) -> None:
        """Stop the thread; what was reported and not sent yet is lost."""
        self._stop.set()
        self._thread.join()
        for link in self._links:
            link.socket.close()
        self._context.term()

    # -- both sides, with the lock

    def _link_of(self, group: int) -> _Link:
        return self._links[group % len(self._links)]

    def _put(self, group: int, key: int, own: _Own, start: int, tokens: Sequence[int]) -> None:
        own.put(start, tokens)
        if own.num_sent < len(own.tokens):
            self._link_of(group).unsent.setdefault((group, key), own)
        else:
            self._link_of(group).unsent.pop((group, key), None)

    def _note_ended(self, group: int, key: int, own: _Own | None) -> None:
        """A response has ended in a group that lives on; None: it is back, or the group has ended too."""
        self._ended_bytes -= self._ended.pop((group, key), 0)
        if own is not None:
            self._ended[group, key] = num_bytes = RESPONSE_BYTES + len(own.tokens)
            self._ended_bytes += num_bytes

    def _drop_ended(self) -> None:
        """Forget the responses that ended first, beyond the bound."""
        while self._ended_bytes > MOST_ENDED_BYTES:
            group, key = next(iter(self._ended))
            self._note_ended(group, key, None)
            self._drop(group, key, self._groups[group].own.pop(key))

    def _drop(self, group: int, key: int, own: _Own) -> None:
        """What is unsent of a response will not be."""
        self._link_of(group).unsent.pop((group, key), None)
        self._counts["dropped_tokens"] += max(len(own.tokens) - own.num_sent, 0) // TOKEN_BYTES

    def _trim(self, group: _Group) -> None:
        """Of a dormant group the text goes once it is sent; `heard` says how far it went."""
        group.own = {key: own for key, own in group.own.items() if own.num_sent < len(own.tokens)}

    def _drop_dormant(self) -> None:
        """Forget the oldest dormant groups beyond the bounds, sent or not."""
        unsent = {number: group.num_unsent() for number, group in self._dormant.items() if group.own}
        excess = sum(unsent.values()) - MOST_UNSENT_BYTES
        for number in list(self._dormant):
            if excess <= 0 and len(self._dormant) <= MOST_DORMANT:
                return
            lost, group = unsent.get(number, 0), self._dormant[number]
            if lost or len(self._dormant) > MOST_DORMANT:
                del self._dormant[number]
                for key, own in group.own.items():
                    self._drop(number, key, own)
                excess -= lost

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
        self._tell(link)
        self._ask(at, link)

    def _tell(self, link: _Link) -> None:
        """Send what has grown; what the server does not take now stays first in line."""
        with self._lock:
            parts = link.next_parts()
        if not parts:
            return
        pieces: dict[int, list[Piece]] = {}
        for part in parts:
            group, key = part.name
            pieces.setdefault(group, []).append(Piece(key, part.start // TOKEN_BYTES, part.text))
        message = Append(tuple(GroupPieces(group, tuple(grown)) for group, grown in pieces.items()))
        is_sent = link.send(self._seal.pack(message))
        with self._lock:
            if is_sent:
                self._note_sent(link, parts)
            else:
                self._counts["held_messages"] += 1

    def _note_sent(self, link: _Link, parts: list[_Part]) -> None:
        for name, own, start, text in parts:
            self._counts["told_tokens"] += len(text) // TOKEN_BYTES
            own.num_sent = max(own.num_sent, start + len(text))
            if link.unsent.get(name) is own:
                del link.unsent[name]
                if own.num_sent < len(own.tokens):
                    link.unsent[name] = own  # behind the others
        for number in {part.name[0] for part in parts}:
            if (group := self._dormant.get(number)) is not None:
                self._trim(group)

    def _ask(self, at: int, link: _Link) -> None:
        link.waited_ms += 1e3 * self._interval_s
        is_late = link.waited_ms > ANSWER_MS
        if not link.answered and not is_late:
            return
        with self._lock:
            epoch = self._epoch
            if len(self._arrived) > MOST_WAITING:
                return
            mine = [one for one in self._groups.items() if one[0] % len(self._links) == at]
            mine.sort(key=lambda one: one[1].heard_at)
            wants = tuple(Want(number, group.log, group.since) for number, group in mine)
        if wants and link.send(self._seal.pack(Fetch(link.number + 1, wants))):
            with self._lock:
                self._counts["unanswered_fetches"] += not link.answered
            link.number, link.answered, link.waited_ms, link.epoch = link.number + 1, False, 0.0, epoch

    def _hear(self, news: News, link: _Link) -> None:
        if news.number != link.number:  # a late answer: another question has been asked since
            return
        link.answered = True
        with self._lock:
            if link.epoch != self._epoch:
                return
            for one in news.groups:
                group = self._groups.get(one.group)
                if group is not None:
                    self._learn(one, group, link)

    def _learn(self, news: GroupNews, group: _Group, link: _Link) -> None:
        group.heard_at = link.number
        is_lost = news.log != group.log != 0  # the server has another log than the one that was told
        if news.log != group.log:
            group.log = news.log
            for key in group.own:
                self._tell_again(link, news.group, group, key, 0, is_lost)
        group.since = news.until
        for key, known in news.behind:
            if key in group.own:
                self._tell_again(link, news.group, group, key, known, True)
        for piece in news.pieces:
            self._pass_on(news.group, group, piece)

    def _tell_again(
        self, link: _Link, number: int, group: _Group, key: int, known: int, is_lost: bool
    ) -> None:
        """The server has only the first `known` tokens of a response. is_lost: it had been told more."""
        own = group.own[key]
        before, own.num_sent = own.num_sent, min(known * TOKEN_BYTES, len(own.tokens))
        if is_lost:
            self._counts["lost_tokens"] += max(before - own.num_sent, 0) // TOKEN_BYTES
        if own.num_sent < len(own.tokens):
            link.unsent.setdefault((number, key), own)

    def _pass_on(self, number: int, group: _Group, piece: Piece) -> None:
        """Hand over what is new of a foreign response."""
        heard = group.heard.get(piece.key, 0)
        count, odd = divmod(len(piece.tokens), TOKEN_BYTES)
        if odd or not piece.start <= heard < piece.start + count:
            return
        tokens = np.frombuffer(piece.tokens, dtype="<i4")[heard - piece.start :].astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            return
        group.note_heard(piece.key, heard + len(tokens))
        own = group.own.get(piece.key)
        if own is not None and own.is_here:
            return
        self._counts["heard_tokens"] += len(tokens)
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
        self.unsent: dict[tuple[int, int], _Own] = {}
        """Responses with text that the server has not taken, by group and key; what has waited longest first."""
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

    def send(self, frame: bytes) -> bool:
        """Send, unless the server takes no more now."""
        import zmq

        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def next_parts(self) -> list[_Part]:
        """What has waited longest, as much as one message carries."""
        parts, room = [], MAX_TEXT_BYTES
        for name, own in self.unsent.items():
            if room <= 0:
                break
            most = max(room // TOKEN_BYTES, 1) * TOKEN_BYTES
            text = bytes(own.tokens[own.num_sent : own.num_sent + most])
            parts.append(_Part(name, own, own.num_sent, text))
            room -= len(text) + PIECE_BYTES
        return parts

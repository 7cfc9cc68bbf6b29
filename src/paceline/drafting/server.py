"""The draft server: one process that passes on what each worker generates to all workers of the group (Seer 3.3, DGDS).

Owns the log of every group and nothing else: workers build their own suffix trees from it and draft from their own
memory. A group's log is the text of each response and the order in which they grew, 4 bytes for each growth; a client's
place in it is one number. However small the growths were, a fetch gives what is new of a response in one piece.
Invariants: of every response the log holds a prefix, each token once, whatever is sent twice or out of order; all logs
together stay below the memory bound, whole groups go, the least recently used first.

Differs from Seer's server, which keeps the suffix trees: here they live in the workers alone, so the server is a log
and a draft never waits for the network.
"""

from __future__ import annotations

import itertools
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
    News,
    Piece,
    Seal,
    Want,
)
from paceline.errors import ConfigError

GROUP_BYTES = 800
"""What a group costs beyond its responses, about."""

RESPONSE_BYTES = 300
"""What a response costs beyond its tokens and growths, about."""

GROWTH_BYTES = 4
"""What a growth costs beyond its tokens."""

MOST_RESPONSES = 1 << 16
"""Responses of one group that the log takes; more are not passed on."""

_COUNT_BITS = 16
_MOST_GROWN = (1 << _COUNT_BITS) - 1
"""Tokens of one entry in the order of growth; longer growths are several."""

GAP_S = 5.0
"""How long workers are told that something of a response is missing. Who has it tells it again within that time, or is
gone; more that does not connect makes the gap known anew."""

POLL_MS = 200
"""The longest that the server looks at nothing but its socket."""


@dataclass(slots=True)
class _Log:
    """One group's."""

    name: int
    touched_s: float
    num_bytes: int = GROUP_BYTES
    numbers: dict[int, int] = field(default_factory=dict)  # of the responses, by key: 0, 1, ...
    texts: list[bytearray] = field(default_factory=list)  # by number
    order: array[int] = field(default_factory=lambda: array("I"))
    """Response's number << 16 | tokens, of each growth."""
    gaps: dict[int, float] = field(default_factory=dict)
    """When something came of a response, by key, that does not connect to what is known."""

    def known(self, key: int) -> int:
        """Tokens of a response."""
        number = self.numbers.get(key)
        return 0 if number is None else len(self.texts[number]) // TOKEN_BYTES

    def takes(self, key: int) -> bool:
        """Whether there is room for the response."""
        return key in self.numbers or len(self.numbers) < MOST_RESPONSES

    def open_gaps(self, now_s: float) -> tuple[tuple[int, int], ...]:
        """Responses of which something is missing, each with how many tokens are known; forgets old ones."""
        self.gaps = {key: noted_s for key, noted_s in self.gaps.items() if now_s - noted_s <= GAP_S}
        return tuple((key, self.known(key)) for key in self.gaps)

    def grow(self, key: int, fresh: bytes) -> None:
        """A response has grown; there is room for it."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.numbers)
            self.texts.append(bytearray())
            self.num_bytes += RESPONSE_BYTES
        self.texts[number] += fresh
        self.num_bytes += len(fresh)
        num_tokens = len(fresh) // TOKEN_BYTES
        for first in range(0, num_tokens, _MOST_GROWN):
            self.order.append(number << _COUNT_BITS | min(num_tokens - first, _MOST_GROWN))
            self.num_bytes += GROWTH_BYTES

    def read(self, since: int, most_tokens: int) -> tuple[int, tuple[Piece, ...]]:
        """What came after the first `since` growths, one piece per response, and up to which growth it goes.

        Ends before `most_tokens` are exceeded, but not before the first growth.
        """
        later = np.frombuffer(self.order, dtype=np.uint32)[since:]
        owners, counts = later >> _COUNT_BITS, later & _MOST_GROWN
        num_read = max(int(np.searchsorted(np.cumsum(counts, dtype=np.int64), most_tokens, "right")), 1)
        fresh = np.bincount(owners[:num_read], counts[:num_read]).astype(np.int64)
        rest = np.bincount(owners[num_read:], counts[num_read:], len(self.texts)).astype(np.int64)
        keys, pieces = list(self.numbers), []
        for number in np.flatnonzero(fresh).tolist():
            text = self.texts[number]
            end = len(text) - int(rest[number]) * TOKEN_BYTES
            start = end - int(fresh[number]) * TOKEN_BYTES
            pieces.append(Piece(keys[number], start // TOKEN_BYTES, bytes(text[start:end])))
        return since + num_read, tuple(pieces)


class DraftLog:
    """What the server knows. No I/O and no clock: times come in as seconds."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        """max_bytes: bound on all logs. ttl_s: a group that nobody asked for or added to for so long is dropped."""
        if max_bytes < 1 or not ttl_s > 0:
            raise ConfigError(f"a draft server of {max_bytes} bytes and {ttl_s} s: both must be above 0")
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._logs: OrderedDict[int, _Log] = OrderedDict()  # least recently used first
        self._names = itertools.count(
            secrets.randbits(62) + 1
        )  # no two servers give the same, but for chance
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._logs)

    def append(self, group: int, pieces: Iterable[Piece], now_s: float) -> None:
        """Add what is new. Of a piece that begins beyond what is known, only the gap is noted."""
        log = self._touch(group, now_s)
        for piece in pieces:
            if piece.start < 0 or len(piece.tokens) % TOKEN_BYTES or not log.takes(piece.key):
                continue
            known = log.known(piece.key)
            if piece.start > known:
                log.gaps[piece.key] = now_s
                continue
            log.gaps.pop(piece.key, None)
            if fresh := piece.tokens[(known - piece.start) * TOKEN_BYTES :]:
                before = log.num_bytes
                log.grow(piece.key, fresh)
                self.num_bytes += log.num_bytes - before
        self._evict(group)

    def fetch(self, wants: Iterable[Want], now_s: float) -> tuple[GroupNews, ...]:
        """What each log holds beyond `since`, at most MAX_TEXT_BYTES together.

        Groups without news are left out; a log that the worker does not know is news even when it is empty.
        """
        news = []
        room = MAX_TEXT_BYTES
        for want in wants:
            if room <= 0:
                break
            log = self._touch(want.group, now_s)
            since = max(want.since, 0) if want.log == log.name else 0
            pieces: tuple[Piece, ...] = ()
            until = since
            if since < len(log.order):
                until, pieces = log.read(since, room // TOKEN_BYTES)
                room -= sum(len(piece.tokens) + PIECE_BYTES for piece in pieces)
            behind = log.open_gaps(now_s)
            if until > since or want.log != log.name or behind:
                news.append(GroupNews(want.group, log.name, until, pieces, behind))
            self._evict(want.group)  # a group that is only asked for takes room too
        return tuple(news)

    def expire(self, now_s: float) -> None:
        """Drop what nobody used for `ttl_s`."""
        while self._logs:
            group, log = next(iter(self._logs.items()))
            if now_s - log.touched_s <= self._ttl_s:
                return
            self._drop(group)

    def _touch(self, group: int, now_s: float) -> _Log:
        log = self._logs.get(group)
        if log is None:
            log = self._logs[group] = _Log(next(self._names), now_s)
            self.num_bytes += log.num_bytes
        log.touched_s = now_s
        self._logs.move_to_end(group)
        return log

    def _evict(self, newest: int) -> None:
        while self.num_bytes > self._max_bytes and len(self._logs) > 1:
            self._drop(next(iter(self._logs)))
        if self.num_bytes > self._max_bytes:  # one group alone is too large
            self._drop(newest)

    def _drop(self, group: int) -> None:
        self.num_bytes -= self._logs.pop(group).num_bytes


class DraftServer:
    """Serves a `DraftLog` on a ZeroMQ socket. One thread."""

    def __init__(
        self, address: str, *, secret: bytes | None, max_bytes: int = 1 << 30, ttl_s: float = 3600.0
    ) -> None:
        """address: where to listen, `tcp://127.0.0.1:5757` or `ipc://...`; port 0 or `*` takes a free one.

        Raises ConfigError for an address that cannot be bound, or one beyond this machine without a secret.
        """
        import zmq

        if secret is None and not is_local(address):
            raise ConfigError(
                f"a draft server at {address} can be reached from other machines: give it a secret, or listen on "
                "tcp://127.0.0.1:PORT"
            )
        self._seal, self._log = Seal(secret), DraftLog(max_bytes, ttl_s)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"the draft server cannot listen on {address}: {error}; choose another"
            ) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_refused = 0
        """Messages that were damaged or not signed with the secret."""
        self._is_stopping = False

    def serve(self, forever: bool = True) -> None:
        """Answer until `stop`; with `forever` false, until nothing has come for POLL_MS."""
        import zmq

        while not self._is_stopping:
            if self._socket.poll(POLL_MS, zmq.POLLIN):
                self._answer(*self._socket.recv_multipart())
            elif not forever:
                return
            self._log.expire(time.monotonic())

    def stop(self) -> None:
        """End `serve` within POLL_MS. May be called by a signal handler."""
        self._is_stopping = True

    def _answer(self, *frames: Any) -> None:
        sender, frame = frames[0], frames[-1]
        request = self._seal.open_request(bytes(frame)) if len(frames) == 2 else None
        if isinstance(request, Append):
            now_s = time.monotonic()
            for one in request.groups:
                self._log.append(one.group, one.pieces, now_s)
        elif isinstance(request, Fetch):
            groups = self._log.fetch(request.wants, time.monotonic())
            self._socket.send_multipart([sender, self._seal.pack(News(request.number, groups))])
        else:
            self.num_refused += 1

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._context.term()


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in {"localhost", "::1"} or host.startswith("127.")

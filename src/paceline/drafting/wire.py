"""What draft server and clients say to each other: MessagePack messages, typed, bounded, signed where a secret is set.

A message is one ZeroMQ frame, a tag of 16 bytes and the payload. With a secret the tag is keyed BLAKE2b of the payload
and anything else is dropped; without one it is zero. Messages may arrive twice or late: all of them may be repeated.
There is no confidentiality: on a network that others read, put the connection into a tunnel. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from paceline.errors import ConfigError

MAX_MESSAGE_BYTES = 16 << 20
"""Longer messages are refused by the socket."""

MAX_QUEUED = 16
"""Messages that wait on each side of a connection; a sender keeps what goes beyond, an answer that does is dropped."""

MAX_TEXT_BYTES = 4 << 20
"""Pieces of one message that a sender packs; the rest follows in the next."""

PIECE_BYTES = 32
"""What a piece takes of a message beyond its tokens, at most."""

TOKEN_BYTES = 4
_TAG_BYTES = 16


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a response from a position on."""

    key: int
    """Dice key of the response: the same wherever it runs."""
    start: int
    """Index of the first token within the response."""
    tokens: bytes
    """int32, little-endian."""


class GroupPieces(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's responses of one group have grown by."""

    group: int
    pieces: tuple[Piece, ...]


class Append(msgspec.Struct, frozen=True, array_like=True, tag="append"):
    """A worker's responses have grown: all of them in one message. Not answered."""

    groups: tuple[GroupPieces, ...]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """A group, and how much of its log the worker has."""

    group: int
    log: int
    """Which log `since` counts in, 0: none yet. One that was dropped, or lost with its server, becomes another."""
    since: int


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """What is new in these groups? Answered by `News`."""

    number: int
    """Comes back in the answer."""
    wants: tuple[Want, ...]
    """Served in this order, as far as one answer carries."""


class GroupNews(msgspec.Struct, frozen=True, array_like=True):
    """What a group's log holds beyond `since`."""

    group: int
    log: int
    """Another one than before: it lacks what the worker told the last one, and is sent from its beginning."""
    until: int
    """The `since` of the next fetch."""
    pieces: tuple[Piece, ...]
    behind: tuple[tuple[int, int], ...] = ()
    """(key, known tokens) of responses of which a part got lost on the way: their senders go on from there."""


class News(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """The answer to a fetch."""

    number: int
    groups: tuple[GroupNews, ...]


Request: TypeAlias = Append | Fetch
_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def read_secret(file: str | Path | None) -> bytes | None:
    """The secret in a file, without the white space around it; None without a file. Raises ConfigError."""
    if file is None:
        return None
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the draft secret {file}: {error.strerror}; give a readable file") from error


class Seal:
    """Signs and checks messages. secret: shared by both ends, None: no signature."""

    def __init__(self, secret: bytes | None) -> None:
        if secret is not None and not 16 <= len(secret) <= 64:
            raise ConfigError(f"the draft secret has {len(secret)} bytes: use 16 to 64")
        self._secret = secret

    def pack(self, message: Request | News) -> bytes:
        """The frame of a message."""
        return self.close(_encoder.encode(message))

    def close(self, payload: bytes) -> bytes:
        """The frame of a message that is packed already."""
        return self._tag(payload) + payload

    def open(self, frame: bytes) -> bytes | None:
        """The packed message in a frame; None for one that is not signed with the secret."""
        tag, payload = frame[:_TAG_BYTES], frame[_TAG_BYTES:]
        return payload if hmac.compare_digest(tag, self._tag(payload)) else None

    def open_request(self, frame: bytes) -> Request | None:
        """The request in a frame; None for one that is damaged or not signed with the secret."""
        return self._read(frame, _requests)

    def open_news(self, frame: bytes) -> News | None:
        """The answer in a frame; None as above."""
        return self._read(frame, _news)

    def _read(self, frame: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message | None:
        if (payload := self.open(frame)) is None:
            return None
        try:
            return decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # not UTF-8, nested too deep
            return None

    def _tag(self, payload: bytes) -> bytes:
        if self._secret is None:
            return bytes(_TAG_BYTES)
        return blake2b(payload, digest_size=_TAG_BYTES, key=self._secret).digest()

"""What an engine and its draft workers say to each other: MessagePack messages over ZeroMQ, one frame each.

The engine binds two sockets. On the first, a DEALER to the engine's ROUTER, a worker that is lost (it was started anew,
or a message did not reach it) says hello; the engine answers with `Begin`, everything that runs, and tells from then on
what has changed, one numbered `Step` a step. On the second, whose address stands in `Begin`, the worker pushes
`Drafts`: each has all that is drafted ahead, so the last one is all that counts, and the sockets keep no other
(ZMQ_CONFLATE). However many have come, a step takes one. Arrays travel as their bytes, little-endian. Every frame is
sealed as the draft server's are (wire.py): whoever lacks the secret is not heard, and told nothing, unless they read
the network and say a worker's hello to the same engine again.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from operator import add, sub
from typing import TypeAlias

import msgspec
from msgspec.structs import astuple

from paceline.types import Float32Array, Int32Array


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a worker is started with."""

    address: str
    parent: int
    """Process to end with."""
    model: str
    dtype: str
    max_model_len: int
    max_requests: int
    vocab_size: int
    floor: float
    """Nothing is drafted behind a draft that is accepted as a whole with a lower probability."""
    sharpness: float | None
    num_branches: int = 0
    """Corrections that are prepared at any time."""
    interface: str | None = None
    """Network interface, or its address, on which the engine can be reached; None: on this machine alone."""
    secret_file: str | None = None
    """Of the secret that both ends share."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A response runs."""

    response: int
    key: int
    temperature: float
    limit: int
    """Position at which nothing can be drafted any more."""
    most_ahead: int
    """Undecided tokens that may be drafted."""
    tokens: bytes  # int32, prompt and response


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Forget everything: this is all there is."""

    begun: int
    """Comes back in `Drafts`: what does not is from another life."""
    drafts_to: str
    """Where to push them."""
    number: int
    """The count in `Step` starts behind it."""
    opened: tuple[Open, ...]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What a step has changed, in this order."""

    number: int
    ended: bytes  # int64, responses
    responses: bytes  # [num_responses] int64, those that have grown; of unknown ones nothing is to be known
    offsets: bytes  # [num_responses + 1] int32
    tokens: bytes  # int32, of response i: offsets[i] .. offsets[i + 1]
    opened: tuple[Open, ...]
    allowed: bytes  # [num_allowed] int64, responses of which another number of undecided tokens may be drafted from now
    most_ahead: bytes  # [num_allowed] int32
    step_s: float
    """What the verifier's next step is expected to take, waiting not counted; 0: nothing is known of it."""


class DraftCounts(msgspec.Struct, array_like=True):
    """What a worker has done."""

    num_drafted: int = 0
    """Tokens, those of branches too."""
    num_wasted: int = 0
    """Of these, drafted behind a rejected one."""
    num_branches: int = 0
    """Corrections that were prepared."""
    num_hits: int = 0
    """Rejections whose correction was among them: the next draft was there already."""
    num_branch_tokens: int = 0
    """Accepted tokens that were drafted behind a likely correction, before that came."""
    draft_s: float = 0.0
    """Spent drafting for the engine."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """What both have done."""
        return DraftCounts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        """What this one has done and the other not."""
        return DraftCounts(*map(sub, astuple(self), astuple(other)))


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a worker has drafted ahead for an engine."""

    begun: int
    number: int
    """Of the last `Step` that was heard before."""
    trees: bytes
    """One `pack_draft` after another."""
    level_s: float
    """What one more token of all its responses takes, of the last calls; 0: none was drafted yet."""
    num_levels: int
    """Tokens that the last call drafted for each of its responses."""
    mean_acceptance: float
    """Of this worker's tokens, decayed."""
    counts: DraftCounts
    """Since `Begin`."""

    @property
    def call_s(self) -> float:
        """What a drafting call takes that drafts as far as the last; 0: none was made yet."""
        return self.level_s * self.num_levels


ToWorker: TypeAlias = Begin | Step


def hello(address: str) -> bytes:
    """What a lost worker says to the engine at this address: signed, it opens no other engine's door."""
    return blake2b(address.encode(), digest_size=16).digest()


HELLO_BYTES = 64
"""Longer first messages are refused by the socket."""

encode = msgspec.msgpack.Encoder().encode
decode_for_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_for_engine = msgspec.msgpack.Decoder(Drafts).decode

_HEAD = struct.Struct("<qqq")


def pack_draft(
    response: int, start: int, tokens: Int32Array, parents: Int32Array, acceptance: Float32Array
) -> bytes:
    """A tree of tokens behind a response's decided ones; read by csrc/tree_module.cpp.

    start: position of the first token. parents: of each token, its place among them, before its own; -1: it is a first
    one. All three have one length.
    """
    head = _HEAD.pack(response, start, len(tokens))
    return b"".join((head, tokens.tobytes(), parents.tobytes(), acceptance.tobytes()))

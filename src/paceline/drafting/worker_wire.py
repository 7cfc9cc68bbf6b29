"""What an engine and its draft workers say to each other: MessagePack messages over ZeroMQ, one frame each.

The engine binds a ROUTER socket, a worker connects a DEALER. A worker says `Hello`; the engine answers with `Begin` and
an `Open` for every running response, and tells from then on what comes, grows and ends. A worker that is lost (it was
started anew, or a message did not reach it) says `Hello` again. Arrays travel as their bytes, little-endian.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from paceline.types import DraftChains, Float32Array, Int32Array, Int64Array


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


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Forget everything: what follows is all there is."""

    window: int
    """w: up to 2w tokens of a response may be drafted ahead, unless `Allow` says otherwise."""
    number: int
    """The count in `Grow` starts behind it."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """A response runs."""

    response: int
    key: int
    temperature: float
    limit: int
    """Position at which nothing can be drafted any more."""
    tokens: bytes  # int32, prompt and response


class Grow(msgspec.Struct, frozen=True, array_like=True, tag="grow"):
    """What a step has decided."""

    number: int
    responses: bytes  # [num_responses] int64
    starts: bytes  # [num_responses] int64, position of the first token
    counts: bytes  # [num_responses] int32
    tokens: bytes  # [sum of counts] int32


class Allow(msgspec.Struct, frozen=True, array_like=True, tag="allow"):
    """How far may be drafted ahead of responses from now on, where not up to 2w tokens."""

    responses: bytes  # [num_responses] int64
    most_ahead: bytes  # [num_responses] int32, undecided tokens


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """A response has ended."""

    response: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker asks for everything."""


class Drafts(msgspec.Struct, frozen=True, array_like=True, tag="drafts"):
    """Everything that is drafted ahead for some responses, or none: the worker is alive."""

    number: int
    """Of the last `Grow` that was heard before."""
    width: int
    responses: bytes  # [num_responses] int64
    starts: bytes  # [num_responses] int64, position of the first token: the response's next one, as far as was heard
    counts: bytes  # [num_responses] int32
    tokens: bytes  # [num_responses, width] int32
    acceptance: bytes  # [num_responses, width] float32
    call_s: float
    """What drafting the last `num_levels` of them took."""
    num_levels: int
    mean_acceptance: float
    """Of this worker's tokens, decayed."""
    num_drafted: int
    """Tokens since the worker started."""
    num_wasted: int
    """Of these, drafted behind a rejected one."""

    def responses_array(self) -> Int64Array:
        """[num_responses]"""
        return np.frombuffer(self.responses, np.int64)

    def starts_array(self) -> Int64Array:
        """[num_responses]"""
        return np.frombuffer(self.starts, np.int64)

    def chains(self) -> DraftChains:
        """The drafts, a row for each response."""
        shape = len(self.responses) // 8, self.width
        tokens: Int32Array = np.frombuffer(self.tokens, np.int32).reshape(shape)
        acceptance: Float32Array = np.frombuffer(self.acceptance, np.float32).reshape(shape)
        return DraftChains(tokens, np.frombuffer(self.counts, np.int32), acceptance)


ToWorker: TypeAlias = Begin | Open | Grow | Allow | Close
ToEngine: TypeAlias = Hello | Drafts

encode = msgspec.msgpack.Encoder().encode
decode_for_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode

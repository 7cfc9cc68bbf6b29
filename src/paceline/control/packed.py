"""Tokens with their log-probabilities as bytes: eight for each, as the driver holds them, sends them and writes them.

Token ids are int32 and log-probabilities float32, as the engine computes them, both in the machine's byte order:
nothing is rounded on the way.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Self

import msgspec

TOKEN_BYTES = array("i").itemsize
"""As many as a log-probability has."""
assert TOKEN_BYTES == array("f").itemsize == 4, "int32 and float32"

Buffer = bytes | memoryview


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some tokens of a response, one after another."""

    tokens: bytes = b""  # [num_tokens] int32
    logprobs: bytes = b""  # [num_tokens] float32

    @classmethod
    def of(cls, tokens: Iterable[int], logprobs: Iterable[float]) -> Self:
        """Pack. A log-probability that is no float32 is rounded to one."""
        return cls(array("i", tokens).tobytes(), array("f", logprobs).tobytes())

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def cut(self, begin: int, end: int) -> Packed:
        """Tokens `begin` to `end`."""
        place = slice(begin * TOKEN_BYTES, end * TOKEN_BYTES)
        return Packed(self.tokens[place], self.logprobs[place])

    def unpack(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens and log-probabilities, each as a tuple."""
        return tuple(array("i", self.tokens)), tuple(array("f", self.logprobs))


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Checksums of packed tokens and of their log-probabilities. Begin with none and go on piece by piece."""

    tokens: int = 0
    logprobs: int = 0

    def add(self, tokens: Buffer, logprobs: Buffer) -> Digest:
        """The checksums with further tokens."""
        return Digest(zlib.crc32(tokens, self.tokens), zlib.crc32(logprobs, self.logprobs))

"""An entry of the KV pool as a file: a header that says what it is, then the blocks.

    magic, response, layout, policy version, sizes
    tokens                [num_tokens] int32    whose keys and values these are; the last block may be partly filled
    checksums of blocks   [num_blocks] uint32
    zeros up to a multiple of 64 bytes, the last four: the header's checksum
    blocks                [num_blocks][block_bytes]

Invariant: every byte is covered by a checksum, by the file's length or by a comparison, so a file that was cut, mixed
up or changed in any bit is told from a whole one. The checksums are CRC-32: they find damage, not malice. Pure
functions of bytes; pool.py owns the files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from paceline.types import Int32Array

MAGIC = b"PLKV\x01\r\n\x00"
_FIXED = struct.Struct("<8s16s16sQQIII")
_CHECKSUM = struct.Struct("<I")
_ALIGNMENT = 64

UInt32Array = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Address:
    """What an entry is asked for by. It must be equal in all of it."""

    response: str
    """`response_identity` of the response."""
    policy_version: int
    """Version of the weights that computed the keys and values."""
    layout: bytes
    """16 bytes that name the model and what its blocks look like inside."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says of itself."""

    address: Address
    tokens: Int32Array  # [num_tokens]
    checksums: UInt32Array  # [num_blocks]
    block_tokens: int
    block_bytes: int
    num_bytes: int
    """Length of the header; the blocks begin there."""

    def start_of(self, block: int) -> int:
        """Where a block begins in the file."""
        return self.num_bytes + block * self.block_bytes


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks of an entry that were checked and stay readable, whatever becomes of the entry."""

    num_tokens: int
    """Tokens from the response's first prompt token on whose keys and values the entry has."""
    first_block: int
    """Number of the first of `blocks` within the response."""
    blocks: tuple[memoryview, ...]  # [num_blocks - first_block][block_bytes]

    def beyond(self, skip_tokens: int, block_tokens: int) -> Held | None:
        """The same for who has more tokens by now, whole blocks; None when nothing is left."""
        if self.num_tokens <= skip_tokens:
            return None
        first = skip_tokens // block_tokens
        return Held(self.num_tokens, first, self.blocks[first - self.first_block :])


def response_identity(key: int, prompt: Sequence[int]) -> str:
    """The name of a response in the pool, from its dice key and its prompt without generated tokens."""
    digest = blake2b((key & (1 << 64) - 1).to_bytes(8, "little"), digest_size=16)
    digest.update(np.asarray(prompt, dtype=np.int32).tobytes())
    return digest.hexdigest()


def count_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that so many tokens fill, the last perhaps in part."""
    return -(-num_tokens // block_tokens)


def measure_header(num_tokens: int, num_blocks: int) -> int:
    """Length of the header, bytes."""
    filled = _FIXED.size + 4 * (num_tokens + num_blocks) + _CHECKSUM.size
    return -(-filled // _ALIGNMENT) * _ALIGNMENT


def write_header(
    address: Address, tokens: Int32Array, checksums: Sequence[int], block_tokens: int, block_bytes: int
) -> bytes:
    """The header of an entry whose blocks have these checksums."""
    fixed = _FIXED.pack(
        MAGIC,
        bytes.fromhex(address.response),
        address.layout,
        address.policy_version,
        block_bytes,
        len(tokens),
        block_tokens,
        len(checksums),
    )
    filled = fixed + tokens.astype("<i4").tobytes() + np.asarray(checksums, dtype="<u4").tobytes()
    padded = filled.ljust(measure_header(len(tokens), len(checksums)) - _CHECKSUM.size, b"\0")
    return padded + _CHECKSUM.pack(zlib.crc32(padded))


def read_header(read: Callable[[int, int], memoryview], file_bytes: int) -> Header | None:
    """The header of a file; None if it is damaged or the file is not as long as it says.

    Args:
        read: gives the file's bytes from a start to an end, or those of them that there are.
    """
    fixed = read(0, _FIXED.size)
    if len(fixed) < _FIXED.size:
        return None
    magic, response, layout, version, block_bytes, num_tokens, block_tokens, num_blocks = _FIXED.unpack(fixed)
    size = measure_header(num_tokens, num_blocks)
    end = size - _CHECKSUM.size
    if magic != MAGIC or file_bytes != size + num_blocks * block_bytes:
        return None
    data = read(0, size)
    if len(data) < size or zlib.crc32(data[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        return None
    lists = _FIXED.size
    return Header(
        address=Address(response.hex(), version, layout),
        tokens=np.frombuffer(data, "<i4", num_tokens, lists).astype(np.int32),
        checksums=np.frombuffer(data, "<u4", num_blocks, lists + 4 * num_tokens).astype(np.uint32),
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        num_bytes=size,
    )


def check_blocks(header: Header, data: memoryview, first: int, end: int) -> tuple[memoryview, ...] | None:
    """Blocks first to end - 1, which `data` consists of; None if one of them is damaged."""
    size = header.block_bytes
    blocks = tuple(data[index * size : (index + 1) * size] for index in range(end - first))
    wanted = header.checksums[first:end].tolist()
    return blocks if all(map(_has_checksum, blocks, wanted)) else None


def _has_checksum(block: memoryview, wanted: int) -> bool:
    return zlib.crc32(block) == wanted


def count_shared(one: Int32Array, other: Int32Array) -> int:
    """Leading tokens in which two sequences agree."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length

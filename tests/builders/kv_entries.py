"""Entries for tests of the KV pool: the content follows from response, version and number of tokens, so that whoever
loads one can say what it must be.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paceline.kvpool import Address, Held, KvPool, response_identity
from paceline.types import Int32Array

BLOCK_TOKENS, BLOCK_BYTES, PIECES = 4, 48, 3
LAYOUT = b"layout of tests."


def address(number: int, version: int = 0) -> Address:
    return Address(response_identity(number, [1, 2, number]), version, LAYOUT)


def tokens(number: int, count: int) -> Int32Array:
    return np.random.default_rng(number).integers(0, 1000, count).astype(np.int32)


def block(number: int, version: int, count: int, index: int) -> bytes:
    """A partly filled block differs with the number of tokens, whole ones do not."""
    filled = min(count, (index + 1) * BLOCK_TOKENS)
    seed = zlib.crc32(f"{number} {version} {index} {filled}".encode())
    return np.random.default_rng(seed).bytes(BLOCK_BYTES)


def reader(number: int, version: int, count: int) -> Callable[[int], list[memoryview]]:
    def read(index: int) -> list[memoryview]:
        data, step = memoryview(block(number, version, count, index)), BLOCK_BYTES // PIECES
        return [data[start : start + step] for start in range(0, BLOCK_BYTES, step)]

    return read


def save(pool: KvPool, number: int, count: int, version: int = 0) -> bool:
    return pool.save(
        address(number, version),
        tokens(number, count),
        BLOCK_TOKENS,
        BLOCK_BYTES,
        reader(number, version, count),
    )


def load(pool: KvPool, number: int, count: int = 40, version: int = 0, skip: int = 0) -> Held | None:
    return pool.load(address(number, version), tokens(number, count), skip)


def is_right(held: Held, number: int, version: int, count: int) -> bool:
    """Whether an entry of `count` tokens gave these blocks."""
    wanted = [block(number, version, count, held.first_block + index) for index in range(len(held.blocks))]
    return [bytes(found) for found in held.blocks] == wanted


def entry_file(directory: Path, number: int) -> Path:
    return directory / f"{address(number).response}.kv"


def used_bytes(directory: Path) -> int:
    """Of entries and of files that are being written."""
    used = 0
    for file in (*directory.glob("*.kv"), *directory.glob("*.part")):
        with contextlib.suppress(FileNotFoundError):  # a part that was discarded meanwhile
            used += file.stat().st_size
    return used

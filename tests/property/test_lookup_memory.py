"""Whatever is opened, appended and closed: the n-gram lookup stays within its memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.lookup import LookupDrafter

NODE_BYTES = 16
"""What an ordered table's entry takes beside what it is asked for, rounded up by the allocator."""

groups, responses = st.integers(0, 4), st.integers(0, 3)
lengths = st.sampled_from([0, 1, 7, 60, 400, 3000])
operations = st.one_of(
    st.tuples(st.just("open_group"), groups, lengths),
    st.tuples(st.just("append"), groups, responses, lengths),
    st.tuples(st.just("resync"), groups, responses, lengths),
    st.tuples(st.just("close_response"), groups, responses),
    st.tuples(st.just("drop_group"), groups),
)


def parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        yield from thing
        yield from thing.values()
    elif isinstance(thing, list | tuple):
        yield from thing
    elif is_dataclass(thing):
        yield from (getattr(thing, field.name) for field in fields(thing))


def deep_bytes(thing: Any, seen: set[int]) -> int:
    """Bytes of a thing and all that it alone holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    links = NODE_BYTES * len(thing) if isinstance(thing, dict) else 0
    return sys.getsizeof(thing) + links + sum(deep_bytes(part, seen) for part in parts(thing))


def num_bytes(drafter: LookupDrafter) -> int:
    seen: set[int] = set()
    return sum(deep_bytes(value, seen) for value in vars(drafter).values())


@given(st.lists(operations, max_size=40), st.sampled_from([8_000, 30_000, 200_000]), st.integers(2, 5000))
@settings(max_examples=60, deadline=None)
def test_memory_is_bounded(operations: list[tuple[Any, ...]], memory_bytes: int, vocab: int) -> None:
    drafter = LookupDrafter(memory_bytes=memory_bytes)
    random = np.random.default_rng(0)
    for name, *args in operations:
        if name in ("open_group", "append", "resync"):
            args[-1] = random.integers(0, vocab, args[-1])
        getattr(drafter, name)(*args)
        assert num_bytes(drafter) <= memory_bytes


def test_a_steady_state_is_bounded() -> None:
    """Tables of entries that come and go are the largest just before they are made anew."""
    memory_bytes = 400_000
    drafter, random = LookupDrafter(memory_bytes=memory_bytes), np.random.default_rng(0)
    largest = 0
    for step in range(3000):
        drafter.append(0, step // 100, random.integers(0, 5000, 10))
        if step >= 300 and step % 100 == 0:
            drafter.close_response(0, step // 100 - 3)
        largest = max(largest, num_bytes(drafter)) if step % 7 == 0 else largest
    assert memory_bytes / 3 < largest <= memory_bytes


def test_what_is_closed_takes_nothing() -> None:
    drafter = LookupDrafter()
    sizes = []
    for first in range(0, 60, 3):
        for response in range(first, first + 3):
            drafter.open_group(response % 2, [5, 6, 7, 8])
            drafter.append(response % 2, response, [5, 6, 7, 8, 5, 6])
        for response in range(first, first + 3):
            drafter.close_response(response % 2, response)
        sizes.append(num_bytes(drafter))
    assert max(sizes[10:]) <= max(sizes[:10])

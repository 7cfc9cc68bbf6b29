"""Garbage collection, which looks at all objects of a process again and again while large packages are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile, unless asked to: of the time of importing vLLM a quarter goes there, and comes back
    with each process of a fleet. For imports alone: who is forked meanwhile stays so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

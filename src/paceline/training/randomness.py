"""The random generators that a trainer draws from, kept apart from everything else in the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def read_randomness() -> Any:
    """State of Python's, NumPy's and torch's generators, on the CPU and the GPUs."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus  # noqa: NPY002


def write_randomness(state: Any) -> None:
    """Set the generators back to a state of `read_randomness`."""
    python, numpy, cpu, gpus = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - the trainer's own generator
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Leave the generators as they are found, whatever is drawn inside."""
    state = read_randomness()
    try:
        yield
    finally:
        write_randomness(state)

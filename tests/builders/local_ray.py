"""Ray for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.fleet.cluster import import_ray


@contextmanager
def local_ray() -> Iterator[Any]:
    """Ray on this machine, with more CPUs than there are: the only one of this process while it is open."""
    ray = import_ray()
    ray.init(
        address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        yield ray
    finally:
        ray.shutdown()

"""The fleet's own KV pool: where chunks of a response leave keys and values for the next worker (docs/kv-pool.md).

Owned by `Fleet` on one machine; the engines open the same directory. Nothing here changes a token: without the pool, or
without room in it, the next worker prefills.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from paceline.config import EngineSettings, FleetSettings, KvPoolSettings
from paceline.kvpool import KvPool, response_identity
from paceline.types import RolloutRequest

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "paceline-kv-"
LEAST_BYTES = 64 << 20
"""A pool smaller than this holds hardly a response, and is left out."""
LEFT_S = 60.0
"""A folder younger than this may be one that its fleet is about to open."""


class FleetKvPool:
    """A directory in shared memory, and the driver's handle on it. Close it."""

    def __init__(self, base: Path, num_bytes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self.settings = KvPoolSettings(
            directory=str(self._folder),
            memory_bytes=num_bytes,
            namespace=self._folder.name,
            required=False,
        )
        self._pool = KvPool.open(self.settings)

    def drop(self, request: RolloutRequest) -> None:
        """The response has ended: nobody will go on with it."""
        assert request.key is not None
        self._pool.drop(response_identity(request.key, request.prompt))

    def clear(self) -> None:
        """The rollout is over."""
        self._pool.clear()

    def close(self) -> None:
        """Leave nothing behind."""
        self._pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def open_pool(settings: FleetSettings, engine: EngineSettings, is_one_machine: bool) -> FleetKvPool | None:
    """The pool that the fleet wants; None: it wants none, the engines have one, or memory has no room for one."""
    wanted = settings.workers > 1 and settings.variant != "group"
    if not wanted or not is_one_machine or engine.kv_pool is not None:
        return None
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_leftovers(base)
    num_bytes = min(int(settings.kv_pool_gib * (1 << 30)), shutil.disk_usage(base).free // 2)
    return FleetKvPool(base, num_bytes) if num_bytes >= LEAST_BYTES else None


def remove_leftovers(base: Path) -> None:
    """Remove pools whose fleet was killed: nobody holds the lock that every user of a pool holds."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < LEFT_S:
                continue
            with (folder / "users").open("rb") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, another user's, or gone meanwhile
            continue

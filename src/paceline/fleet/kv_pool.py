"""The fleet's KV pool: where chunks of a response leave keys and values for the next worker (docs/kv-pool.md).

Owned by `Fleet` on one machine; the engines open the same directories. Nothing here changes a token: without the pool,
or without room in it, the next worker prefills.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Self

from paceline.config import EngineSettings, FleetSettings, KvPoolSettings
from paceline.fleet.prefetch import Prefetcher, Queue
from paceline.kvpool import KvPool, response_identity
from paceline.owned_folder import OwnedFolder, remove_leftovers
from paceline.types import KvPoolCounters, RolloutRequest

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "paceline-fleet-"
LEAST_BYTES = 64 << 20
"""A pool smaller than this holds hardly a response, and is left out."""


class FleetKvPool:
    """The driver's handle on the pool. Close it."""

    def __init__(self, settings: KvPoolSettings, own_folder: OwnedFolder | None = None) -> None:
        """own_folder: was made for this fleet alone, and goes with it. Raises ConfigError as `KvPool.open` does."""
        self.settings = settings
        self._own_folder = own_folder
        self._pool = KvPool.open(settings)
        self._prefetcher = Prefetcher(settings) if settings.disk_directory is not None else None

    @classmethod
    def make(cls, base: Path, num_bytes: int) -> Self:
        """A pool in a new folder below `base`, in shared memory alone."""
        folder = OwnedFolder(base, PREFIX)
        settings = KvPoolSettings(
            directory=str(folder.path), memory_bytes=num_bytes, namespace=folder.path.name, required=False
        )
        return cls(settings, folder)

    @classmethod
    def join(cls, settings: KvPoolSettings) -> Self:
        """A pool that the user has named. What an earlier fleet may have left there never matches: it counted its
        policy versions for itself.
        """
        namespace = f"{settings.namespace or ''}/{secrets.token_hex(8)}"
        return cls(settings.model_copy(update={"namespace": namespace}))

    def look_ahead(self, queue: Queue) -> None:
        """Bring entries that will be needed next from disk to memory, in the background. Returns at once."""
        if self._prefetcher is not None:
            self._prefetcher.look_ahead(queue)

    def drop(self, request: RolloutRequest) -> None:
        """The response has ended: nobody will go on with it."""
        assert request.key is not None
        self._pool.drop(response_identity(request.key, request.prompt))

    def clear(self) -> None:
        """The rollout is over."""
        self._pool.clear()

    def counters(self) -> KvPoolCounters:
        """What this process has done with the pool."""
        own = self._pool.counters()
        return own if self._prefetcher is None else own + self._prefetcher.counters()

    def close(self) -> None:
        """Leave nothing behind."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._pool.close()
        if self._own_folder is not None:
            self._own_folder.close()


def open_pool(settings: FleetSettings, engine: EngineSettings, is_one_machine: bool) -> FleetKvPool | None:
    """The pool of the fleet's workers: the one that the engines' settings name, or one of the fleet's own.

    What killed fleets have left on this machine is removed whether this one gets a pool or not; engines that outlive
    their driver for a moment save nothing more.

    None: it wants none, memory has no room for one, or another program keeps it. Raises ConfigError for directories of
    no use.
    """
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_leftovers(base, PREFIX)
    named = engine.kv_pool
    if not is_one_machine or (named is not None and named.backend != "paceline"):
        return None
    if named is not None:
        return FleetKvPool.join(named)
    if settings.workers < 2 or settings.variant in {"sticky", "group"}:
        return None
    num_bytes = min(int(settings.kv_pool_gib * (1 << 30)), shutil.disk_usage(base).free // 2)
    return FleetKvPool.make(base, num_bytes) if num_bytes >= LEAST_BYTES else None

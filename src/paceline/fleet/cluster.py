"""Ray: found, checked and started, or joined by address. What the rest of the fleet asks of a machine or cluster.

Importing this imports no Ray, so that a fleet that cannot be is refused at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from paceline.config import FleetSettings
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError, InstallError

LOGGER = logging.getLogger(__name__)

WORKERS_PER_CORE = 2
"""More engines than this on each core of one machine only wait for each other."""

SPARE_CPUS = 2
"""CPUs that a Ray started here has beyond those of the workers."""

CONNECT_S = 5.0

_num_fleets = 0  # of this process, that use the Ray which `connect` has started or joined
_is_local = False  # whether it has started it

RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
}
"""Ray's workers are as important as the driver: at Ray's own niceness of 15 whatever else runs on their cores gets 28
times their share. The rest keeps Ray from printing into the driver's output; the fleet shows lost workers itself.
"""

ENGINE_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What an engine in an actor needs; engine/rollout_engine.py says why. The driver's own values go first."""

HANDED_ON = ("HF_HUB_OFFLINE", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_BATCH_INVARIANT")
"""Variables of the driver that every worker gets too, wherever it runs."""


def check_fleet(settings: FleetSettings, cores: int) -> None:
    """Raise InstallError without Ray, ConfigError for more workers than this machine's cores can serve.

    cores: of this machine; on a cluster that is joined by address, Ray is asked instead once it is connected.
    """
    import_ray()
    if settings.address is not None:
        _check_reachable(settings.address)
    elif is_cpu_build() and settings.workers > WORKERS_PER_CORE * cores:
        raise ConfigError(
            f"{settings.workers} workers on {cores} cores: at most {WORKERS_PER_CORE * cores} here; lower --workers, "
            "or join a Ray cluster by its address"
        )


def import_ray() -> Any:
    """The module ray. Raises InstallError when it is missing."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise InstallError(f"a fleet needs Ray ({error}): pip install 'paceline[fleet]'") from error
    return ray


def connect(settings: FleetSettings, vllm: Any) -> bool:
    """Join the cluster at `settings.address`, or start Ray on this machine; one that is connected already is used.

    vllm: arguments of vLLM's EngineArgs. Returns whether Ray was connected here, if only for an earlier fleet: then
    `disconnect` ends it after the last of them. Raises ConfigError for an address without Ray behind it, a cluster that
    is too small, or one that was started here and has too little left for another fleet.
    """
    global _is_local, _num_fleets
    ray = import_ray()
    gpus = _gpus(settings, vllm)
    if ray.is_initialized():
        is_ours = _num_fleets > 0
        has, free = ray.cluster_resources(), ray.available_resources()
        until_s = time.monotonic() + CONNECT_S  # what a fleet that was just closed had becomes free by and by
        while is_ours and not _has_room(settings, gpus, free) and time.monotonic() < until_s:
            time.sleep(0.1)
            free = ray.available_resources()
        _check_size(settings, gpus, has, free, is_own=is_ours and _is_local)
        _num_fleets += is_ours
        return is_ours
    options: dict[str, Any] = {"address": settings.address}
    if settings.address is None:
        needed = settings.workers * settings.cpus_per_worker
        options = {"address": "local", "num_cpus": int(-(-needed // 1)) + SPARE_CPUS}
    else:
        _check_reachable(settings.address)
    try:
        with _own_sigterm():
            ray.init(**options, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if settings.address is None else f"at {settings.address}"
        raise ConfigError(f"no Ray {where}: {' '.join(str(error).split())[:300]}") from error
    try:
        _check_size(settings, gpus, ray.cluster_resources(), ray.available_resources())
    except ConfigError:
        ray.shutdown()
        raise
    _num_fleets, _is_local = 1, settings.address is None
    return True


def disconnect() -> None:
    """A fleet for which `connect` gave True is over: after the last one Ray is shut down."""
    global _num_fleets
    _num_fleets = max(_num_fleets - 1, 0)
    if not _num_fleets:
        import_ray().shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray puts in its own, which exits while it starts, and aborts afterwards.

    Processes of a Ray that was about to start are killed, as some would outlive it. Those that have started outlive a
    terminal: the driver stops them once what it has is kept.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN) if is_main else None  # Ray's processes take it over
    others = set(psutil.Process().children(recursive=True))
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        for process in psutil.Process().children(recursive=True):
            if process not in others:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        raise KeyboardInterrupt from ended
    finally:
        if is_main and hangup is not None:
            signal.signal(signal.SIGHUP, hangup)
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def is_one_machine(settings: FleetSettings) -> bool:
    """Whether all workers will be on this machine: the Ray that is connected has no other node."""
    nodes = import_ray().nodes()
    return settings.address is None and sum(bool(node["Alive"]) for node in nodes) == 1


def actor_options(settings: FleetSettings, vllm: Any) -> dict[str, Any]:
    """Ray's options for the actor of an engine. vllm: arguments of vLLM's EngineArgs."""
    gpus = _gpus(settings, vllm)
    environment = {name: os.environ.get(name, value) for name, value in ENGINE_ENVIRONMENT.items()}
    environment["OMP_NUM_THREADS"] = str(max(int(settings.cpus_per_worker), 1))
    environment |= {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    return {
        "num_cpus": settings.cpus_per_worker,
        "num_gpus": gpus,
        "resources": settings.resources_per_worker,
        "max_restarts": 0,
        "concurrency_groups": {"reports": 1},
        "runtime_env": {"env_vars": environment},
    }


def _gpus(settings: FleetSettings, vllm: Any) -> float:
    if settings.gpus_per_worker is not None:
        return settings.gpus_per_worker
    return 0.0 if is_cpu_build() else float(vllm.get("tensor_parallel_size", 1))


def _check_reachable(address: str) -> None:
    """Raise ConfigError for a HOST:PORT where nobody listens; Ray itself would take a minute to say so."""
    if address in {"auto", "local"} or "://" in address:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(
            f"Ray address {address!r}: write it as HOST:PORT, or 'auto' for the cluster of this node"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return
    except OSError as error:
        raise ConfigError(
            f"no Ray at {address}: {error.strerror or error}; start it with 'ray start --head', or leave the address "
            "away to use this machine"
        ) from error


def _needs(settings: FleetSettings, gpus: float) -> dict[str, float]:
    """Of all workers."""
    each = {"CPU": settings.cpus_per_worker, "GPU": gpus, **settings.resources_per_worker}
    return {name: settings.workers * amount for name, amount in each.items()}


def _has_room(settings: FleetSettings, gpus: float, free: dict[str, float]) -> bool:
    return all(amount <= free.get(name, 0.0) for name, amount in _needs(settings, gpus).items())


def _check_size(
    settings: FleetSettings,
    gpus: float,
    has: dict[str, float],
    free: dict[str, float],
    *,
    is_own: bool = False,
) -> None:
    """Raise ConfigError for a cluster that is too small; one that others use may have room later.

    gpus: of each worker. has, free: the cluster's resources, and those that nobody uses. is_own: those who use it are
    fleets of this process, for which alone it was made.
    """
    for name, amount in _needs(settings, gpus).items():
        if amount > has.get(name, 0.0):
            raise ConfigError(
                f"{settings.workers} workers need {amount:g} {name}, the Ray cluster has "
                f"{has.get(name, 0.0):g}: lower the number of workers or what each needs, or add nodes"
            )
        if amount <= free.get(name, 0.0):
            continue
        if is_own:
            raise ConfigError(
                f"{settings.workers} workers need {amount:g} {name}, another fleet here has "
                f"left {free.get(name, 0.0):g}: close that one first, or start Ray yourself with room for both"
            )
        LOGGER.warning(
            "%d workers need %g %s, of which the Ray cluster has %g free: the others start once there is room "
            "(ray status tells who uses it)",
            settings.workers, amount, name, free.get(name, 0.0),
        )  # fmt: skip

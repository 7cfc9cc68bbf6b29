"""Which KV connector of vLLM's an engine gets for its `kv_pool` settings: ours, or one for clusters.

Called where engine arguments are made, and by RolloutEngine for what other connectors need of every request.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from paceline.config import KvPoolSettings
from paceline.errors import ConfigError, InstallError

CONNECTOR = "PoolConnector"
CONNECTOR_MODULE = "paceline.engine.kv.connector"

LMCACHE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
LMCACHE_SWITCH = "LMCACHE_USE_UPSTREAM_MP"
"""Read once, when the module is imported."""

_PACKAGES = {
    "LMCacheMPConnector": ("lmcache", "lmcache"),
    "MooncakeStoreConnector": ("mooncake", "mooncake-transfer-engine"),
}
"""Module that a connector needs, and the package to install for it."""


def transfer_config(pool: KvPoolSettings) -> Any:
    """vLLM's KVTransferConfig for the engine.

    Raises InstallError when the backend's package is missing, ConfigError for fields that vLLM does not know or a
    connector that is not vLLM's own.
    """
    if pool.backend == "paceline":
        fields = {"kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE}
    else:
        _require(pool.backend)
        if pool.backend == "LMCacheMPConnector":
            _choose_vllm_lmcache()
        fields = {**pool.kv_transfer_config, "kv_connector": pool.backend}
    from vllm.config.kv_transfer import KVTransferConfig

    try:
        return KVTransferConfig(**{"kv_role": "kv_both", **fields})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"kv_pool.kv_transfer_config={pool.kv_transfer_config!r}: {error}") from error


def _require(backend: str) -> None:
    module, package = _PACKAGES[backend]
    if find_spec(module) is None:
        raise InstallError(
            f"kv_pool.backend={backend!r} needs the package {package}, which is not installed: pip install {package}, "
            "or set backend='paceline' for the workers of one machine"
        )


def _choose_vllm_lmcache() -> None:
    """Have vLLM take its own connector to LMCache, for which the salt is known to hold; lmcache may bring another.

    Goes by the environment, which the engine's other processes inherit. Raises ConfigError where it is too late.
    """
    if not os.environ.get(LMCACHE_SWITCH):
        os.environ[LMCACHE_SWITCH] = "1"
    module = sys.modules.get(LMCACHE_MODULE)
    if module is not None and module.LMCacheMPConnector is not module.LMCacheMPConnectorUpstream:
        raise ConfigError(
            "kv_pool.backend='LMCacheMPConnector': this process has loaded the connector of the lmcache package, of "
            f"which it is not known that it tells policy versions apart: set {LMCACHE_SWITCH}=1 before vLLM loads it"
        )


def cache_salt(pool: KvPoolSettings | None, policy_version: int) -> str | None:
    """What other backends tell runs and policy versions apart by, per request; None where nothing is needed."""
    if pool is None or pool.backend == "paceline":
        return None
    return f"paceline:{pool.namespace}:{policy_version}"

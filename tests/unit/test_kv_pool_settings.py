"""Settings of the KV pool: refused where they cannot work, and handed on to the backend that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import EngineSettings, KvPoolSettings
from paceline.engine.keys import check_options, policy_version_of
from paceline.engine.kv import backend
from paceline.errors import ConfigError, InstallError, RequestError
from paceline.kvpool import KvPool

OTHER = {"backend": "LMCacheMPConnector", "namespace": "run"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a directory"),
        ({"directory": "/x", "disk_directory": "/y"}, "belong together"),
        ({"directory": "/x", "disk_bytes": 5}, "belong together"),
        ({"directory": "/x", "memory_bytes": 5}, "memory_bytes"),
        ({"directory": "/x", "disk_directory": "/y/../x/", "disk_bytes": 5}, "lie apart"),
        ({"directory": "/x", "disk_directory": "/x/disk", "disk_bytes": 5}, "lie apart"),
        ({"directory": "/x/y", "disk_directory": "/x", "disk_bytes": 5}, "lie apart"),
        ({"directory": "/x", "kv_transfer_config": {"kv_port": 1}}, "for other backends"),
        ({"directory": "/x", "backend": "LMCacheConnectorV1"}, "LMCacheMPConnector"),
        ({"backend": "LMCacheMPConnector"}, "needs a namespace"),
        ({**OTHER, "directory": "/x"}, "are for backend='paceline'"),
        ({**OTHER, "kv_transfer_config": {"kv_connector": "Nixl"}}, "kv_connector='Nixl'"),
        ({"directory": "/x", "dir": 1}, "dir"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KvPoolSettings.model_validate(fields)


def test_settings_survive_the_way_to_the_engine() -> None:
    settings = EngineSettings(kv_pool=KvPoolSettings(directory="/x", disk_directory="/y", disk_bytes=7))
    assert EngineSettings.model_validate(settings.model_dump()) == settings
    other = EngineSettings.model_validate({"kv_pool": {**OTHER, "kv_transfer_config": {"kv_port": 3}}})
    assert EngineSettings.model_validate(other.model_dump()) == other


@pytest.mark.parametrize("name", ["LMCacheMPConnector", "MooncakeStoreConnector"])
def test_a_backend_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    settings = KvPoolSettings.model_validate({"backend": name, "namespace": "run"})
    with pytest.raises(InstallError, match=f"{name}.*pip install"):
        backend.transfer_config(settings)


def test_other_backends_tell_runs_and_versions_apart_by_salt() -> None:
    other = KvPoolSettings.model_validate(OTHER)
    salts = {backend.cache_salt(other, 1), backend.cache_salt(other, 2)}
    salts.add(backend.cache_salt(KvPoolSettings.model_validate({**OTHER, "namespace": "b"}), 1))
    assert len(salts) == 3
    assert backend.cache_salt(KvPoolSettings(directory="/x"), 1) is None
    assert backend.cache_salt(None, 1) is None


def test_only_the_own_backend_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LMCacheMPConnector"):
        KvPool.open(KvPoolSettings.model_validate(OTHER))
    KvPool.open(KvPoolSettings(directory=str(tmp_path / "pool"))).close()


class Params:
    n, seed = 1, None

    def __init__(self, **extra: object) -> None:
        self.extra_args = extra


def test_requests_take_part_by_naming_a_policy_version() -> None:
    assert policy_version_of(Params(paceline_policy_version=0)) == 0
    assert policy_version_of(Params(paceline_key=3)) is None
    check_options(Params(paceline_policy_version=4, paceline_keep_kv=0))
    for wrong in (-1, "1", 1 << 63):
        with pytest.raises(RequestError, match="paceline_policy_version"):
            check_options(Params(paceline_policy_version=wrong))

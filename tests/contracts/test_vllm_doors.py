"""Each private name of vLLM that the engine uses still exists, and the list of them is complete."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import paceline.engine
from paceline.engine.doors import DOORS, Door, check_doors

pytest.importorskip("vllm", reason="vLLM is not installed")

ENGINE = Path(paceline.engine.__file__).parent
SOURCES = sorted(ENGINE.rglob("*.py"))
NAMES = {door.target for door in DOORS}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.target)
def test_door_fits(door: Door) -> None:
    [found] = check_doors((door,))
    assert found.ok, found.problem


@pytest.mark.parametrize(
    ("door", "problem"),
    [
        (Door("vllm.no_such_module:Thing"), "module vllm.no_such_module cannot be imported"),
        (Door("vllm.v1.request:Answer"), "vllm.v1.request has no Answer"),
        (Door("vllm.v1.request:Request", members=("colour",)), "Request has no colour"),
        (Door("vllm.engine.arg_utils:EngineArgs.create_engine_config", parameters=("colour",)), "no parameter colour"),
        (Door("vllm.envs", mentions=("VLLM_COLOUR_OF_THE_ENGINE",)), "vllm.envs no longer knows"),
    ],
)  # fmt: skip
def test_a_door_that_moved_is_named(door: Door, problem: str) -> None:
    [found] = check_doors((door,))
    assert not found.ok
    assert problem in str(found.problem)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ENGINE)))
def test_every_name_imported_from_vllm_is_a_door(path: Path) -> None:
    public = {"vllm:SamplingParams"}
    wanted = {name for name in imports(path) if name not in public}
    covered = {name for name in wanted if name in NAMES or any(door.startswith(f"{name}.") for door in NAMES)}
    assert wanted == covered


def super_calls(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    }


BASES = {
    "PacelineScheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "PacelineWorker": "vllm.v1.worker.cpu_worker:CPUWorker",
    "KeyedRunner": "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "MultiPathRunner": "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "PoolConnector": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
}
"""What stands behind `super()` in each class that subclasses vLLM's, mixins included."""

OURS = {"MultiPathRunner": "KeyedRunner"}
"""Classes of Paceline's own that stand between."""

CLASSES = {
    node.name: node
    for path in SOURCES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}


def begun_by(name: str) -> set[str]:
    """Methods of a class that do not go on to its base."""
    methods = (node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef))
    return {node.name for node in methods if node.name not in super_calls(node)}


@pytest.mark.parametrize("name", [name for name, node in CLASSES.items() if super_calls(node) - {"__init__"}])
def test_every_method_of_vllm_called_on_super_is_a_door(name: str) -> None:
    called = super_calls(CLASSES[name]) - {"__init__"}
    own = begun_by(OURS[name]) if name in OURS else set()
    behind = BASES.get(name, "")
    members = {member for door in DOORS if door.target == behind for member in door.members}
    single = {door.target.rpartition(".")[2] for door in DOORS if door.target.startswith(f"{behind}.")}
    assert called - own <= members | single


def test_connectors_for_clusters_tell_entries_apart_by_salt() -> None:
    """Read, not imported: LMCache and Mooncake are not installed here."""
    import vllm

    folder = Path(str(vllm.__file__)).parent / "distributed/kv_transfer/kv_connector/v1"
    lmcache = (folder / "lmcache_mp_connector.py").read_text()
    assert lmcache.count("cache_salt=tracker.cache_salt") >= 3
    assert 'if os.environ.get("LMCACHE_USE_UPSTREAM_MP"):' in lmcache
    assert "return LMCacheMPConnectorUpstream" in lmcache
    assert "\nLMCacheMPConnector = _resolve_lmcache_mp_connector()" in lmcache
    assert "request.block_hashes" in (folder / "mooncake/store/scheduler.py").read_text()


def test_other_kv_connectors_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.config import KvPoolSettings
    from paceline.engine.kv import backend
    from paceline.errors import ConfigError

    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setenv(backend.LMCACHE_SWITCH, "")
    monkeypatch.delitem(sys.modules, backend.LMCACHE_MODULE, raising=False)
    fields = {"kv_connector_extra_config": {"lmcache.mp.port": 7}, "kv_role": "kv_consumer"}
    pool = KvPoolSettings(backend="LMCacheMPConnector", namespace="run", kv_transfer_config=fields)
    made = backend.transfer_config(pool)
    assert (made.kv_connector, made.kv_role) == ("LMCacheMPConnector", "kv_consumer")
    assert made.kv_connector_extra_config == {"lmcache.mp.port": 7}
    assert made.kv_connector_module_path is None
    assert os.environ[backend.LMCACHE_SWITCH] == "1"
    theirs = SimpleNamespace(LMCacheMPConnector=object(), LMCacheMPConnectorUpstream=object())
    monkeypatch.setitem(sys.modules, backend.LMCACHE_MODULE, theirs)
    with pytest.raises(ConfigError, match="LMCACHE_USE_UPSTREAM_MP=1"):
        backend.transfer_config(pool)
    monkeypatch.delitem(sys.modules, backend.LMCACHE_MODULE)
    with pytest.raises(ConfigError, match="colour"):
        backend.transfer_config(pool.model_copy(update={"kv_transfer_config": {"colour": 1}}))

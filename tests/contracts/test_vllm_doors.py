"""Each private name of vLLM that Paceline uses still exists, and the list of them is complete."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import paceline
from paceline.engine import doors
from paceline.engine.doors import DOORS, Door, check_doors, has_member

pytest.importorskip("vllm", reason="vLLM is not installed")

PACKAGE = Path(paceline.__file__).parent
ENGINE = sorted((PACKAGE / "engine").rglob("*.py"))
SOURCES = sorted({*ENGINE, *(path for path in PACKAGE.rglob("*.py") if "vllm" in path.read_text())})
"""Who may touch vLLM: the engine, and whoever names it."""
NAMES = {door.target for door in DOORS}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.target)
def test_door_fits(door: Door) -> None:
    [found] = check_doors((door,))
    assert found.ok, found.problem


@pytest.mark.parametrize(
    ("door", "problem"),
    [
        (Door("vllm.no_such_module:Thing", ""), "module vllm.no_such_module cannot be imported"),
        (Door("vllm.v1.request:Answer", ""), "vllm.v1.request has no Answer"),
        (Door(doors.REQUEST, "", members="num_tokens colour"), "Request has no colour"),
        (Door(doors.REQUEST, "", overrides="colour"), "Request has no colour"),
        (Door(f"{doors.ARGUMENTS}.create_engine_config", "", parameters="colour"), "no parameter colour"),
        (Door("vllm.envs", "", mentions=("VLLM_COLOUR_OF_THE_ENGINE",)), "vllm.envs no longer knows"),
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
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("vllm."))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_name_imported_from_vllm_is_a_door(path: Path) -> None:
    public = {"vllm:SamplingParams"}
    wanted = {name for name in imports(path) if name not in public}
    covered = {name for name in wanted if name in NAMES or any(door.startswith(f"{name}.") for door in NAMES)}
    assert wanted == covered


BASES = {
    "PacelineScheduler": (doors.SCHEDULER,),
    "OverlappingScheduler": (doors.SCHEDULER,),
    "PacelineWorker": (doors.CPU_WORKER, doors.GPU_WORKER),
    "KeyedRunner": (doors.RUNNER,),
    "MultiPathRunner": (doors.RUNNER,),
    "KeyedRunnerV2": (doors.RUNNER_V2,),
    "CheckedOutput": (doors.OUTPUT_V2,),
    "CheckedSampler": (doors.SAMPLER_V2,),
    "ExactVerifier": (doors.VERIFIER_V2,),
    "NoSpeculator": (doors.BASE_SPECULATOR_V2,),
    "CoupledSpeculator": (doors.SPECULATOR_V2,),
    "CoupledModel": (doors.MODEL_SPECULATOR_V2,),
    "CoupledHead": (doors.HEAD_SPECULATOR_V2,),
    "SharedPassAttention": (doors.CPU_ATTENTION,),
    "PoolConnector": (doors.CONNECTOR, f"{doors.CONNECTOR_BASE}:SupportsHMA"),
}
"""What of vLLM's stands behind each class that subclasses it, mixins included."""

CLASSES = {
    node.name: node
    for path in ENGINE
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}
BY_TARGET = {door.target: door for door in DOORS}


def own_names(name: str) -> set[str]:
    """Methods and attributes that a class defines or sets."""
    names = {node.name for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(CLASSES[name]):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            names.add(node.attr)
    return names - {"__init__", "__new__"}


@pytest.mark.parametrize("target", sorted({target for targets in BASES.values() for target in targets}))
def test_what_a_subclass_replaces_is_listed(target: str) -> None:
    """Nothing is overridden, or shadowed by chance, that the door does not tell of."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    ours = {name for cls, targets in BASES.items() if target in targets for name in own_names(cls)}
    assert {name for name in ours if has_member(found, name)} == set(BY_TARGET[target].overrides.split())


def test_every_class_on_top_of_vllm_is_looked_at() -> None:
    """A class that calls `super()` for more than its construction subclasses vLLM's, or mixes into it."""
    calls = {
        name
        for name, node in CLASSES.items()
        for call in ast.walk(node)
        if isinstance(call, ast.Attribute)
        and ast.unparse(call.value) == "super()"
        and call.attr != "__init__"
    }
    assert calls <= BASES.keys()


HOLDS = {
    (None, "vllm_engine"): doors.ENGINE,
    (doors.SCHEDULER, "running"): doors.REQUEST,
    (doors.SCHEDULER, "requests"): doors.REQUEST,
    (doors.SCHEDULER, "waiting"): doors.QUEUE,
    (doors.SCHEDULER, "kv_holding_waiting"): doors.QUEUE,
    (doors.QUEUE, "peek_request"): doors.REQUEST,
    (doors.SCHEDULER, "scheduler_config"): "vllm.config.scheduler:SchedulerConfig",
    (doors.SCHEDULER, "kv_cache_manager"): doors.KV_MANAGER,
    (doors.KV_MANAGER, "block_pool"): doors.POOL,
    (doors.KV_MANAGER, "coordinator"): doors.COORDINATOR,
    (doors.KV_MANAGER, "get_blocks"): doors.KV_BLOCKS,
    (doors.POOL, "get_new_blocks"): doors.BLOCK,
    (doors.SCHEDULER_OUTPUT, "scheduled_new_reqs"): "vllm.v1.core.sched.output:NewRequestData",
    (doors.SCHEDULER_OUTPUT, "scheduled_cached_reqs"): "vllm.v1.core.sched.output:CachedRequestData",
    (doors.CONFIG, "model_config"): doors.MODEL_CONFIG,
    (doors.CONFIG, "scheduler_config"): "vllm.config.scheduler:SchedulerConfig",
    (doors.CONFIG, "parallel_config"): "vllm.config.parallel:ParallelConfig",
    (doors.CONFIG, "cache_config"): "vllm.config.cache:CacheConfig",
    (doors.CONFIG, "device_config"): "vllm.config.device:DeviceConfig",
    (doors.CONFIG, "compilation_config"): "vllm.config.compilation:CompilationConfig",
    (doors.KV_CONFIG, "kv_cache_groups"): doors.KV_GROUP,
    (doors.KV_GROUP, "kv_cache_spec"): doors.KV_SPEC,
    (doors.CPU_WORKER, "vllm_config"): doors.CONFIG,
    (doors.CPU_WORKER, "model_runner"): doors.RUNNER,
    (doors.RUNNER, "vllm_config"): doors.CONFIG,
    (doors.RUNNER, "model_config"): doors.MODEL_CONFIG,
    (doors.RUNNER, "input_batch"): doors.BATCH,
    (doors.RUNNER, "requests"): doors.REQUEST_STATE,
    (doors.RUNNER, "attn_groups"): doors.ATTENTION_GROUP,
    (doors.RUNNER, "input_ids"): doors.BUFFER,
    (doors.RUNNER, "discard_request_mask"): doors.BUFFER,
    (doors.RUNNER_V2, "vllm_config"): doors.CONFIG,
    (doors.RUNNER_V2, "req_states"): doors.STATES_V2,
    (doors.RUNNER_V2, "sampler"): doors.SAMPLER_V2,
    (doors.RUNNER_V2, "cudagraph_manager"): doors.GRAPHS_V2,
    (doors.RUNNER_V2, "rejection_sampler"): doors.VERIFIER_V2,
    (doors.SAMPLER_V2, "sampling_states"): doors.SAMPLING_V2,
    (doors.VERIFIER_V2, "sampler"): doors.SAMPLER_V2,
    (doors.CONFIG, "speculative_config"): "vllm.config.speculative:SpeculativeConfig",
    (doors.BATCH, "sampling_metadata"): doors.SAMPLING_METADATA,
    (doors.BATCH, "block_table"): doors.BLOCK_TABLE,
    (doors.BLOCK_TABLE, "block_table"): doors.BUFFER,
    (doors.SAMPLING_METADATA, "logitsprocs"): doors.PROCESSORS,
    (doors.ENGINE, "vllm_config"): doors.CONFIG,
    (doors.ENGINE, "model_config"): doors.MODEL_CONFIG,
    (doors.ENGINE, "engine_core"): doors.CLIENT,
    (doors.ENGINE, "model_executor"): doors.EXECUTOR,
    (doors.EXECUTOR, "driver_worker"): doors.WORKER_WRAPPER,
    (doors.WORKER_WRAPPER, "worker"): doors.GPU_WORKER,
    (doors.ENGINE, "output_processor"): doors.OUTPUT_PROCESSOR,
    (doors.OUTPUT_PROCESSOR, "process_outputs"): "vllm.v1.engine.output_processor:OutputProcessorOutput",
    (doors.CLIENT, "engine_core"): doors.CORE,
    (doors.CLIENT, "get_output"): doors.CORE_OUTPUTS,
    (doors.CORE_OUTPUTS, "outputs"): doors.CORE_OUTPUT,
    (doors.CORE_OUTPUT, "new_logprobs"): "vllm.v1.outputs:LogprobsLists",
}
"""What an attribute is, what it is a collection of, or what a method returns. Of None: whoever has it."""

ANNOTATIONS = {
    door.target.rpartition(":")[2]: door.target for door in DOORS if door.target.startswith("vllm.v1")
}
"""Classes by the name by which parameters are annotated with them."""

COLLECTION = {"append", "clear", "get", "items", "pop", "remove", "values"}
"""What is asked of a collection, and not of what it holds."""

VARIABLES = {
    "": {
        "vllm_config": doors.CONFIG,
        "kv_cache_config": doors.KV_CONFIG,
        "scheduler_output": doors.SCHEDULER_OUTPUT,
    },
    "engine/compiled.py": {"bare": doors.CONFIG, "model": doors.MODEL_CONFIG},
    "engine/invariance.py": {"metadata": doors.ATTENTION_METADATA, "split": doors.ATTENTION_METADATA},
    "engine/kv/connector.py": {"spec": doors.KV_SPEC},
    "engine/kv/use.py": {"scheduler": doors.SCHEDULER},
    "engine/multipath/spare_blocks.py": {"self._pool": doors.POOL, "self._held": doors.BLOCK},
    "engine/plugin.py": {"engine_args": doors.ARGUMENTS},
    "engine/rollout_engine.py": {"self._engine": doors.ENGINE},
    "engine/scheduler.py": {"request": doors.REQUEST, "output": doors.SCHEDULER_OUTPUT},
    "engine/token_outputs.py": {"self._engine": doors.ENGINE, "output": doors.CORE_OUTPUT},
    "engine/v1/path_runner.py": {"metadata": doors.ATTENTION_METADATA},
    "engine/v1/proposer.py": {
        "self._config": doors.CONFIG,
        "self._runner": doors.RUNNER,
        "state": doors.REQUEST_STATE,
        "s": doors.REQUEST_STATE,
    },
    "engine/v2/graphs.py": {"runner": doors.RUNNER_V2, "made": doors.GRAPHS_V2},
    "engine/v2/runner.py": {"request": "vllm.v1.core.sched.output:NewRequestData"},
    "engine/v2/speculator.py": {
        "input_batch": doors.BATCH_V2,
        "req_states": doors.STATES_V2,
        "runner": doors.RUNNER_V2,
    },
    "engine/v1/runner.py": {"state": doors.REQUEST_STATE},
    "engine/waiting.py": {"scheduler": doors.SCHEDULER, "manager": doors.KV_MANAGER, "r": doors.REQUEST},
}
"""Variables of vLLM's that nothing else tells the class of, by file; "": of all files."""


class Reads(ast.NodeVisitor):
    """Follows vLLM's objects through a file: `found` is (class, attribute) of all that it reads of them."""

    def __init__(self, variables: dict[str, str], annotations: dict[str, str] | None = None) -> None:
        """annotations: what classes the names of classes mean in the file; by default the engine's."""
        self.known = variables
        self.annotations = ANNOTATIONS if annotations is None else annotations
        self.found: set[tuple[str, str]] = set()

    def class_of(self, node: ast.expr) -> str | None:
        if (known := self.known.get(ast.unparse(node))) is not None:
            return known
        if isinstance(node, ast.Attribute):
            owner = self.class_of(node.value)
            return owner if node.attr in COLLECTION else HOLDS.get((owner, node.attr))
        if isinstance(node, ast.Subscript):
            return self.class_of(node.value)
        return self.class_of(node.func) if isinstance(node, ast.Call) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.class_of(node.value)
        if (
            owner is not None
            and node.attr not in COLLECTION
            and not node.attr.startswith(("__", "paceline_"))
        ):
            self.found.add((owner, node.attr))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.known
        for base in BASES.get(node.name, ())[:1]:
            self.known = self.known | {"self": base}
        self.generic_visit(node)
        self.known = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.known
        self.known = dict(before)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            name = ast.unparse(argument.annotation).split(" |")[0] if argument.annotation else ""
            if name in self.annotations:
                self.known[argument.arg] = self.annotations[name]
        for statement in ast.walk(node):
            if isinstance(statement, ast.Assign):
                self.learn(statement.targets[0], statement.value)
            elif isinstance(statement, ast.For | ast.comprehension):
                self.learn(statement.target, statement.iter)
        self.generic_visit(node)
        self.known = before

    def learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.learn(one, other)
        elif isinstance(target, ast.Name) and (found := self.class_of(value)) is not None:
            self.known[target.id] = found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_what_is_read_of_vllms_objects_is_listed(path: Path) -> None:
    """Outside the engine a class by the name of one of vLLM's is another one."""
    variables = VARIABLES[""] | VARIABLES.get(name_of(path), {})
    reads = Reads(variables, None if path in ENGINE else {})
    reads.visit(ast.parse(path.read_text()))
    own = {
        (base, name) for cls, bases in BASES.items() for base in bases for name in own_names(cls) | noted(cls)
    }
    listed = {(door.target, name) for door in DOORS for name in f"{door.overrides} {door.members}".split()}
    assert reads.found - own <= listed


def noted(name: str) -> set[str]:
    """Attributes that a class annotates."""
    nodes = (node.target for node in CLASSES[name].body if isinstance(node, ast.AnnAssign))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def test_the_reader_follows_the_engine_out_of_its_folder() -> None:
    reads = Reads({}, {})
    reads.visit(ast.parse("runner = self.engine.vllm_engine.model_executor.driver_worker.worker.colour"))
    assert reads.found >= {(doors.ENGINE, "model_executor"), (doors.GPU_WORKER, "colour")}


def test_the_reader_follows_objects() -> None:
    reads = Reads({"vllm_config": doors.CONFIG})
    source = """
    def f(vllm_config, request: Request | None, requests):
        model, size = vllm_config.model_config, 1
        for group in vllm_config.elsewhere:
            request.num_tokens
        return [model.get_vocab_size(), model.hf_config.size]
    """
    reads.visit(ast.parse(textwrap.dedent(source)))
    assert reads.found == {
        (doors.CONFIG, "model_config"),
        (doors.CONFIG, "elsewhere"),
        (doors.REQUEST, "num_tokens"),
        (doors.MODEL_CONFIG, "get_vocab_size"),
        (doors.MODEL_CONFIG, "hf_config"),
    }


def test_one_class_is_one_door() -> None:
    assert len(BY_TARGET) == len(DOORS)


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

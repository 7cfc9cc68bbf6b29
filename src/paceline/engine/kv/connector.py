"""The KV connector: a response that was cut leaves its keys and values in the KV pool, and finds them where it goes on.

Given to vLLM as `kv_connector_module_path` by `engine_arguments` (backend.py). vLLM builds it twice, for the
scheduler and for the worker; both live in one process, so that an entry is in the pool before anybody hears that the
response was cut, and has been checked before vLLM counts on it. What happens, in order:

    a response resumes   get_num_new_matched_tokens: look it up, check the blocks that the engine does not have
                         update_state_after_alloc, build_connector_meta: which of its new blocks are to be filled
                         start_load_kv (worker): fill them, before the step's forward pass
    a response is cut    request_finished_all_groups: save it if it may go on, else drop its entry

What max_tokens ends may go on, what an abort ends only if `keep` announced it or the request says so: to the engine's
core a stop string and a client that went away are aborts too.

A request takes part if its extra_args name `paceline_policy_version` (keys.py); RolloutEngine sets it. The last token
of a request is always computed here, for its logits, so a moved response costs one token of prefill.
Invariant: tokens do not depend on the pool. A missing or damaged entry is found before blocks are allotted for it, and
its tokens are computed. Keys and values of other weights never match: they are saved under the policy version. The
worker knows the version of its weights (`policy_version` of its end): every update, by whatever way, makes it unknown
until somebody names it (engine/worker.py), and a request of another version takes no part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config import KvPoolSettings
from paceline.engine.arguments import read_settings
from paceline.engine.compat import (
    FullAttentionSpec,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    Request,
    RequestStatus,
    SchedulerOutput,
    SupportsHMA,
    is_cpu,
    worker_connector,
)
from paceline.engine.compiled import is_compiled, is_invariant, linear_kernel
from paceline.engine.installed import vllm_version
from paceline.engine.keys import policy_version_of
from paceline.engine.kv.blocks import KvBlocks
from paceline.errors import UnsupportedError
from paceline.kvpool import Address, Held, KvPool, response_identity
from paceline.types import Int32Array, KvPoolCounters

CUTS = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)
"""How a request ends whose response may go on; `paceline_keep_kv` says how many of them count (keys.py)."""


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of an entry and the engine's blocks that they are for."""

    held: Held
    block_ids: tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker has to fill before the step's forward pass."""

    loads: list[Load] = field(default_factory=list)


@dataclass(slots=True)
class PooledRequest:
    """A request that takes part."""

    address: Address
    is_resumed: bool
    keeps: frozenset[RequestStatus]
    """How the request may end for its response to go on."""
    held: Held | None = None
    looked_beyond: int = -1
    """Tokens that the engine had itself when `held` was looked up; -1: not looked up."""


class PoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both ends of the connector; `_pool` and what follows it belong to the scheduler's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(vllm_config).kv_pool
        assert settings is not None
        self._is_required = settings.required
        self.obstacle: str | None = None
        """Why this engine goes without the pool, where it may: then nothing takes part."""
        self._num_blocks: int = kv_cache_config.num_blocks
        self.blocks: KvBlocks | None = None
        self.policy_version: int | None = 0
        """On the worker's end: version of the model's weights, the checkpoint's is 0; None until an update is named."""
        self._spent_s = 0.0
        self._requests: dict[str, PooledRequest] = {}
        self._loads: list[Load] = []
        with self._or_without():
            check_kv_pool(vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                self._open(settings, vllm_config, kv_cache_config)

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        """Where the pool is not required, an engine that cannot use it does without."""
        try:
            yield
        except UnsupportedError as error:
            if self._is_required:
                raise
            self.obstacle = str(error)

    def _open(self, settings: KvPoolSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._worker = find_worker()
        self._block_tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._layout = name_layout(vllm_config, self._worker.blocks, settings.namespace)
        self._pool = KvPool.open(settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for an entry: vLLM need not recompute what a preemption keeps from being saved."""
        return False

    # -- the worker's end

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.blocks is not None:
            raise UnsupportedError(
                "a process has one KV connector, and this one's belongs to an engine with a KV pool: close that "
                "engine, or start the second one in a process of its own"
            )
        if self.obstacle is None:
            with self._or_without():
                self.blocks = KvBlocks(kv_caches, self._num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata().loads
        if not loads:
            return
        started_s = time.perf_counter()
        assert self.blocks is not None
        for load in loads:
            for block_id, data in zip(load.block_ids, load.held.blocks, strict=True):
                self.blocks.write(block_id, data)
        self._spent_s += time.perf_counter() - started_s

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the forward pass."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved during a forward pass."""

    def wait_for_save(self) -> None:
        """Nothing is saved in the background."""

    # -- the scheduler's end: a response resumes

    def on_new_request(self, request: Request) -> None:
        if self.obstacle is not None:
            return
        params, prompt = request.sampling_params, request.prompt_token_ids
        version = None if params is None else policy_version_of(params)
        if version is None or prompt is None or request.resumable or request.lora_request is not None:
            return
        if request.mm_features or version != self._worker.policy_version:
            return
        extra = params.extra_args
        carried = extra.get("paceline_generated") or 0
        identity = response_identity(extra["paceline_key"], prompt[: len(prompt) - carried])
        wanted = extra.get("paceline_keep_kv")
        self._requests[request.request_id] = PooledRequest(
            Address(identity, version, self._layout),
            is_resumed=carried > 0,
            keeps=frozenset(CUTS[: 1 if wanted is None else max(wanted, 0)]),
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        pooled = self._requests.get(request.request_id)
        if pooled is None or not pooled.is_resumed or not self._has_weights_of(pooled):
            return 0, False
        if pooled.looked_beyond != num_computed_tokens:  # asked again in every step until there is room
            started_s = time.perf_counter()
            if pooled.held is not None and pooled.looked_beyond < num_computed_tokens:  # siblings' blocks
                pooled.held = pooled.held.beyond(num_computed_tokens, self._block_tokens)
            else:
                usable = _tokens(request, request.num_tokens - 1)
                pooled.held = self._pool.load(pooled.address, usable, num_computed_tokens)
            pooled.looked_beyond = num_computed_tokens
            self._spent_s += time.perf_counter() - started_s
        return (pooled.held.num_tokens - num_computed_tokens if pooled.held else 0), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        pooled = self._requests.get(request.request_id)
        if pooled is None:
            return
        held, pooled.held, pooled.looked_beyond = pooled.held, None, -1
        if pooled.is_resumed:
            self._pool.mark_running(pooled.address.response)
        if held is not None and num_external_tokens > 0:
            block_ids = blocks.get_block_ids()[0]
            chosen = block_ids[held.first_block : held.first_block + len(held.blocks)]
            self._loads.append(Load(held, tuple(chosen)))

    def _has_weights_of(self, pooled: PooledRequest) -> bool:
        return pooled.address.policy_version == self._worker.policy_version

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        loads, self._loads = self._loads, []
        return Loads(loads)

    # -- a response is cut, or ends

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        pooled = self._requests.pop(request.request_id, None)
        if pooled is not None:
            is_full = request.num_tokens >= self._max_model_len
            if request.status in pooled.keeps and not is_full:
                self._save(request, pooled, block_ids[0])
            else:
                self._pool.drop(pooled.address.response)
        return False, None

    def _save(self, request: Request, pooled: PooledRequest, block_ids: list[int]) -> None:
        """Save what has been computed. Nothing before the prompt has been: an older entry has more than that."""
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        count = min(computed, request.num_tokens)
        if count < request.num_prompt_tokens or not self._has_weights_of(pooled):
            return
        blocks = self._worker.blocks
        assert blocks is not None

        def read(index: int) -> list[memoryview]:
            return blocks.read(block_ids[index])

        tokens = _tokens(request, count)
        self._pool.save(pooled.address, tokens, self._block_tokens, blocks.block_bytes, read)

    def keep(self, request_ids: Iterable[str]) -> None:
        """These requests are about to be aborted and their responses will go on, unless they said otherwise."""
        for name in request_ids:
            if (pooled := self._requests.get(name)) is not None and pooled.keeps:
                pooled.keeps = frozenset(CUTS)

    def forget_running(self) -> None:
        """The weights have changed or are about to: what is running now has mixed keys and values."""
        self._requests.clear()

    def reset_cache(self) -> bool:
        """vLLM empties its caches. Entries of other weights never match, and other workers may need them."""
        self.forget_running()
        return True

    # -- for those around

    def counters(self) -> KvPoolCounters:
        """What this engine has done with the pool."""
        return self._pool.counters()

    def take_spent_s(self) -> float:
        """Seconds spent on loads since the last call. They are no part of what a step over n tokens costs."""
        spent_s = self._spent_s + self._worker._spent_s
        self._spent_s = self._worker._spent_s = 0.0
        return spent_s

    def shutdown(self) -> None:
        self.blocks = None
        if self.role is KVConnectorRole.SCHEDULER and self.obstacle is None:
            self._pool.close()


def _tokens(request: Request, count: int) -> Int32Array:
    return np.asarray(request.all_token_ids[:count], dtype=np.int32)


def check_kv_pool(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise UnsupportedError for an engine whose keys and values cannot be moved as whole blocks of one worker."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    spec = groups[0].kv_cache_spec
    limits = [getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")]
    obstacles = {
        f"{parallel.world_size} workers": parallel.world_size > 1,
        f"{len(groups)} KV cache groups": len(groups) != 1,
        f"{type(spec).__name__} with limits {limits}": type(spec) is not FullAttentionSpec or any(limits),
        "context parallelism": parallel.decode_context_parallel_size > 1,
    }
    for name, found in obstacles.items():
        if found:
            raise UnsupportedError(
                f"kv_pool.backend='paceline' is for engines with one worker and full attention, this one has {name}: "
                "use another backend, or leave kv_pool unset"
            )


def worker_end() -> PoolConnector | None:
    """The worker's end in this process, if there is one."""
    found = worker_connector()
    return found if isinstance(found, PoolConnector) else None


def find_worker() -> PoolConnector:
    """The worker's end in this process. Raises UnsupportedError when the worker lives in another one."""
    found = worker_end()
    if found is not None and found.obstacle is not None:
        raise UnsupportedError(found.obstacle)
    if found is None or found.blocks is None:
        raise UnsupportedError(
            "kv_pool.backend='paceline' needs the worker in the engine's own process: start the engine with "
            "distributed_executor_backend='uni' and, on the CPU, VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment; "
            "RolloutEngine does both on the CPU"
        )
    return found


def name_layout(vllm_config: Any, blocks: KvBlocks | None, run: str | None) -> bytes:
    """16 bytes that are equal for engines whose blocks mean the same: run, model, software, and a block's inside."""
    assert blocks is not None
    model = vllm_config.model_config
    facts = [
        run,
        vllm_version(),
        "cpu" if is_cpu() else vllm_config.device_config.device_type,
        model.hf_config.to_json_string(),
        str(model.dtype),
        model.quantization,
        model.revision,
        _name_weights(model.model),
        vllm_config.cache_config.cache_dtype,
        is_invariant(vllm_config),
        linear_kernel(vllm_config),
        is_compiled(vllm_config),
        blocks.describe(),
    ]
    return blake2b(repr(facts).encode(), digest_size=16).digest()


def _name_weights(model: str) -> Any:
    """The weight files of a checkpoint by name, size and time; the model's name if it is no folder here."""
    files = sorted([*Path(model).glob("*.safetensors"), *Path(model).glob("*.bin")])
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats] or model

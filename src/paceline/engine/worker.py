"""The worker: vLLM's own for this platform, with the shared dice for a sampler and weight updates that are right.

Given to vLLM as `worker_cls="paceline.engine.worker.PacelineWorker"`. Lives in the process that holds the model. The
model runner's class is exchanged for a subclass of itself after vLLM has chosen it, so that CPU and GPU runners, and
runners of other plug-ins, keep everything else of theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline.engine import compiled, invariance
from paceline.engine.arguments import check_engine, fused_layers, read_settings
from paceline.engine.compat import (
    is_batch_invariant_gpu,
    is_cpu,
    platform_worker,
    repack_tied_head,
    repacking_experts,
)
from paceline.engine.kv.connector import PoolConnector, worker_end
from paceline.engine.runner import Runner
from paceline.engine.weight_parts import checkpoint_names, missing_parts, noted
from paceline.errors import EngineError, PacelineError

if TYPE_CHECKING:
    from paceline.distillation.packing import Sample
    from paceline.drafting.synthetic import Play

_LOGGER = logging.getLogger("vllm.paceline")

Refusal: TypeAlias = tuple[type[PacelineError], str]
"""The kind of error that a worker has not raised, and its text."""


def _adopt(runner: Any, vllm_config: Any) -> Runner:
    """Put Paceline's part into vLLM's model runner, whichever of the two it is."""
    if vllm_config.use_v2_model_runner:
        from paceline.engine.v2 import runner as v2

        return v2.adopt(runner)
    from paceline.engine.v1 import runner as v1

    return v1.adopt(runner, vllm_config)


class PacelineWorker(platform_worker()):  # type: ignore[misc]
    """vLLM's worker of this platform with the keyed sampler and right weight updates."""

    def init_device(self) -> None:
        check_engine(self.vllm_config)
        if compiled.is_invariant(self.vllm_config):
            invariance.prepare_environment()
            invariance.patch_attention()
        super().init_device()
        self.model_runner: Runner = _adopt(self.model_runner, self.vllm_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._kernels():
            super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        model.load_weights = self._load_live if is_cpu() else self._load_through
        if (gap := self.describe_invariance_gap()) is not None:
            _LOGGER.warning("%s", gap)

    def determine_available_memory(self) -> int:
        """vLLM's own; on the CPU this is where the model is compiled, or loaded from the compile cache."""
        if not (is_cpu() and compiled.is_compiled(self.vllm_config)):
            return super().determine_available_memory()  # type: ignore[no-any-return]
        compiled.mend_cache()
        layers = fused_layers(read_settings(self.vllm_config))
        with compiled.cached_by_architecture(self.vllm_config, layers):
            return super().determine_available_memory()  # type: ignore[no-any-return]

    def _load_through(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stand in for `model.load_weights` on a live model elsewhere: vLLM's own, which the KV pool has to hear of."""
        self._unname_weights()
        model = self.model_runner.get_model()
        return type(model).load_weights(model, weights)  # type: ignore[no-any-return]

    def _load_live(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stand in for `model.load_weights` on a live model on the CPU, which trainers call parameter by parameter.

        vLLM's own fails on packed weights. The tensors are copied and applied together before the next step, by
        the same path as `reload_weights`.
        """
        self._unname_weights()
        pending: dict[str, torch.Tensor] = self.__dict__.setdefault("_pending_weights", {})
        names = set()
        for name, tensor in weights:
            pending[name] = tensor.detach().clone()
            names.add(name)
        return names

    def _apply_pending(self) -> None:
        if pending := self.__dict__.get("_pending_weights"):
            self._pending_weights: dict[str, torch.Tensor] = {}
            self.reload_weights(weights_iterator=iter(pending.items()))

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._apply_pending()
        return super().execute_model(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's weight transfer, chunk by chunk."""
        self._unname_weights()
        super().update_weights(*args, **kwargs)

    def reload_weights(
        self, weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Renew the weights and everything derived from them: packed layers, a tied head, the invariance wrappers.

        What `model.load_weights` was given before goes first. Raises EngineError, once all have come, if parts of a
        packed layer are missing.
        """
        self._apply_pending()
        self._unname_weights()
        model = self.model_runner.get_model()
        came: set[str] = set()
        if weights_iterator is not None:
            weights_iterator = noted(weights_iterator, came)
        stand_in = model.__dict__.pop("load_weights", None)
        with self._kernels(), repacking_experts():
            try:
                super().reload_weights(weights_iterator, *args, **kwargs)
            finally:
                if stand_in is not None:
                    model.load_weights = stand_in
            repack_tied_head(model)
        self.model_runner.seal_model()
        packed = getattr(model, "packed_modules_mapping", None) or {}
        if missing := missing_parts(came, self._known_weights, packed):
            raise EngineError(
                f"{len(missing)} weights did not come, first {missing[0]!r}, although others did of the same layer, "
                "which vLLM keeps as one tensor: send all of a layer's weights together"
            )

    @cached_property
    def _known_weights(self) -> frozenset[str]:
        """The names of the checkpoint's weights."""
        return checkpoint_names(Path(self.vllm_config.model_config.model))

    def _kernels(self) -> AbstractContextManager[None]:
        """Around everything that packs weights: whose kernels the linear layers get."""
        kernel = compiled.linear_kernel(self.vllm_config)
        if kernel == "vllm":  # as on a GPU
            return nullcontext()
        from paceline.engine.linear import replacing_kernels

        return replacing_kernels(kernel)

    def describe_invariance_gap(self) -> str | None:
        """Which layers batch invariance was wanted for and is not ensured; None: none. Called by `collective_rpc`."""
        if is_batch_invariant_gpu():
            layers = self.vllm_config.compilation_config.static_forward_context.values()
            return invariance.describe_attention(layers)
        if not compiled.is_invariant(self.vllm_config):
            return None
        return invariance.describe_gap(self.model_runner.get_model())

    def reload_drafter(self, weights: Mapping[str, torch.Tensor]) -> Refusal | None:
        """Give the model drafter other weights, or say why not: an error of another process, raised or returned, would
        arrive as a RuntimeError. Called by `collective_rpc`.
        """
        try:
            with self._kernels():
                self.model_runner.drafter.reload(weights)
        except PacelineError as refusal:
            return type(refusal), str(refusal)
        return None

    def use_drafter(self, place: int, played: Play | None) -> None:
        """Draft with another of the model drafters. Called by `collective_rpc`, on model runner V1."""
        self.model_runner.drafter.use(place, played)

    def collect_states(self, share: float, max_bytes: int) -> None:
        """Keep hidden states from the next step on; a share of 0: no more. Called by `collective_rpc`.

        Of tensor-parallel workers, which all have the same states, the first one keeps them.
        """
        runner, collects = self.model_runner, share and self.is_driver_worker
        runner.collector = runner.make_collector(share, max_bytes) if collects else None

    def take_samples(self) -> list[Sample]:
        """What has been kept since the last call. Called by `collective_rpc`."""
        collector = self.model_runner.collector
        return [] if collector is None else collector.take()

    def collection_s(self) -> float:
        """Time that steps have spent on keeping hidden states. Called by `collective_rpc`."""
        collector = self.model_runner.collector
        return 0.0 if collector is None else collector.seconds

    # -- which weights these are, for the KV pool

    def _unname_weights(self) -> None:
        """The weights are about to change: nothing is loaded or saved until `name_policy_version` says into what."""
        if (end := self._pool_end()) is not None:
            end.policy_version = None

    def name_policy_version(self, version: int) -> None:
        """Say which version of the policy the weights are, once an update is complete. Called by `collective_rpc`."""
        self._apply_pending()
        if (end := self._pool_end()) is not None:
            end.policy_version = version

    def _pool_end(self) -> PoolConnector | None:
        """Another engine of this process may have a KV pool, this one none."""
        return worker_end() if self.vllm_config.kv_transfer_config is not None else None

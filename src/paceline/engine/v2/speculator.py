"""What stands where model runner V2 wants a speculator: none, or one of vLLM's own coupled to the target.

vLLM salts a drafter's noise, because its verification tests probability ratios. Exact matching wants the opposite:
the noise of the target, so that the two agree wherever their distributions nearly do. Two families of vLLM's are
coupled: small models, and what reads the target's hidden states level by level (EAGLE, EAGLE-3, the target's own
prediction layers). Invariant: nothing here waits for the device before `take`, which the scheduler calls when the step
is over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from paceline import dice
from paceline.config import MTP
from paceline.drafting.checkpoint import check_weights, read_shapes
from paceline.drafting.proposal import calibration_cells
from paceline.engine.runner import FreshDrafts
from paceline.errors import UnsupportedError
from paceline.planning.drafter_worth import choose_depth
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import (
    DraftBatch,
    DraftGrowth,
    DraftOrder,
    Float32Array,
    Int64Array,
    ModelDrafts,
    UInt64Array,
)


class NoSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Drafts nothing: all drafts come from the scheduler."""

    supports_mm_inputs = False
    draft_logits = None
    order: DraftOrder | None = None

    def __init__(self, draft_tokens: torch.Tensor) -> None:
        """draft_tokens: V2's. [max_num_reqs, max_draft_tokens] int64"""
        self._nothing = torch.zeros_like(draft_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._nothing[: input_batch.num_reqs]

    def forgive_launch(self) -> None:
        """Nothing was launched."""

    def take(self, runner: Any) -> None:
        """There never are fresh drafts."""

    def hand_over(self, runner: Any) -> None:
        """There never are fresh drafts."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Drafts on their way to the host; the arrays are valid once `copied` has happened."""

    order: DraftOrder
    names: list[str]
    rows: Int64Array  # [num_requests] V2's row of each request
    positions: Int64Array  # [num_requests] of the first draft token
    tokens: Int64Array  # [num_requests, depth]
    rivals: Int64Array  # [depth, num_requests] the token that would have been next
    evidence: (
        Float32Array  # [2, depth, num_requests] log q of the token; its lead over the rival, without noise
    )
    began: Any
    """When the device began with them; None where it keeps no time."""
    copied: Any
    launch_s: float
    """Of the step's time; 0 where the target was still at work when the drafts had been launched."""


@dataclass(frozen=True, slots=True)
class LateDrafts:
    """Drafts of a step that the next one overlaps, with what has to be known of the requests when they are made."""

    made: _Made
    responses: Int64Array  # [num_requests]
    keys: UInt64Array  # [num_requests]
    temperatures: Float32Array  # [num_requests]

    def read(self) -> ModelDrafts:
        """What was drafted, and what it took the device. To be called when it is long done."""
        made = self.made
        made.copied.synchronize()
        count, depth = made.tokens.shape
        seconds = made.launch_s if made.began is None else made.began.elapsed_time(made.copied) / 1e3
        return ModelDrafts(
            self.responses,
            made.positions.astype(np.int64),
            _judge(made, self.keys, self.temperatures),
            DraftGrowth(depth, depth * count, seconds),
            seconds,
        )


class CoupledSpeculator(DraftModelSpeculator):  # type: ignore[misc]
    """On top of one of vLLM's speculators: drafts with the target's noise, as deep as pays, and says how sure it is."""

    num_speculative_steps: int
    order: DraftOrder | None
    """What the scheduler wants drafted after the present step; None: nothing."""
    drafts_for_some: bool = False
    """Whether levels behind the first can be drafted for a part of the requests."""

    def couple(self, req_states: Any) -> None:
        """Finish the change of class. req_states: V2's."""
        self.order, self._lengths = None, req_states.total_len
        self._longest, self._depth = self.num_speculative_steps, 1
        shape, device = (self._longest, self.max_num_reqs), self.device
        self._rivals = torch.zeros(shape, dtype=torch.int64, device=device)
        self._evidence = torch.zeros(2, *shape, dtype=torch.float32, device=device)
        self._sharpness = torch.ones((), dtype=torch.float32, device=device)
        self._made: _Made | None = None
        self._rehearses = False
        self._lent: frozenset[str] = frozenset()

    def load_model(self, target_model: Any) -> None:
        """vLLM's own; a head may get the target's embedding and output head, which are not its own to renew."""
        super().load_model(target_model)
        own = set(map(id, target_model.parameters()))
        named = self.model.named_parameters(remove_duplicate=False)
        self._lent = frozenset(name for name, weight in named if id(weight) in own)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM's own, as deep as the last drafts paid; one level while it rests, which keeps its KV cache complete.

        Where the order is for a sample of the requests, the first level is all the same made for every one. A step
        without requests of anybody's, to measure memory or to warm up, does all that a step may have to.
        """
        began_s = time.perf_counter()
        order: DraftOrder | None = self.order
        began = self._note_time() if order is not None and order.is_exact else None
        self._rehearses = bool(kwargs.get("dummy_run"))
        depth = 1
        if order is not None:
            depth = order.depth if order.is_exact else min(self._depth, order.depth)
        if self._rehearses:
            depth = self._longest
        self._sharpness.fill_(1.0 if order is None else order.sharpness)
        self.num_speculative_steps = depth
        drafts: torch.Tensor = super().propose(
            input_batch, *args, **{**kwargs, "num_speculative_tokens": depth}
        )
        self.num_speculative_steps = self._longest
        if order is not None and not self._rehearses:
            made = drafts[: order.most_requests if self.drafts_for_some else None, :depth]
            self._send(order, input_batch, made, began, time.perf_counter() - began_s)
        return drafts

    def _note_time(self) -> Any:
        """An event that the device notes the time of; None where it cannot."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """Draw each row's draft token with the noise that the target will draw with. [num_rows] int64

        `sharpness` divides the temperature. The margin of a proposal is that of the coupled score, whatever sharpness
        proposed it (drafting/proposal.py).
        """
        logits = self.compute_draft_logits(hidden_states, spec_step_idx).float()
        last = logits.shape[1] - 1

        def draw(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
            drawn: torch.Tensor = gumbel_sample(
                logits, idx_mapping, temperature, seeds, sample_src_positions, True, False
            )
            return drawn.clamp_(0, last)  # of a row of NaN any number is drawn

        tokens = draw(logits, temperature / self._sharpness)
        if self.order is None and not self._rehearses and not is_captured():
            return tokens
        rivals = draw(logits.scatter(1, tokens[:, None], -torch.inf), temperature)
        heat = temperature[idx_mapping]
        logits = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        own, rival = logits.gather(1, torch.stack([tokens, rivals], 1)).unbind(1)
        evidence = torch.stack([own - logits.logsumexp(1), own - rival])
        count, step = len(tokens), draft_step.view(1)
        self._rivals[:, :count].index_copy_(0, step, rivals[None])
        self._evidence[:, :, :count].index_copy_(1, step, evidence[:, None])
        return tokens

    def _send(
        self, order: DraftOrder, input_batch: Any, drafts: torch.Tensor, began: Any, launch_s: float
    ) -> None:
        """Start copying the drafts, those of the first requests, to the host."""
        count, depth = drafts.shape
        positions = async_copy_to_np(self._lengths.gpu[input_batch.idx_mapping[:count]])
        arrays = (drafts, self._rivals[:depth, :count], self._evidence[:, :depth, :count])
        tokens, rivals, evidence = map(async_copy_to_np, arrays)
        copied = torch.cuda.Event(enable_timing=True, blocking=True)
        copied.record()
        self._made = _Made(
            order,
            input_batch.req_ids[:count],
            input_batch.idx_mapping_np[:count],
            positions,
            tokens,
            rivals,
            evidence,
            began,
            copied,
            launch_s,
        )

    def forgive_launch(self) -> None:
        """The step's tokens are not there yet: what launching the drafts took is no part of the step's time."""
        if self._made is not None:
            self._made = replace(self._made, launch_s=0.0)

    def take(self, runner: Any) -> FreshDrafts | None:
        """The fresh drafts for the scheduler, once; None when there are none. Waits until they are made."""
        made: _Made | None = self._made
        self._made = None
        if made is None:
            return None
        began_s = time.perf_counter()
        made.copied.synchronize()
        states = runner.sampler.sampling_states
        batch = _judge(made, states.seeds.np[made.rows].view(np.uint64), states.temperature.np[made.rows])
        order, (count, depth) = made.order, made.tokens.shape
        self._depth = choose_depth(batch.path_probability, order.floor, order.level_costs, self._longest)
        seconds = made.launch_s + time.perf_counter() - began_s
        drafts = ModelDrafts(
            runner.responses[made.rows],
            made.positions.astype(np.int64),
            batch,
            DraftGrowth(depth, depth * count, seconds),
            made.launch_s,
        )
        return FreshDrafts(made.names, [[] for _ in made.names], drafts)

    def hand_over(self, runner: Any) -> LateDrafts | None:
        """The drafts that have just been launched, once, for whoever reads them later. Waits for nothing."""
        made: _Made | None = self._made
        self._made = None
        if made is None:
            return None
        states = runner.sampler.sampling_states
        return LateDrafts(
            made,
            runner.responses[made.rows],
            states.seeds.np[made.rows].view(np.uint64),
            states.temperature.np[made.rows],
        )

    def reload(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over new weights, by the checkpoint's names, all of them, tied copies optional. Keys and values of the
        old ones stay with running responses, whose drafts are worse for it until they end. What a head shares with the
        target stays the target's.

        Raises UnsupportedError for the target's own prediction layers, CheckpointError for a missing or unknown name,
        another shape or NaN, before any weight is changed.
        """
        config = self.speculative_config
        if config.method == MTP:
            raise UnsupportedError(
                "the target's own prediction layers have no checkpoint of their own, and keep the weights that they "
                "were loaded with: start the engine anew with a newer one"
            )
        own = read_shapes(Path(config.model))
        is_tied = getattr(self.draft_model_config.hf_config, "tie_word_embeddings", False)
        fresh = {n: w for n, w in weights.items() if n in own or not (is_tied and n == "lm_head.weight")}
        check_weights(own, fresh)
        fresh = {name: weight for name, weight in fresh.items() if not is_lent(name, self._lent)}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(fresh.items()))
            finalize_layerwise_reload(self.model, self.draft_model_config)
        self._made, self._depth = None, 1


class CoupledModel(CoupledSpeculator):
    """A small language model of its own."""

    order: DraftOrder | None
    drafts_for_some = True

    def _multi_step_decode(
        self, input_batch: Any, num_rejected: torch.Tensor, num_reqs: int, *args: Any, **kwargs: Any
    ) -> None:
        """vLLM's own levels behind the first, for the requests that the order is for."""
        if self.order is not None and self.order.most_requests is not None:
            num_reqs = min(num_reqs, self.order.most_requests)
            input_batch = replace(input_batch, idx_mapping=input_batch.idx_mapping[:num_reqs])
        super()._multi_step_decode(input_batch, num_rejected, num_reqs, *args, **kwargs)


class CoupledHead(CoupledSpeculator):
    """A head on the target's hidden states: EAGLE, EAGLE-3, a prediction layer of the target."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """vLLM replays full graphs of the first level with the attention metadata that the target's graph was given.
        The target's graphs are of other batches here, those of ragged steps (v2/graphs.py), so the first level has
        piecewise graphs, or none.
        """
        super().init_cudagraph_manager(cudagraph_mode)
        mixed = cudagraph_mode.mixed_mode()
        self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(
            self.vllm_config,
            self.device,
            mixed if mixed == CUDAGraphMode.PIECEWISE else CUDAGraphMode.NONE,
            self.num_speculative_steps + 1,
        )

    def _configure_decode_metadata_update(self) -> None:
        """vLLM would capture all levels in one graph; how many there are changes from step to step here."""
        self.supports_decode_metadata_update = False


def is_lent(name: str, lent: Collection[str]) -> bool:
    """Whether a checkpoint's weight belongs to a module that is the target's. lent: names of its weights in the model,
    which may have something before the checkpoint's, or less.
    """
    return any(name == one or one.endswith(f".{name}") or name.endswith(f".{one}") for one in lent)


COUPLED: tuple[tuple[type[DraftModelSpeculator], type[CoupledSpeculator]], ...] = (
    (StandaloneARSpeculator, CoupledModel),
    (TargetDependentARSpeculator, CoupledHead),
)
"""vLLM's speculators, and what makes them drafters of ours."""


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: what it does is done in every replay, whatever the order is then."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def couple(speculator: Any, req_states: Any) -> Any:
    """Make vLLM's speculator, which has no model yet, a subclass of its own class that is coupled to the target.

    Raises UnsupportedError for one that draws its drafts in another way.
    """
    cls = speculator.__class__
    coupled = next((ours for theirs, ours in COUPLED if issubclass(cls, theirs)), None)
    if coupled is None:
        raise UnsupportedError(
            f"vLLM's {cls.__name__} was not coupled to the target: start the engine with another drafter"
        )
    speculator.__class__ = type("PacelineSpeculator", (coupled, cls), {})
    speculator.couple(req_states)
    return speculator


def _judge(made: _Made, keys: UInt64Array, temperatures: Float32Array) -> DraftBatch:
    """The drafts with their calibration cells; the noise of the two best tokens is thrown again on the host."""
    count, depth = made.tokens.shape
    positions = made.positions[:, None].astype(np.int64) + np.arange(depth)
    noise = dice.gumbel(keys[:, None], positions, np.stack([made.tokens, made.rivals.T]))
    log_q, lead = made.evidence.transpose(0, 2, 1)
    margin = lead + np.where(temperatures[:, None] > 0, noise[0] - noise[1], np.float32(0.0))
    cells = calibration_cells(log_q, margin)
    return DraftBatch(
        tokens=made.tokens.astype(np.int32),
        num_tokens=np.full(count, depth, np.int32),
        acceptance=made.order.calibration[cells],
        cells=cells,
        probes=np.full((count, len(SHARPNESS_GRID)), -1, np.int32),
    )

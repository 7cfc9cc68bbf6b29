"""Several draft paths per request by row expansion: the runner's side.

Each alternative path is one more attention row of the same forward pass (multipath/layout.py); no tree mask is needed,
so any backend of full attention serves. The rows join the step behind vLLM's own between the preparation of its inputs
and the forward pass; the keyed sampler then decides the rows of all paths together, and the winner's blocks are copied
over the request's own. Whole blocks are copied, because how a block is laid out inside is the kernel's own business.
Invariant: tokens and log-probabilities are those of plain decoding, bitwise where the engine is batch-invariant.

Tried on vLLM's CPU backend; other engines are refused at the start (`check_multipath`, `check_kv_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from paceline.engine.compat import FullAttentionSpec, SpecDecodeMetadata, is_cpu
from paceline.engine.multipath.layout import Expansion, PathPlan, lay_out
from paceline.engine.runner import order_of
from paceline.engine.v1.sampler import Rows, Verdict
from paceline.errors import UnsupportedError
from paceline.types import Int64Array


def check_multipath(vllm_config: Any) -> None:
    """Raise UnsupportedError for an engine that row expansion was not tried on. Before the model is loaded."""
    model = vllm_config.model_config
    obstacles = {
        "a backend other than vLLM's CPU backend": not is_cpu(),
        "context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
        "LoRA adapters": vllm_config.lora_config is not None,
        "a multi-modal model": model.is_multimodal_model,
        "an encoder-decoder model": model.is_encoder_decoder,
        "M-RoPE positions": model.uses_mrope,
        "fast prefill with a shared KV cache": vllm_config.cache_config.kv_sharing_fast_prefill,
    }
    for name, found in obstacles.items():
        if found:
            raise UnsupportedError(f"num_paths > 1 was not tried with {name}: set num_paths=1")


def check_kv_cache(kv_cache_config: Any) -> None:
    """Raise UnsupportedError unless every layer attends to its whole context through one kind of KV cache."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"num_paths > 1 needs one KV cache group, this model has {len(groups)}: set num_paths=1"
        )
    spec = groups[0].kv_cache_spec
    limits = [getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if type(spec) is not FullAttentionSpec or any(limits):
        raise UnsupportedError(
            f"num_paths > 1 needs full attention in every layer, this model has {type(spec).__name__} "
            f"with sliding window {limits[0]} and chunks of {limits[1]}: set num_paths=1"
        )


class MultiPathRunner:
    """Mixin over KeyedRunner: carries the alternatives of a step through vLLM's preparation of its inputs."""

    path_plan: PathPlan | None = None
    expansion: Expansion | None = None

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        check_kv_cache(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        table = self.input_batch.block_table[0]
        if table.block_size != kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size:
            raise UnsupportedError(
                f"num_paths > 1 needs KV blocks that the attention kernel does not split, these of "
                f"{kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size} tokens are split into "
                f"{table.block_size}: set num_paths=1"
            )

    def initialize_metadata_builders(self: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)  # type: ignore[misc]
        for group in self.attn_groups[0]:
            for builder in group.metadata_builders:
                builder.build = self._expand_before(builder.build)

    def _expand_before(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Have a metadata builder see the alternatives as further requests."""

        def build_expanded(
            common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            metadata = common_attn_metadata
            if self.expansion is not None:
                metadata = expand_metadata(metadata, self.expansion)
            return build(common_prefix_len, metadata, *args, **kwargs)

        return build_expanded

    # -- a step, in vLLM's order

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.path_plan = order_of(scheduler_output).paths
        self.expansion = None
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        logits_indices, *rest = super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.path_plan is None:
            return (logits_indices, *rest)
        self.expansion = added = self._lay_out(self.path_plan, scheduler_output.total_num_scheduled_tokens)
        tail = slice(added.num_tokens, added.num_tokens + added.num_extra_tokens)
        self.input_ids.gpu[tail] = torch.from_numpy(added.token_ids).to(self.input_ids.gpu.dtype)
        copy_blocks(self.kv_caches, (pair for pairs in added.copies for pair in pairs))
        more = torch.arange(tail.start, tail.stop, dtype=logits_indices.dtype)
        return (torch.cat([logits_indices, more]), *rest)

    def _lay_out(self: Any, plan: PathPlan, num_tokens: int) -> Expansion:
        batch = self.input_batch
        owners = [batch.req_id_to_index[name] for name in plan.names]
        starts = batch.num_computed_tokens_cpu[owners].astype(np.int64)
        table = batch.block_table[0]
        return lay_out(
            plan,
            owners,
            starts,
            batch.token_ids_cpu[owners, starts].astype(np.int64),
            table.block_table.np,
            table.block_size,
            num_tokens,
        )

    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.expansion is not None:
            kwargs["num_tokens"] += self.expansion.num_extra_tokens
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _get_slot_mappings(self: Any, *args: Any, **kwargs: Any) -> Any:
        added = self.expansion
        if added is None:
            return super()._get_slot_mappings(*args, **kwargs)  # type: ignore[misc]
        end = kwargs["num_tokens_unpadded"] = kwargs["num_tokens_unpadded"] + added.num_extra_tokens
        kwargs["num_tokens_padded"] = max(kwargs["num_tokens_padded"], end)
        by_group, by_layer = super()._get_slot_mappings(*args, **kwargs)  # type: ignore[misc]
        by_group[0][added.num_tokens : end] = torch.from_numpy(added.slots)
        return by_group, by_layer

    def _preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._preprocess(*args, **kwargs)  # type: ignore[misc]
        if (added := self.expansion) is not None:  # vLLM zeroes the positions behind its own tokens
            end = added.num_tokens + added.num_extra_tokens
            self.positions[added.num_tokens : end] = torch.from_numpy(added.positions)
        return result

    def _prepare_padding_mask(self: Any, num_tokens_unpadded: int, num_tokens_padded: int) -> torch.Tensor:
        if self.expansion is not None:
            num_tokens_unpadded += self.expansion.num_extra_tokens
        mask: torch.Tensor = super()._prepare_padding_mask(num_tokens_unpadded, num_tokens_padded)  # type: ignore[misc]
        return mask

    def lay_out_rows(self: Any, metadata: SpecDecodeMetadata | None) -> tuple[Rows, Int64Array]:
        rows, drafts = super().lay_out_rows(metadata)  # type: ignore[misc]
        added = self.expansion
        if added is None:
            return rows, drafts
        batch = self.input_batch
        return (
            Rows.of(
                np.concatenate([rows.num_drafts, added.query_lens.astype(np.int64) - 1]),
                batch.num_tokens_no_spec[: batch.num_reqs].astype(np.int64),
                np.concatenate([rows.owners, added.owners]),
            ),
            np.concatenate([drafts, added.drafts]),
        )

    def lent_blocks(self: Any, request: int) -> list[int]:
        if self.expansion is None:
            return []
        pairs = zip(self.expansion.owners.tolist(), self.expansion.copies, strict=True)
        return [private for owner, copies in pairs if owner == request for _, private in copies]

    def settle(self: Any, verdict: Verdict) -> None:
        """Move the winners' keys and values to where their requests look for them."""
        super().settle(verdict)  # type: ignore[misc]
        added, self.expansion = self.expansion, None
        if added is None:
            return
        for path, accepted in zip(verdict.winners.tolist(), verdict.accepted.tolist(), strict=True):
            if path >= len(verdict.winners):
                won = added.won(path - len(verdict.winners), accepted)
                copy_blocks(self.kv_caches, ((private, own) for own, private in won))


def expand_metadata(metadata: Any, added: Expansion) -> Any:
    """vLLM's common attention metadata of a step with the alternatives as requests behind its own."""
    lens = torch.from_numpy(added.query_lens)
    ends = metadata.query_start_loc_cpu[-1] + torch.cumsum(lens, 0).to(torch.int32)
    seq_lens = torch.from_numpy(added.seq_lens)
    changes: dict[str, Any] = {
        "query_start_loc": torch.cat([metadata.query_start_loc, ends]),
        "query_start_loc_cpu": torch.cat([metadata.query_start_loc_cpu, ends]),
        "seq_lens": torch.cat([metadata.seq_lens, seq_lens]),
        "block_table_tensor": torch.cat([metadata.block_table_tensor, torch.from_numpy(added.tables)]),
        "num_reqs": metadata.num_reqs + len(added.owners),
        "num_actual_tokens": added.num_tokens + added.num_extra_tokens,
        "max_query_len": max(metadata.max_query_len, int(added.query_lens.max())),
        "max_seq_len": max(metadata.max_seq_len, int(added.seq_lens.max())),
    }
    if metadata.seq_lens_cpu_upper_bound is not None:
        changes["seq_lens_cpu_upper_bound"] = torch.cat([metadata.seq_lens_cpu_upper_bound, seq_lens])
    if metadata.is_prefilling is not None:
        none = torch.zeros(len(lens), dtype=torch.bool)
        changes["is_prefilling"] = torch.cat([metadata.is_prefilling, none])
    return metadata.replace(**changes)


def copy_blocks(kv_caches: Iterable[torch.Tensor], pairs: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks, pairs of (source, destination), in the cache of every layer; blocks are dimension 0."""
    wanted = list(pairs)
    for cache in kv_caches:
        for source, destination in wanted:
            cache[destination].copy_(cache[source])

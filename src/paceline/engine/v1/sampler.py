"""The exact keyed sampler: every row of logits is turned into the token that the shared dice decide.

Owns the step from target logits to output tokens inside the worker. Invariant: the token of a row depends on that row's
logits, the request's sampling options, its key and the token's position alone; drafts decide only how many rows there
are. A draft token is accepted if and only if it equals the row's token (SpecActor's exact matching); no rejection
sampling, hence no correction term and no random state.

A request with several draft paths (path_runner.py) has several runs of rows and takes the run that goes furthest; since
every run decides by the same dice, the others are prefixes of it.

Sampling options are applied row by row with vLLM's own operations, on an expanded view in which each row is a request
of its own whose output ends with the draft tokens before it. Differs from vLLM: min-p and logit bias also work under
speculation, because nothing here needs a distribution of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline import dice
from paceline.engine.compat import (
    LogitBiasLogitsProcessor,
    LogprobsTensors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SamplerOutput,
    SamplingMetadata,
    apply_all_penalties,
    apply_bad_words,
    apply_top_k_top_p_pytorch,
)
from paceline.types import Int32Array, Int64Array, UInt64Array

GREEDY_EPS = 1e-5
"""Temperatures below this sample greedily, as in vLLM."""

PLACEHOLDER = dice.NO_TOKEN
"""Fills the output table where a request has no token (vLLM's own convention): behind the first rejection, and from a
row on from which nothing can be drawn."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step's logits: path-major, each path's draft rows first, its bonus row last.

    Path r is the one path that request r always has; alternatives of any requests follow (path_runner.py).
    """

    requests: Int64Array  # [num_rows] index of the request in the batch
    paths: Int64Array  # [num_rows] index of the path
    offsets: Int64Array  # [num_rows] draft tokens before this row
    positions: Int64Array  # [num_rows] absolute position of the token that the row decides
    num_drafts: Int64Array  # [num_paths]
    owners: Int64Array  # [num_paths] request of each path
    first: Int64Array  # [num_paths] first row of each path

    @staticmethod
    def of(num_drafts: Int64Array, next_positions: Int64Array, owners: Int64Array | None = None) -> Rows:
        """Lay out the rows of paths with `num_drafts` draft tokens each.

        Args:
            num_drafts: [num_paths]
            next_positions: where each request's next token lands. [num_requests]
            owners: request of each path, requests in order first; None: one path each. [num_paths]
        """
        if owners is None:
            owners = np.arange(len(num_drafts))
        width = num_drafts + 1
        paths = np.repeat(np.arange(len(width)), width)
        first = np.cumsum(width) - width
        offsets = np.arange(len(paths)) - first[paths]
        requests = owners[paths]
        positions = next_positions[requests] + offsets
        return Rows(requests, paths, offsets, positions, num_drafts, owners, first)

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return int(self.owners.max(initial=-1)) + 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the dice decided in one step."""

    table: Int32Array  # [num_requests, 1 + max_num_drafts] output tokens, then PLACEHOLDER
    accepted: Int64Array  # [num_requests] accepted draft tokens
    winners: Int64Array  # [num_requests] the path they come from
    failed: Int64Array  # [num_failed] rows of the step from which nothing can be drawn; usually none


def verify(tokens: Int64Array, drafts: Int64Array, num_drafts: Int64Array) -> Verdict:
    """Accept each path's draft tokens up to the first that differs from the row's token; one path per request.

    Args:
        tokens: what the dice decided. [num_rows] int64, path-major
        drafts: what was drafted. [num_draft_tokens] int64, path-major
        num_drafts: draft tokens of each path. [num_requests] int64
    """
    every, failed = np.arange(len(num_drafts)), np.flatnonzero(tokens == dice.NO_TOKEN)
    longest = int(num_drafts.max(initial=0))
    column = np.arange(longest + 1)
    filled = column <= num_drafts[:, None]
    table = np.full(filled.shape, PLACEHOLDER, dtype=np.int32)
    table[filled] = tokens
    if longest == 0:
        return Verdict(table, np.zeros(len(num_drafts), dtype=np.int64), every, failed)
    drafted = np.full((len(num_drafts), longest), PLACEHOLDER - 1, dtype=np.int64)
    drafted[filled[:, 1:]] = drafts
    accepted = np.cumprod(drafted == table[:, :-1], axis=1).sum(axis=1)
    table[column > accepted[:, None]] = PLACEHOLDER
    return Verdict(table, accepted, every, failed)


def elect(paths: Verdict, owners: Int64Array) -> Verdict:
    """Give each request its path with the most accepted tokens; ties go to the request's first path.

    Args:
        paths: the verdict on each path for itself.
        owners: request of each path; every request has one at least. [num_paths] int64
    """
    order = np.lexsort((-paths.accepted, owners))  # stable: equal paths stay in their order
    winners = order[np.unique(owners[order], return_index=True)[1]]
    return Verdict(paths.table[winners], paths.accepted[winners], winners, paths.failed)


def throw(
    logits: torch.Tensor, keys: UInt64Array, positions: Int64Array, temperatures: NDArray[np.float32]
) -> Int64Array:
    """Decide each row with the shared dice.

    Args:
        logits: [num_rows, vocab_size] float32
        keys: [num_rows] uint64
        positions: absolute position of each row's token. [num_rows] int64
        temperatures: [num_rows] float32, 0 = greedy

    Returns the tokens [num_rows], NO_TOKEN for a row from which nothing can be drawn.
    """
    return dice.sample(logits.contiguous().numpy(), keys, positions, temperatures)


class KeyedSampler:
    """Turns logits into tokens for one model runner; holds no state between steps."""

    def __init__(self, logprobs_mode: str) -> None:
        self.processed = logprobs_mode.startswith("processed")
        self.as_logits = logprobs_mode.endswith("logits")

    def sample(
        self,
        logits: torch.Tensor,
        rows: Rows,
        drafts: Int64Array,
        keys: UInt64Array,
        metadata: SamplingMetadata,
        outputs: Sequence[Sequence[int]],
    ) -> tuple[SamplerOutput, Verdict]:
        """Decide all rows of a step.

        Args:
            logits: the target's logits. [num_rows, vocab_size], changed in place
            rows: their layout
            drafts: draft tokens. [num_draft_tokens] int64
            keys: dice key of each request. [num_requests] uint64
            metadata: vLLM's sampling options of the batch
            outputs: tokens that each request has generated so far, read only when an option needs them
        """
        raw = logits.to(torch.float32)
        wants_logprobs = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
        keep_raw = wants_logprobs and not self.processed
        work = raw.clone() if keep_raw and _changes_logits(metadata) else raw
        work = apply_options(work, rows, drafts, metadata, outputs)
        temperatures = _temperatures(metadata, rows.num_requests)[rows.requests]
        filtered = _has_filters(metadata)
        if filtered or (wants_logprobs and self.processed):
            work = scale(work, temperatures)
            work = apply_filters(work, rows, metadata)
            effective = np.where(temperatures < GREEDY_EPS, 0.0, 1.0).astype(np.float32)
        else:
            effective = np.where(temperatures < GREEDY_EPS, np.float32(0.0), temperatures)
        tokens = throw(work, keys[rows.requests], rows.positions, effective)
        verdict = verify(tokens, drafts, rows.num_drafts)
        if len(rows.owners) > rows.num_requests:
            verdict = elect(verdict, rows.owners)
        logprobs = None
        if wants_logprobs:
            logprobs = self._gather(work if self.processed else raw, rows, verdict, metadata)
        return SamplerOutput(torch.from_numpy(verdict.table), logprobs), verdict

    def _gather(
        self, logits: torch.Tensor, rows: Rows, verdict: Verdict, metadata: SamplingMetadata
    ) -> LogprobsTensors:
        """Log-probabilities of the output table's tokens: [num_requests * (1 + max_num_drafts), 1 + num_logprobs].

        Computed where the table has a token alone: few requests have drafts, and their drafts set its width.
        """
        filled = verdict.table != PLACEHOLDER
        requests, columns = np.nonzero(filled)
        index = rows.first[verdict.winners][requests] + columns
        chosen = torch.from_numpy(verdict.table[filled].astype(np.int64))
        values = logits[torch.from_numpy(index)]
        if not self.as_logits:
            values = values.log_softmax(dim=-1, dtype=torch.float32)
        own = values.gather(-1, chosen[:, None])
        ranks = (values >= own).sum(-1)
        found, ids = values.topk(metadata.max_num_logprobs or 0, dim=-1)
        if metadata.logprob_token_ids:
            ids, found = _name(values, ids, found, requests, metadata.logprob_token_ids)
        ids, found = torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, found], dim=1)
        where = torch.from_numpy(np.flatnonzero(filled))
        return LogprobsTensors(
            *(_spread(part, where, filled.size) for part in (ids.to(torch.int32), found, ranks))
        )


def _spread(values: torch.Tensor, where: torch.Tensor, size: int) -> torch.Tensor:
    """Values of some rows at their places among `size` rows, zeros elsewhere."""
    if len(values) == size:
        return values
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, where, values)


def _name(
    values: torch.Tensor,
    ids: torch.Tensor,
    found: torch.Tensor,
    requests: Int64Array,
    wanted: dict[int, list[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the ids that single requests asked for in place of the likeliest ones, -inf where they are fewer.

    Differs from vLLM, which leaves the other requests of the batch without their likeliest ids.

    Args:
        values: log-probabilities. [num_rows, vocab_size]
        ids, found: the likeliest ids and theirs. [num_rows, num_logprobs]
        requests: of each row. [num_rows]
        wanted: ids by request.
    """
    missing = max(max(map(len, wanted.values())) - ids.shape[1], 0)
    ids, found = F.pad(ids, (0, missing)), F.pad(found, (0, missing), value=float("-inf"))
    for request, tokens in wanted.items():
        rows = torch.from_numpy(np.flatnonzero(requests == request))
        named = torch.as_tensor(tokens, dtype=torch.int64)
        ids[rows], found[rows] = 0, float("-inf")
        ids[rows, : len(tokens)] = named
        found[rows, : len(tokens)] = values[rows[:, None], named]
    return ids, found


def _temperatures(metadata: SamplingMetadata, num_requests: int) -> NDArray[np.float32]:
    if metadata.temperature is None:
        return np.zeros(num_requests, dtype=np.float32)
    result: NDArray[np.float32] = metadata.temperature[:num_requests].numpy()
    return result


def scale(logits: torch.Tensor, temperatures: NDArray[np.float32]) -> torch.Tensor:
    """Divide each row by its temperature (greedy rows by 1), in float32 as vLLM does, in place."""
    if np.all((temperatures == 1.0) | (temperatures < GREEDY_EPS)):
        return logits
    divisor = np.where(temperatures < GREEDY_EPS, np.float32(1.0), temperatures)
    return logits.div_(torch.from_numpy(divisor)[:, None])


def _min_p(metadata: SamplingMetadata) -> torch.Tensor | None:
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            return processor.min_p
    return None


def _has_filters(metadata: SamplingMetadata) -> bool:
    if metadata.all_greedy:
        return False
    return metadata.top_k is not None or metadata.top_p is not None or _min_p(metadata) is not None


def apply_filters(logits: torch.Tensor, rows: Rows, metadata: SamplingMetadata) -> torch.Tensor:
    """Mask what min-p, top-k and top-p exclude, in vLLM's order, on temperature-scaled logits."""
    if not _has_filters(metadata):
        return logits
    index = torch.from_numpy(rows.requests)
    if (min_p := _min_p(metadata)) is not None:
        probabilities = logits.softmax(dim=-1)
        bound = probabilities.amax(dim=-1, keepdim=True) * min_p[index]
        logits = logits.masked_fill_(probabilities < bound, float("-inf"))
    top_k = None if metadata.top_k is None else metadata.top_k[index]
    if metadata.top_p is None:
        return apply_top_k_top_p_pytorch(logits, top_k, None, allow_cpu_sync=True)
    top_p = metadata.top_p[index]
    # A row without a top-p of its own would lose the ids whose probability is nothing, for its neighbours' sake.
    for is_cut in (True, False):
        rows_in = (top_p < 1.0) == is_cut
        own_k = None if top_k is None else top_k[rows_in]
        if rows_in.any() and (is_cut or own_k is not None):
            own_p = top_p[rows_in] if is_cut else None
            logits[rows_in] = apply_top_k_top_p_pytorch(logits[rows_in], own_k, own_p, allow_cpu_sync=True)
    return logits


def _changes_logits(metadata: SamplingMetadata) -> bool:
    """Whether any option rewrites logits in place before or after temperature."""
    return (
        _has_filters(metadata)
        or not metadata.no_penalties
        or bool(metadata.bad_words_token_ids)
        or metadata.allowed_token_ids_mask is not None
        or any(_is_active(p) for p in metadata.logitsprocs.non_argmax_invariant)
    )


def _is_active(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return isinstance(processor, LogitBiasLogitsProcessor) and bool(processor.biases)


def apply_options(
    logits: torch.Tensor,
    rows: Rows,
    drafts: Int64Array,
    metadata: SamplingMetadata,
    outputs: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Apply allowed ids, bad words, min tokens, logit bias and penalties, in the order of vLLM's own sampler."""
    if metadata.allowed_token_ids_mask is not None:
        mask = metadata.allowed_token_ids_mask[torch.from_numpy(rows.requests)]
        logits = logits.masked_fill_(mask, float("-inf"))
    history: list[list[int]] = []
    if metadata.bad_words_token_ids or not metadata.no_penalties:
        history = expand_history(rows, drafts, outputs)
    if metadata.bad_words_token_ids:
        by_row = {
            row: metadata.bad_words_token_ids[request]
            for row, request in enumerate(rows.requests.tolist())
            if request in metadata.bad_words_token_ids
        }
        apply_bad_words(logits, by_row, history)
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            logits = _apply_min_tokens(logits, rows, processor)
        elif isinstance(processor, LogitBiasLogitsProcessor):
            logits = _apply_logit_bias(logits, rows, processor)
    if not metadata.no_penalties:
        index = torch.from_numpy(rows.requests)
        assert metadata.prompt_token_ids is not None
        logits = apply_all_penalties(
            logits,
            metadata.prompt_token_ids[index],
            metadata.presence_penalties[index],
            metadata.frequency_penalties[index],
            metadata.repetition_penalties[index],
            history,
        )
    return logits


def expand_history(rows: Rows, drafts: Int64Array, outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Output tokens as each row sees them: what the request generated, then the draft tokens before the row."""
    starts = (np.cumsum(rows.num_drafts) - rows.num_drafts)[rows.paths].tolist()
    flat = drafts.tolist()
    return [
        [*outputs[request], *flat[start : start + offset]]
        for request, start, offset in zip(rows.requests.tolist(), starts, rows.offsets.tolist(), strict=True)
    ]


def _apply_min_tokens(logits: torch.Tensor, rows: Rows, processor: MinTokensLogitsProcessor) -> torch.Tensor:
    where: list[tuple[int, int]] = []
    restore: list[tuple[int, int]] = []
    for request, (minimum, generated, stops, structured) in processor.min_toks.items():
        early = (rows.requests == request) & (rows.offsets < minimum - len(generated))
        cells = [(row, stop) for row in np.flatnonzero(early).tolist() for stop in stops]
        where += cells
        restore += cells if structured else []
    if not where:
        return logits
    to_index = processor._device_tensor
    pair = tuple(to_index(list(axis), torch.int64) for axis in zip(*where, strict=True))
    if restore:
        back = tuple(to_index(list(axis), torch.int64) for axis in zip(*restore, strict=True))
        processor._mask_stop_token_logits(logits, pair, back)
        return logits
    return logits.index_put_(pair, processor.neg_inf_tensor)


def _apply_logit_bias(logits: torch.Tensor, rows: Rows, processor: LogitBiasLogitsProcessor) -> torch.Tensor:
    for request, bias in processor.biases.items():
        of_request = torch.from_numpy(np.flatnonzero(rows.requests == request))
        ids = torch.tensor(list(bias))
        values = torch.tensor(list(bias.values()), dtype=torch.float32)
        logits[of_request[:, None], ids[None, :]] += values
    return logits

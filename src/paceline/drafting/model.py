"""The small-model drafter: a Hugging Face causal LM of the target's tokenizer drafts with the shared dice.

Owns the draft model, its key/value rows (`model_cache`) and the estimate of how likely each proposal is
accepted. The proposal at position p is argmax_v(beta * log q_v + G(key, p, v)) with q = softmax(logits / T)
and the target's own noise G (DESIGN 1; Daliri, Musco, Suresh 2024, "Coupling without communication"); as
adding a constant to a row moves no argmax, that is the keyed sample of the raw logits at temperature T /
beta. beta = inf or T = 0 is greedy.

Invariant: drafts decide when a token is computed, never which; a wrong or stale cache row costs acceptance
only. Called by the engine's proposer right after sampling, in the worker process; not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from paceline.drafting.checkpoint import check_settings, check_vocabulary, check_weights, load_model
from paceline.drafting.lean_decoder import LeanDecoder, lean_decoder
from paceline.drafting.model_cache import (
    PADDED_QUERY,
    PackedStep,
    RowBook,
    RowCache,
    common_prefix,
    ranges,
)
from paceline.drafting.native_decoder import NativeDecoder, native_decoder
from paceline.drafting.proposal import (
    NO_GRID,
    NUM_CELLS,
    Draft,
    check_draft,
    grow_levels,
    prior_calibration,
)
from paceline.errors import CheckpointError, PacelineError
from paceline.types import (
    DraftGrowth,
    DraftOrder,
    DraftQuery,
    Float32Array,
    Int32Array,
    Int64Array,
    ModelBatch,
)

LOGGER = logging.getLogger(__name__)

PREFILL_CHUNK_TOKENS = 512
"""Most tokens that one forward pass feeds while rows catch up."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.int8: 0.15}
"""Difference of another form's logits from transformers', as a share of the largest, that its rounding explains."""


class ModelDrafter:
    """Drafts for many responses at once with a small causal LM and the shared dice.

    checkpoint: folder of a Hugging Face causal LM whose attention goes through transformers' attention
    interface and whose cache is per token (Llama, Qwen2, Qwen3 and their kin; full attention). Loaded from
    local files only.
    max_model_len: longest context in tokens, cut to what the checkpoint supports; longer contexts are not
    drafted for.
    max_requests: cache rows; memory is num_layers * 2 * max_requests * max_model_len * num_kv_heads *
    head_dim values (on the CPU only the part in use becomes resident).
    dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
    vocab_size: the target's, checked against the checkpoint's; ids beyond the smaller of the two are never
    proposed.

    Raises CheckpointError (missing, incomplete, unsupported, or a vocabulary of another size), ConfigError (settings).
    A drafter of another tokenizer with as many ids is not noticed: its drafts are useless, the tokens the same. The
    commands compare the tokenizers (`commands.checkpoint.check_drafter`).
    """

    NUM_CELLS: ClassVar[int] = NUM_CELLS
    prior_calibration = staticmethod(prior_calibration)

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        max_model_len: int,
        max_requests: int,
        dtype: str = "auto",
        vocab_size: int | None = None,
    ) -> None:
        check_settings(max_model_len, max_requests, dtype)
        self.checkpoint = Path(checkpoint)
        self._model = load_model(self.checkpoint, dtype)
        config = self._model.config.get_text_config()
        check_vocabulary(self.checkpoint, config.vocab_size, vocab_size)
        self._num_context_ids: int = vocab_size or config.vocab_size
        self.vocab_size: int = min(config.vocab_size, vocab_size or config.vocab_size)
        limit = getattr(config, "max_position_embeddings", None)
        self.max_model_len: int = min(max_model_len, limit or max_model_len)
        self._book = RowBook(max_requests, self.max_model_len)
        self._cache = RowCache(max_requests, self.max_model_len)
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.paceline_rows = self._cache  # where attend_rows finds it
        self._lean: LeanDecoder | None = None
        self._native: NativeDecoder | None = None
        self._refused: set[int] = set()  # responses whose context gives NaN; they get no drafts
        self._warm_up()

    def draft(
        self,
        contexts: Sequence[Int32Array],
        query: DraftQuery,
        depth: int,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        level_costs: Float32Array | None = None,
    ) -> tuple[ModelBatch, DraftGrowth]:
        """Propose up to `depth` tokens per request. Returns the drafts and what growing them took.

        contexts: all tokens of each request so far, prompt and response, int32; `query.positions[r]` is their
        number. A row ends at min(depth, query.max_tokens, max_model_len - context), or after the token that
        takes its path probability below `floor` (that token was paid for and is kept). Requests beyond
        `max_requests` rows, and contexts that do not fit, get no draft. All rows end where the next level
        over m of them would promise fewer accepted tokens than `level_costs[m]` (None: levels cost nothing).
        A draft ends where the model gives NaN; a response whose context does so is not drafted for again.
        calibration: acceptance per cell, [NUM_CELLS]; sharpness > 0.
        """
        check_draft(sharpness, calibration)
        limits = np.minimum(np.minimum(query.max_tokens, depth), self.max_model_len - query.positions)
        if self._refused:
            limits[[response in self._refused for response in query.responses.tolist()]] = 0
        requests = np.flatnonzero(limits > 0)
        rows = self._book.assign(query.responses[requests])
        order = np.argsort(rows, kind="stable")[int((rows < 0).sum()) :]
        draft = Draft(
            query, limits, max(depth, 0), sharpness, sharpness_grid, calibration, floor, level_costs
        )
        growth = DraftGrowth()
        if len(order):
            with torch.inference_mode():
                growth = self._grow(draft, requests[order], rows[order], contexts)
                for request in np.flatnonzero(draft.failed).tolist():
                    self._clear_nan(draft, request)
        return draft.batch(), growth

    def _clear_nan(self, draft: Draft, request: int) -> None:
        """Take NaN out of a row whose draft has ended in it: a masked key weighs 0, and 0 * NaN would spoil others."""
        response, length = int(draft.query.responses[request]), int(draft.query.positions[request])
        if not draft.num_tokens[request]:  # the context's, not the draft's own
            if not self._refused:
                LOGGER.warning(
                    "%s gives NaN for a response: such responses go without its drafts", self.checkpoint
                )
            self._refused.add(response)
            length = 0
        row = self._book.row(response)
        assert row is not None
        self._book.cut(row, length)
        self._cache.clear_behind(row, length)

    def draft_behind(
        self, query: DraftQuery, drafted: list[Int32Array], order: DraftOrder
    ) -> tuple[ModelBatch, DraftGrowth]:
        """Draft on behind other tokens than those of the last draft (`branches.TreeDrafter`)."""
        starts = query.positions - np.fromiter(map(len, drafted), np.int64, len(drafted))
        rows = np.array([self._book.row(response) for response in query.responses.tolist()], np.int64)
        contexts = [
            np.concatenate([self._book.tokens[row, :start], tokens])
            for row, start, tokens in zip(rows.tolist(), starts.tolist(), drafted, strict=True)
        ]
        made, growth = self.draft(
            contexts,
            query,
            int(query.max_tokens.max()),
            sharpness=order.sharpness,
            sharpness_grid=NO_GRID,
            calibration=order.calibration,
            floor=0.0,
        )
        self._book.certain[rows] = np.minimum(self._book.certain[rows], starts)
        return made, growth

    def rewind(self, response: int, num_tokens: int) -> None:
        """Of the contexts that were given for a response the first `num_tokens` tokens stand; the others were drafted.

        Only for who passes drafted tokens as context, to draft on behind them; unknown ids are ignored.
        """
        if (row := self._book.row(response)) is not None:
            self._book.cut(row, num_tokens)

    def forget(self, responses: Iterable[int]) -> None:
        """Free the cache rows of finished responses; unknown ids are ignored."""
        with torch.inference_mode():
            for response in responses:
                self._refused.discard(response)
                move = self._book.close(int(response))
                if move is not None:
                    self._copy_row(*move, known=0, length=int(self._book.cached[move[1]]))

    def fork(self, response: int, branch: int, num_tokens: int) -> None:
        """Give `branch`, a number like a response's, what is cached of the first `num_tokens` tokens of a response.

        What both have in common stays where it is, so that a row that branches off again and again costs what is new.
        """
        self._refused.discard(branch)
        [row] = self._book.assign(np.array([branch], np.int64))
        source = self._book.row(response)
        if row >= 0 and source is not None:
            known, length = self._book.fork(source, int(row), num_tokens)
            with torch.inference_mode():
                self._copy_row(source, int(row), known, length)

    def reload(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over new weights (Hugging Face names, all of them, tied copies optional); drops the cache.

        Raises CheckpointError for a missing or unknown name, another shape or NaN, before any weight is changed.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False))
        fresh = dict(named_tensors)
        check_weights(own, fresh)
        with torch.inference_mode():
            for name, tensor in fresh.items():
                own[name].copy_(tensor)
        self._book.clear()
        self._cache.clear()
        self._refused.clear()
        self._warm_up()

    def _warm_up(self) -> None:
        """A few tokens through the model: allocates the cache and proves that the architecture fits.

        The lean form, and then the native one, is taken if it gives the same logits behind them. The native one has
        its own cache.
        """
        self._lean = self._native = None
        count = min(8, self.max_model_len)
        ids = np.linspace(0, self.vocab_size - 1, count).astype(np.int64)
        row = np.zeros(1, np.int64)
        try:
            with torch.inference_mode():
                logits = self._forward(row, row, row + count, ids)
                self._check_layers()
                self._lean = lean_decoder(self._model, self.max_model_len)
                if self._lean is not None and not _agrees(
                    logits, self._forward(row, row, row + count, ids), self._model.dtype
                ):
                    self._lean = None
                if self._lean is not None:
                    self._native = native_decoder(
                        self._lean, self.vocab_size, self._cache.num_kv_heads(0), self._cache.max_requests
                    )
                if self._native is not None and not _agrees(
                    logits, self._forward(row, row, row + count, ids), self._native.weight_dtype
                ):
                    self._native = None
                if self._native is not None:
                    self._cache.clear()
        except PacelineError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.checkpoint}: {type(self._model).__name__} does not run with a row cache ({error}): "
                "choose a full-attention decoder such as Llama, Qwen2 or Qwen3"
            ) from error
        assert logits.shape == (1, self.vocab_size)

    def _check_layers(self) -> None:
        layers = set(range(self._model.config.get_text_config().num_hidden_layers))
        if self._cache.layers != layers or self._cache.attended != layers:
            raise CheckpointError(
                f"{self.checkpoint}: only {len(self._cache.attended)} of the {len(layers)} layers of "
                f"{type(self._model).__name__} use the standard attention interface: "
                "choose a full-attention decoder such as Llama, Qwen2 or Qwen3"
            )

    def _forward(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array, ids: Int64Array
    ) -> torch.Tensor:
        """Feed `counts[i]` tokens to row i from position `starts[i]` on; ids are packed, rows ascend.

        Returns the logits after each row's last token, [num_rows, vocab_size] float32.
        """
        if self._native is not None:
            return self._native.logits(rows, starts, counts, ids)
        step = PackedStep(rows, starts, counts, self.max_model_len, self._model.dtype)
        self._cache.step = step
        every_token_last = len(ids) == len(rows)
        packed = torch.from_numpy(ids)
        if self._lean is not None:
            made = self._lean.logits(packed, step, self._cache, last_only=not every_token_last)
            return made[:, : self.vocab_size].float().contiguous()
        output = self._model(
            input_ids=packed.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if every_token_last else step.last,
        )
        logits: torch.Tensor = output.logits[0, :, : self.vocab_size].float().contiguous()
        return logits

    def _catch_up(self, rows: Int64Array, contexts: list[Int32Array]) -> Int64Array:
        """Bring every row up to its last few tokens; returns how many it has cached. [num_rows]"""
        book = self._book
        pairs = zip(rows.tolist(), contexts, strict=True)
        cached = np.array([book.match(row, context) for row, context in pairs], np.int64)
        lengths = np.fromiter(map(len, contexts), np.int64, len(contexts))
        if (lengths - cached > PADDED_QUERY).any():
            self._prefill(rows, contexts, cached, lengths)
        return cached

    def _feed(self, rows: Int64Array, starts: Int64Array, pieces: list[Int32Array]) -> torch.Tensor:
        """Forward pieces of known context and book them as cached."""
        counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
        ids = self._known_ids(np.concatenate(pieces).astype(np.int64))
        for row, start, piece in zip(rows.tolist(), starts.tolist(), pieces, strict=True):
            self._book.tokens[row, start : start + len(piece)] = piece
        logits = self._forward(rows, starts, counts, ids)
        self._book.cached[rows] = self._book.certain[rows] = starts + counts
        return logits

    def _known_ids(self, ids: Int64Array) -> Int64Array:
        """Context ids as the drafter can embed them: the target's padding ids, which it lacks, become its last id."""
        if ids.size and (ids.min() < 0 or ids.max() >= self._num_context_ids):
            wrong = int(ids[(ids < 0) | (ids >= self._num_context_ids)][0])
            raise CheckpointError(
                f"{self.checkpoint}: token id {wrong} of a context is outside the vocabulary of "
                f"{self._num_context_ids}: choose a drafter with the target's tokenizer"
            )
        return np.minimum(ids, self.vocab_size - 1)

    def _prefill(
        self, rows: Int64Array, contexts: list[Int32Array], cached: Int64Array, lengths: Int64Array
    ) -> None:
        """Bring rows that lack more than a few tokens up to their last one; updates `cached` in place.

        Of rows that lack the same prompt the first computes it and the others copy it.
        """
        lacking = np.flatnonzero(lengths - cached > PADDED_QUERY).tolist()
        leaders, followers = _split_by_prefix(lacking, contexts)
        for wave in (leaders, followers):
            for index in wave:
                self._adopt(int(rows[index]), contexts[index])
                cached[index] = self._book.cached[rows[index]]
            self._prefill_chunks(wave, rows, contexts, cached, lengths)

    def _adopt(self, row: int, context: Int32Array) -> None:
        """Copy the prefix that another row already has, where it is longer than the own one."""
        donor, shared = self._book.donor(context)
        if shared > self._book.cached[row]:
            self._copy_row(donor, row, 0, shared)
            self._book.tokens[row, :shared] = context[:shared]
            self._book.cached[row] = self._book.certain[row] = shared

    def _copy_row(self, source: int, target: int, known: int, length: int) -> None:
        """Copy the first `length` cached tokens of one row into another, which has the first `known` already."""
        cache = self._cache if self._native is None else self._native
        cache.copy(source, target, known, length)

    def _prefill_chunks(
        self,
        wave: list[int],
        rows: Int64Array,
        contexts: list[Int32Array],
        cached: Int64Array,
        lengths: Int64Array,
    ) -> None:
        """Forward passes of at most PREFILL_CHUNK_TOKENS tokens until each row lacks its last token only."""
        wave = [index for index in wave if cached[index] < lengths[index] - 1]
        while wave:
            room, chunk, pieces = PREFILL_CHUNK_TOKENS, [], []
            for index in wave:
                stop = min(int(lengths[index]) - 1, int(cached[index]) + room)
                if room == 0:
                    break
                chunk.append(index)
                pieces.append(contexts[index][cached[index] : stop])
                room -= stop - int(cached[index])
            self._feed(rows[chunk], cached[chunk], pieces)
            cached[chunk] = self._book.cached[rows[chunk]]
            wave = [index for index in wave if cached[index] < lengths[index] - 1]

    def _grow(
        self, draft: Draft, requests: Int64Array, rows: Int64Array, contexts: Sequence[Int32Array]
    ) -> DraftGrowth:
        """Catch up, then propose, feed the proposals, and so on while rows may grow."""
        known = [contexts[index] for index in requests.tolist()]
        cached = self._catch_up(rows, known)
        started_s = time.perf_counter()
        pending = [context[start:] for context, start in zip(known, cached.tolist(), strict=True)]
        if self._native is not None:
            self._grow_natively(self._native, draft, requests, rows, cached, pending)
            made = draft.num_tokens[requests] + draft.failed[requests]
            return DraftGrowth(int(made.max()), int(made.sum()), time.perf_counter() - started_s)
        logits = self._feed(rows, cached, pending).numpy()

        def feed(lanes: Int64Array, level: int, tokens: Int64Array) -> Float32Array:
            growing, positions = rows[lanes], draft.query.positions[requests[lanes]] + level
            self._book.tokens[growing, positions] = tokens
            made: Float32Array = self._forward(growing, positions, np.ones_like(growing), tokens).numpy()
            self._book.cached[growing] = positions + 1
            return made

        num_levels, num_rows = grow_levels(draft, requests, logits, feed)
        return DraftGrowth(num_levels, num_rows, time.perf_counter() - started_s)

    def _grow_natively(
        self,
        native: NativeDecoder,
        draft: Draft,
        requests: Int64Array,
        rows: Int64Array,
        cached: Int64Array,
        pending: list[Int32Array],
    ) -> None:
        """Feed the known tokens that the rows lack and grow the drafts in one call; book what the rows hold then."""
        counts = np.fromiter(map(len, pending), np.int64, len(pending))
        ids = np.concatenate(pending)
        native.grow(draft, requests, rows, cached, counts, self._known_ids(ids.astype(np.int64)))
        lengths = cached + counts
        fed = (
            draft.num_tokens[requests].astype(np.int64) - ~draft.failed[requests]
        )  # the last proposal is not fed
        book = self._book
        book.tokens[np.repeat(rows, counts), ranges(cached, counts)] = ids
        drafted = np.arange(draft.depth) < fed[:, None]
        book.tokens[np.repeat(rows, fed), ranges(lengths, fed)] = draft.tokens[requests][drafted]
        book.certain[rows], book.cached[rows] = lengths, lengths + fed


def _agrees(logits: torch.Tensor, again: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether another form's logits differ by no more than rounding to `dtype` explains."""
    scale = float(logits.abs().max())
    return scale > 0 and float((again - logits).abs().max()) <= TOLERANCE[dtype] * scale


def _split_by_prefix(indices: list[int], contexts: list[Int32Array]) -> tuple[list[int], list[int]]:
    """Leaders, and followers that share at least half of their context with a leader before them."""
    leaders: list[int] = []
    followers: list[int] = []
    for index in indices:
        own = contexts[index]
        for leader in leaders:
            length = min(len(own), len(contexts[leader]))
            if 2 * common_prefix(own[:length], contexts[leader][:length]) >= len(own):
                followers.append(index)
                break
        else:
            leaders.append(index)
    return leaders, followers

"""The draft head: an EAGLE or EAGLE-3 head drafts with the shared dice, fed by the target's own hidden states.

In each step it is given the states of the tokens that were decided, makes its keys and values of them, and drafts on by
feeding itself. The next step's states overwrite what it fed itself, so that verification leaves in its cache what
training has shown it (distillation/chain_attention.py).

States are missing where tokens came from the prefix cache or the KV pool, or from before the last steps of a rest;
after new weights all keys are void. Nothing is rebuilt: its context then begins anew, with the next state that there
is. A head reads what came before out of the target's state, so that a context of some tokens costs it little, if it has
learned from pieces of responses (distillation/packing.py). Positions are counted from where its context begins; rotary
attention knows differences alone.

Invariant: drafts decide when a token is computed, never which. Called by the engine's proposer; not thread-safe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafting.checkpoint import check_settings, check_weights
from paceline.drafting.head_decoder import load_head
from paceline.drafting.model_cache import RowTable, ranges
from paceline.drafting.proposal import NO_GRID, Draft, check_draft, grow_levels
from paceline.drafting.token_states import TokenStates, join_steps
from paceline.types import (
    DraftGrowth,
    DraftOrder,
    DraftQuery,
    Float32Array,
    Int32Array,
    Int64Array,
    ModelBatch,
)

MISSED_STEPS, MISSED_TOKENS = 16, 32
"""Steps without a draft whose states are kept for the next one, and the last tokens of a request in each."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a head borrows from the running target, whatever its weights are at the moment."""

    hidden_size: int
    vocab_size: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Token ids [num_tokens] int64 -> [num_tokens, hidden]."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Hidden states [num_rows, hidden] -> [num_rows, at least vocab]."""


class HeadDrafter:
    """Drafts for many responses at once with an EAGLE or EAGLE-3 head and the shared dice.

    checkpoint: folder with the head alone (`paceline drafter export`). The other arguments are `model.ModelDrafter`'s.
    Raises CheckpointError for another kind of checkpoint or one of another target, ConfigError for settings.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        target: TargetEnds,
        *,
        max_model_len: int,
        max_requests: int,
        dtype: str = "auto",
    ) -> None:
        check_settings(max_model_len, max_requests, dtype)
        self.checkpoint = Path(checkpoint)
        self.max_model_len = max_model_len
        self._target = target
        self._decoder = load_head(
            self.checkpoint,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            max_model_len=max_model_len,
            max_requests=max_requests,
            dtype=dtype,
        )
        self._rows = RowTable(max_requests)
        self._wanted = self._rows.add_column()  # position of the token whose state comes next
        self._missed: deque[TokenStates] = deque(maxlen=MISSED_STEPS)
        self._lanes: dict[int, int] = {}  # of the responses of the last draft
        self._levels: list[torch.Tensor] = []  # what their draft tokens were proposed from, level by level

    def draft(
        self,
        step: TokenStates,
        query: DraftQuery,
        depth: int,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        level_costs: Float32Array | None = None,
    ) -> tuple[ModelBatch, DraftGrowth]:
        """Take over a step's states and propose up to `depth` tokens per request of `query`.

        step: what the target has just shown, prompts included; the responses of `query` are among its. The rest is
        as in `ModelDrafter.draft`. Bringing prompts into the cache is no growth.
        """
        check_draft(sharpness, calibration)
        limits = np.minimum(np.minimum(query.max_tokens, depth), self.max_model_len - query.positions)
        draft = Draft(
            query, limits, max(depth, 0), sharpness, sharpness_grid, calibration, floor, level_costs
        )
        with torch.inference_mode():
            growth = self._grow(step, draft)
            for request in np.flatnonzero(draft.failed).tolist():
                self._clear(int(query.responses[request]))
        return draft.batch(), growth

    def watch(self, step: TokenStates) -> None:
        """Take note of a step after which nothing is drafted: the next draft begins with the last of these."""
        self._missed.append(step.newest(MISSED_TOKENS))

    def _grow(self, step: TokenStates, draft: Draft) -> DraftGrowth:
        if self._missed:
            step = join_steps([*self._missed, step])
            self._missed.clear()
        fed = np.flatnonzero(self._is_finite(step) & (step.counts > 0))
        rows = self._rows.assign(step.responses[fed])
        order = np.argsort(rows, kind="stable")[int((rows < 0).sum()) :]
        fed, rows = fed[order], rows[order]
        place = {response: index for index, response in enumerate(draft.query.responses.tolist())}
        requests = np.array([place.get(response, -1) for response in step.responses[fed].tolist()], np.int64)
        drafts = np.append(draft.limits, 0)[requests] > 0
        is_prompt = step.counts[fed] > draft.depth + 1
        outputs = torch.empty(len(fed), self._target.hidden_size, dtype=self._decoder.layer.dtype)
        self._feed(step, fed, rows, np.flatnonzero(is_prompt), outputs)
        started_s = time.perf_counter()
        self._feed(step, fed, rows, np.flatnonzero(~is_prompt), outputs)
        requests, rows, outputs = requests[drafts], rows[drafts], outputs[torch.from_numpy(drafts)]
        if not len(requests):
            return DraftGrowth()
        responses = draft.query.responses[requests].tolist()
        self._lanes, self._levels = {response: lane for lane, response in enumerate(responses)}, []
        levels, num_rows = self._feed_itself(
            draft, requests, rows, self._rows.cached[rows], outputs, self._levels
        )
        return DraftGrowth(levels, num_rows, time.perf_counter() - started_s)

    def _feed_itself(
        self,
        draft: Draft,
        requests: Int64Array,
        rows: Int64Array,
        starts: Int64Array,
        outputs: torch.Tensor,
        levels: list[torch.Tensor],
    ) -> tuple[int, int]:
        """Grow the drafts on from the last outputs; returns (levels, requests in all of them together).

        rows ascend; starts: where in them the first draft token goes. levels: takes the outputs of each level.
        [len(requests), hidden]
        """
        levels.append(outputs.clone())

        def feed(lanes: Int64Array, level: int, tokens: Int64Array) -> Float32Array:
            growing, kept = rows[lanes], torch.from_numpy(lanes)
            made = self._forward(growing, starts[lanes] + level, np.ones_like(growing), tokens, outputs[kept])
            outputs[kept] = made
            levels.append(outputs.clone())
            return self._logits(made)

        return grow_levels(draft, requests, self._logits(outputs), feed)

    def draft_behind(
        self, query: DraftQuery, drafted: list[Int32Array], order: DraftOrder
    ) -> tuple[ModelBatch, DraftGrowth]:
        """Draft on behind other tokens than those of the last draft (`branches.TreeDrafter`)."""
        started_s = time.perf_counter()
        depth = int(query.max_tokens.max())
        limits = np.minimum(query.max_tokens, self.max_model_len - query.positions)
        draft = Draft(query, limits, depth, order.sharpness, NO_GRID, order.calibration, 0.0, None)
        responses = query.responses.tolist()
        rows = np.array([self._rows.row(response) for response in responses], np.int64)
        requests = np.argsort(rows)
        requests = requests[limits[requests] > 0]
        if not len(requests):
            return draft.batch(), DraftGrowth()
        rows = rows[requests]
        shared = np.array([len(drafted[request]) - 1 for request in requests.tolist()])
        starts = self._rows.cached[rows] + shared
        last = np.array([drafted[request][-1] for request in requests.tolist()], np.int64)
        with torch.inference_mode():
            before = torch.stack(
                [
                    self._levels[level][self._lanes[responses[request]]]
                    for level, request in zip(shared.tolist(), requests.tolist(), strict=True)
                ]
            )
            outputs = self._forward(rows, starts, np.ones_like(rows), last, before)
            levels, num_rows = self._feed_itself(draft, requests, rows, starts + 1, outputs, [])
            for request in np.flatnonzero(draft.failed).tolist():
                self._clear(responses[request])
        return draft.batch(), DraftGrowth(levels, num_rows, time.perf_counter() - started_s)

    def _is_finite(self, step: TokenStates) -> NDArray[np.bool_]:
        """Requests without NaN in their states: a masked key weighs 0, and 0 * NaN would spoil others' rows later."""
        finite = np.ones(len(step.counts), np.bool_)
        if not torch.isfinite(step.states.sum()):
            owners = np.repeat(np.arange(len(finite)), step.counts)
            finite[owners[~torch.isfinite(step.states).all(1).numpy()]] = False
        return finite

    def _feed(
        self, step: TokenStates, fed: Int64Array, rows: Int64Array, chosen: Int64Array, outputs: torch.Tensor
    ) -> None:
        """Make keys and values of the states of some of the `fed` requests; their last outputs go into `outputs`."""
        if not len(chosen):
            return
        fed, rows = fed[chosen], rows[chosen]
        counts = step.counts[fed]
        starts = self._begin(rows, step.starts[fed])
        tokens = ranges((np.cumsum(step.counts) - step.counts)[fed], counts)
        states = self._decoder.begin(step.states[torch.from_numpy(tokens)])
        made = self._forward(rows, starts, counts, step.next_ids[tokens].astype(np.int64), states)
        outputs[torch.from_numpy(chosen)] = made[torch.from_numpy(np.cumsum(counts) - 1)]
        self._rows.cached[rows] = starts + counts
        self._wanted[rows] = step.starts[fed] + counts

    def _begin(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Where in its row each request goes on: behind what precedes `positions`; at 0 if something is missing."""
        kept = self._rows.cached[rows] - (self._wanted[rows] - positions)
        is_joined = (positions <= self._wanted[rows]) & (kept > 0)
        return np.where(is_joined, kept, 0)

    def _forward(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array, ids: Int64Array, states: torch.Tensor
    ) -> torch.Tensor:
        """Feed `counts[i]` pairs (state, token behind it) to row i from `starts[i]` on; rows ascend.

        states: of the target, or what was made for the token before. [num_tokens, hidden], as the result
        """
        embedded = self._target.embed(torch.from_numpy(ids)).to(self._decoder.layer.dtype)
        return self._decoder.forward(embedded, states.to(self._decoder.layer.dtype), rows, starts, counts)

    def _logits(self, outputs: torch.Tensor) -> Float32Array:
        made = self._target.logits(self._decoder.end(outputs))[:, : self._target.vocab_size]
        return np.ascontiguousarray(made.float().numpy())

    def _clear(self, response: int) -> None:
        """A draft ended in NaN: its row begins anew, without it."""
        row = self._rows.row(response)
        assert row is not None
        self._decoder.layer.clear(row)
        self._rows.cached[row] = 0

    def forget(self, responses: Iterable[int]) -> None:
        """Free the rows of finished responses; unknown ids are ignored."""
        with torch.inference_mode():
            for response in responses:
                if (move := self._rows.close(response)) is not None:
                    self._decoder.layer.copy(*move, known=0, length=int(self._rows.cached[move[1]]))

    def reload(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over new weights, by the checkpoint's names, all of them; contexts begin anew.

        Raises CheckpointError for a missing or unknown name, another shape or NaN, before any weight is changed.
        """
        fresh = dict(named_tensors)
        check_weights(self._decoder.weights, fresh)
        with torch.inference_mode():
            self._decoder.reload(fresh)
        self._missed.clear()
        self._rows.clear()

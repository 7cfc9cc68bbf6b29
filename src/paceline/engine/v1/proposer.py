"""The proposer that vLLM's `custom_class` method loads: it runs the model drafter, or does nothing.

Model-free drafts are made in the scheduler, just before a step is scheduled (fast_loop.py). Drafts of a small model or
a draft head are made here, right after sampling; they reach the scheduler by the same door as vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import EngineSettings
from paceline.drafting.branches import draft_branches
from paceline.drafting.synthetic import Play, PlayedDrafter
from paceline.engine.arguments import read_settings
from paceline.engine.runner import FreshDrafts
from paceline.planning.drafter_worth import LONGEST_REST
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import (
    DraftGrowth,
    DraftOrder,
    DraftPaths,
    DraftQuery,
    Int32Array,
    Int64Array,
    ModelDrafts,
)

if TYPE_CHECKING:
    import torch

    from paceline.drafting.head import TargetEnds

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)


class Proposer:
    """One per worker. `order` is set by the runner before each step: what the scheduler wants drafted after it."""

    def __init__(self, vllm_config: Any) -> None:
        self.settings: EngineSettings = read_settings(vllm_config)
        self.order: DraftOrder | None = None
        self._config = vllm_config
        self._runner: Any = None
        self._models: list[Any] = []
        self._model: Any = None  # the one of them that drafts
        self._reads_states = False  # the model drafter is a head, which has to see every step's tokens
        self._fresh: FreshDrafts | None = None
        self._num_rested = LONGEST_REST  # steps since the last draft, if there was one

    def attach(self, runner: Any) -> None:
        """Remember the model runner, whose batch says which requests to draft for."""
        self._runner = runner

    def load_model(self, target: Any, *args: Any, **kwargs: Any) -> None:
        """Load the model drafter, if one is to draft here. Raises CheckpointError when it does not fit the target."""
        folder = self.settings.model_drafter
        if folder is None or not self.settings.drafts_inside:
            return
        from paceline.drafting.drafter import is_draft_head
        from paceline.drafting.head import HeadDrafter
        from paceline.drafting.model import ModelDrafter

        options: dict[str, Any] = {
            "max_model_len": self._config.model_config.max_model_len,
            "max_requests": self._config.scheduler_config.max_num_seqs,
            "dtype": self.settings.model_drafter_dtype,
        }
        self._reads_states = is_draft_head(Path(folder))
        if self._reads_states:
            self._models = [HeadDrafter(folder, _ends(target, self._config.model_config), **options)]
        else:
            vocab_size = self._config.model_config.get_vocab_size()
            self._models = [
                ModelDrafter(name, vocab_size=vocab_size, **options) for name in self.settings.model_drafters
            ]
        self._model = self._models[0]

    def use(self, place: int, played: Play | None) -> None:
        """Draft with another of the models, by its place in the settings, between two rollouts.

        played: with another acceptance rate than its own.
        """
        model = self._models[place]
        self._model, self._fresh = model if played is None else PlayedDrafter(model, played), None

    def reload(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the model drafter other weights, between two steps (ModelDrafter.reload)."""
        self._model.reload(weights.items())
        self._fresh = None

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Called by the runner after sampling. Model drafts are kept for `take`.

        sampled_token_ids: [num_requests][0..] tokens of this step; empty for a prompt that is not finished.
        """
        if self._model is not None and self.order is not None:
            rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
            self._draft(rows[: self.order.most_requests], self.order)
            self._num_rested = 0
        elif (
            self._reads_states
            and self._num_rested < LONGEST_REST
            and not isinstance(self._model, PlayedDrafter)
        ):
            self._num_rested += 1
            self._model.watch(self._runner.token_states())
        return [[] for _ in sampled_token_ids]

    def _draft(self, rows: list[int], order: DraftOrder) -> None:
        if not rows and not self._reads_states:
            return
        started_s = time.perf_counter()
        batch = self._runner.input_batch
        states = [self._runner.requests[batch.req_ids[row]] for row in rows]
        lengths = batch.num_tokens_no_spec[rows].astype(np.int64)
        count = len(rows)
        extras = [state.sampling_params.extra_args for state in states]
        query = DraftQuery(
            groups=np.zeros(count, dtype=np.int64),
            responses=np.fromiter((extra["paceline_response"] for extra in extras), np.int64, count),
            keys=np.fromiter((extra["paceline_key"] for extra in extras), np.uint64, count),
            positions=lengths,
            temperatures=np.fromiter((s.sampling_params.temperature for s in states), np.float32, count),
            max_tokens=np.fromiter((self._room(s, order) for s in states), np.int32, count),
        )
        drafts, growth = self._model.draft(
            self._runner.token_states() if self._reads_states else self._contexts(rows, lengths),
            query,
            order.depth,
            sharpness=order.sharpness,
            sharpness_grid=GRID,
            calibration=order.calibration,
            floor=order.floor,
            level_costs=order.level_costs,
        )
        if not rows:
            return
        paths: DraftPaths | None = None
        branching = DraftGrowth()
        if order.num_paths > 1 and not isinstance(self._model, PlayedDrafter):
            paths, branching = draft_branches(self._model, query, drafts, order)
        total_s = time.perf_counter() - started_s
        made = ModelDrafts(query.responses, lengths, drafts, growth, total_s, paths, branching)
        self._fresh = FreshDrafts([batch.req_ids[row] for row in rows], [[] for _ in rows], made)

    def _contexts(self, rows: list[int], lengths: Int64Array) -> list[Int32Array]:
        tokens = self._runner.input_batch.token_ids_cpu
        return [tokens[row, :length] for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _room(self, state: Any, order: DraftOrder) -> int:
        left: int = state.sampling_params.max_tokens - len(state.output_token_ids) - 1
        return max(min(order.depth, left), 0)

    def forget(self, finished: Iterable[str]) -> None:
        """Free the model drafter's cache rows of requests that have ended."""
        if self._models:
            known = [self._runner.requests.get(name) for name in finished]
            ended = [s.sampling_params.extra_args["paceline_response"] for s in known if s is not None]
            for model in self._models:
                model.forget(ended)

    def take(self) -> FreshDrafts | None:
        """The fresh model drafts for the scheduler, once; None when there are none."""
        fresh, self._fresh = self._fresh, None
        return fresh


def _ends(target: Any, model_config: Any) -> TargetEnds:
    """The target's embedding and output head, through vLLM's own calls, which new weights reach too."""
    from paceline.drafting.head import TargetEnds

    return TargetEnds(
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        embed=target.embed_input_ids,
        logits=lambda hidden: target.compute_logits(hidden.to(model_config.dtype)),
    )

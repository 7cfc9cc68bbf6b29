"""Rollouts on one engine whose drafter is trained beside the run: in the tails of rollouts, swapped in between them.

A rollout's tail, in which few responses run, leaves cores idle. There the spot trainer (distillation/spot.py) is let
go, and stopped again when the rollout ends, because the learner needs every core. It learns from the responses of the
step before, with the newest weights; a draft head from their hidden states, which the engine keeps of a share of them.
Tokens, log-probabilities and gradients are those of a run without it.

Decisions: planning/harvest.py (when a session opens and ends, for a fleet of one worker) and planning/drafter_growth.py
(whether training pays at all).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from paceline.distillation.export import export
from paceline.distillation.fresh_drafter import lend_tokenizer, make_head, make_small_model
from paceline.distillation.methods import MethodName
from paceline.distillation.packing import Sample
from paceline.distillation.spot import SpotSettings
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.training_folder import Description, read_folder
from paceline.drafting.drafter import is_draft_head, read_fused_layers
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError
from paceline.planning import drafter_growth, harvest
from paceline.planning.drafter_growth import Growth
from paceline.planning.harvest import HarvestSettings, HarvestState
from paceline.planning.zero_acceptance import HEALTHY
from paceline.record import DrafterSession, DrafterStep, RecordWriter
from paceline.terminal.interruption import Interruption
from paceline.terminal.meter import RolloutMeter
from paceline.training.randomness import unchanged_randomness
from paceline.training.recipe import AdaptiveDrafterSection, Recipe
from paceline.training.rollouts import Rollout, WatchedRollouts, Watcher
from paceline.training.run_folder import DRAFTER, GROWN
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.fleet.journal import Journal

WORKER = "engine"
KINDS: dict[MethodName, str] = {
    "osd": "a small language model",
    "eagle": "an EAGLE head",
    "hass": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
}
STATES_BYTES = 256 << 20
"""Most memory of the hidden states of a rollout."""


class AdaptiveDrafter:
    """A drafter and its trainer. Use in `with`; at the end the drafter is in `drafter/model` of the run folder."""

    def __init__(self, recipe: Recipe, section: AdaptiveDrafterSection, folder: Path) -> None:
        """folder: of the run. Raises CheckpointError for a width that cannot be, or a drafter of another kind."""
        self.section = section
        self.is_head = section.method != "osd"
        self.is_fresh = recipe.engine.model_drafter is None
        self._target, self._folder = Path(recipe.model), folder / DRAFTER
        self.model = self._folder / GROWN
        if not self.is_fresh:
            self.model = Path(str(recipe.engine.model_drafter))
            if (found := KINDS[_method_of(self.model)]) != KINDS[section.method]:
                raise CheckpointError(
                    f"{self.model} is {found}, and adaptive_drafter.method={section.method} grows "
                    f"{KINDS[section.method]}: choose another method, or give another drafter or none"
                )
        elif not self.model.is_dir():
            with unchanged_randomness():
                self._make(recipe.seed)
        settings = SpotSettings(
            parent=os.getpid(),
            folder=str(self._folder),
            target=recipe.model,
            method=section.method,
            drafter=str(self.model),
            temperature=recipe.sampling.temperature,
            rate=section.learning_rate,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self.link = SpotLink(settings)

    def _make(self, seed: int) -> None:
        section = self.section
        if self.is_head:
            make_head(self._target, self.model, section.method, seed)
        else:
            make_small_model(self._target, self.model, section.hidden_size, section.layers, seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()
        if (found := read_folder(self._folder)) is not None:
            export(*found, self._folder / GROWN, "huggingface", str(self._target))
            if not self.is_head:
                lend_tokenizer(self._target, self._folder / GROWN)


def _method_of(folder: Path) -> MethodName:
    """A method that grows what is in a folder."""
    if not is_draft_head(folder):
        return "osd"
    return "eagle3" if read_fused_layers(folder) else "eagle"


class AdaptiveRollouts(WatchedRollouts):
    """Rollouts on one engine, with sessions in the tails of training rollouts and a newer drafter in the next one."""

    def __init__(
        self,
        engine: RolloutEngine,
        record: RecordWriter,
        watcher: Watcher,
        interruption: Interruption,
        drafter: AdaptiveDrafter,
    ) -> None:
        super().__init__(engine, record, self, interruption)
        self._outer, self._drafter, self._link = watcher, drafter, drafter.link
        self._harvest, _ = harvest.worker_up(HarvestState(), WORKER)
        self._growth = Growth()
        self._made: Description | None = None
        self._lesson: tuple[int, list[Sample]] | None = None
        self._session_begin_s, self._step = 0.0, 0
        self._link.pause()
        if drafter.is_fresh:
            engine.drop_drafter()

    def push_weights(self, weights: Iterable[tuple[str, Any]], version: int | None) -> int:
        if self._lesson is None or not self._growth.pays:
            return super().push_weights(weights, version)
        policy = dict(weights)
        pushed = super().push_weights(policy.items(), version)
        step, samples = self._lesson
        if samples:
            self._link.teach(step, policy, samples)
        self._lesson = None
        return pushed

    def run(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        step: int | None,
        journal: Journal | None = None,
    ) -> Rollout:
        if step is None:
            return super().run(requests, params, step, journal)
        is_new, before = self._swap(), self._engine.drafter_score()
        self._step = step
        self._carry_out(harvest.rollout_started(self._harvest))
        self._collect(self._growth.pays)
        try:
            rollout = super().run(requests, params, step, journal)
            samples = self._samples(rollout.responses)
            collection_s = self._engine.collection_s() if self._drafter.is_head else 0.0
        finally:
            self._carry_out(harvest.rollout_ended(self._harvest))
            self._collect(False)
        score = self._engine.drafter_score() - before
        self._growth = drafter_growth.observe(self._growth, score.acceptance, is_new)
        self._lesson = step, samples
        made = self._made
        self.record.write(
            DrafterStep(
                t_s=self.record.now_s(),
                step=step,
                version=self._engine.drafter_version,
                tried=score.tried,
                right=score.right,
                agreement=None if made is None else made.agreement,
                trained_s=made.trained_s if made else 0.0,
                trained_tokens=made.trained_tokens if made else 0,
                collected_tokens=sum(sample.num_tokens for sample in samples) if self._drafter.is_head else 0,
                collection_s=collection_s,
            )
        )
        return rollout

    def _collect(self, wanted: bool) -> None:
        """Have the engine keep hidden states from here on, or no more; a small language model learns without."""
        if self._drafter.is_head:
            share = self._drafter.section.states_share if wanted else 0.0
            self._engine.collect_states(share, STATES_BYTES)

    def _samples(self, responses: Sequence[Response]) -> list[Sample]:
        """What there is to learn from after a rollout."""
        if self._drafter.is_head:
            return self._engine.take_samples()
        return [
            Sample(ids, len(response.request.prompt), torch.empty(len(ids), 0))
            for response in responses
            if response.tokens
            for ids in (torch.tensor((*response.request.prompt, *response.tokens)),)
        ]

    def _swap(self) -> bool:
        """Give the engine the newest drafter, once it agrees often enough to be told from a dead one."""
        found = self._link.take()
        if found is None:
            return False
        weights, self._made = found
        if (self._made.agreement or 0.0) < HEALTHY:
            return False
        self._engine.push_drafter(weights)
        return True

    # -- sessions

    def show_rollout(self, meter: RolloutMeter) -> None:
        """A step has ended: has the tail begun?"""
        self._outer.show_rollout(meter)
        few = meter.num_responses - meter.num_finished <= self._drafter.section.max_running
        if few and self._harvest.is_rollout and self._growth.pays:
            self._carry_out(harvest.worker_idle(self._harvest, WORKER, HarvestSettings()))

    def _carry_out(self, decision: harvest.Decision) -> None:
        self._harvest, actions = decision
        for action in actions:
            now_s = self.record.now_s()
            if action.kind == "stop":
                self._link.pause()
                session = DrafterSession(t_start_s=self._session_begin_s, t_end_s=now_s, step=self._step)
                self.record.write(session)
            else:
                self._session_begin_s = now_s
                self._link.resume()

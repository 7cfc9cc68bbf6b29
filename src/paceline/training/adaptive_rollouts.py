"""Rollouts whose drafter is trained beside the run: in the tails of rollouts, swapped in between them.

A rollout's tail leaves cores idle: on one engine when few responses run, on a fleet when a worker has none. There the
spot trainer (distillation/spot.py) is let go, or one of several, and stopped again when the rollout ends, because the
learner needs every core. It learns from the responses of the step before, with the newest weights; a draft head from
their hidden states, which the engines keep of a share of them. Tokens, log-probabilities and gradients are those of a
run without it.

Decisions: planning/harvest.py (when a session opens and ends; drafter_sessions.py carries that out) and
planning/drafter_growth.py (whether training pays at all).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from msgspec.structs import replace

from paceline.distillation.checkpoints import written_aside
from paceline.distillation.export import export
from paceline.distillation.fresh_drafter import (
    default_width,
    lend_tokenizer,
    make_head,
    make_small_model,
    read_size,
)
from paceline.distillation.methods import MethodName
from paceline.distillation.packing import Sample
from paceline.distillation.spot import SpotSettings
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.training_folder import USED_NAME, Description, find_newest, read_folder
from paceline.drafting.drafter import is_draft_head, read_fused_layers
from paceline.errors import CheckpointError
from paceline.planning import drafter_growth
from paceline.planning.drafter_growth import Growth
from paceline.record import DrafterStep
from paceline.training.drafter_sessions import Sessions
from paceline.training.randomness import unchanged_randomness
from paceline.training.recipe import AdaptiveDrafterSection, Recipe
from paceline.training.rollouts import Engines, Rollout, Rollouts
from paceline.training.run_folder import DRAFTER, GROWN
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.fleet.journal import Journal

KINDS: dict[MethodName, str] = {
    "osd": "a small language model",
    "eagle": "an EAGLE head",
    "hass": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
}
FRESH_RATE, GIVEN_RATE = 2e-3, 2e-4
"""Learning rates: what a fresh drafter needs would undo what one that was given has learned."""
LEAST_RESPONSES = 32
"""Of a step whose hidden states are kept, where it has so many, however small the share."""
STATES_BYTES = 256 << 20
"""Most memory of the hidden states of a rollout."""


class GrowingEngines(Engines, Protocol):
    """One engine or many, whose model drafter gets new weights between rollouts."""

    drafter_version: int
    """How often it got some."""

    def push_drafter(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Take new weights of the model drafter; returns their version."""
        ...

    def drop_drafter(self) -> None:
        """Draft without it until weights are pushed."""
        ...

    def collect_states(self, share: float, max_bytes: int) -> None:
        """Keep hidden states of a share of the responses from now on; 0: none."""
        ...

    def take_samples(self) -> list[Sample]:
        """What has been kept since the last call."""
        ...

    def collection_s(self) -> float:
        """Time that steps have spent on keeping it."""
        ...


class AdaptiveDrafter:
    """A drafter and its trainer. Use in `with`; at the end the best one that is known is in `drafter/model` of the run
    folder, unless that is the one that was given.
    """

    def __init__(self, recipe: Recipe, section: AdaptiveDrafterSection, folder: Path) -> None:
        """folder: of the run. Raises CheckpointError for a width that cannot be, or where the drafter that was given,
        or that grew here before, is of another kind or size than the section's.
        """
        self.section = section
        self.is_head = section.method != "osd"
        self.is_fresh = recipe.engine.model_drafter is None
        self._target, self._folder = Path(recipe.model), folder / DRAFTER
        self.model = self._folder / GROWN
        if not self.is_fresh:
            self.model = Path(str(recipe.engine.model_drafter))
            self._check_kind("choose another method, or give another drafter or none")
        elif all((self.model / name).is_file() for name in ("config.json", "model.safetensors")):
            self._check_kind("set the method back, or begin anew with another --out")
            self._check_size()
        else:
            with unchanged_randomness():
                self._make(recipe.seed)
        settings = SpotSettings(
            parent=os.getpid(),
            folder=str(self._folder),
            target=recipe.model,
            method=section.method,
            drafter=str(self.model),
            temperature=recipe.sampling.temperature,
            rate=section.learning_rate or (FRESH_RATE if self.is_fresh else GIVEN_RATE),
            is_given=not self.is_fresh,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self.link = SpotLink(settings, section.trainers)

    def _check_kind(self, remedy: str) -> None:
        if (found := KINDS[_method_of(self.model)]) != (wanted := KINDS[self.section.method]):
            raise CheckpointError(
                f"{self.model} is {found}, and adaptive_drafter.method={self.section.method} grows {wanted}: {remedy}"
            )

    def _check_size(self) -> None:
        """Of a small language model that grew here before."""
        if self.is_head:
            return
        wanted = self.section.hidden_size or default_width(self._target), self.section.layers
        found = read_size(self.model)
        if found != wanted:
            raise CheckpointError(
                f"{self.model} has hidden size {found[0]} and {found[1]} layers, and adaptive_drafter asks for hidden "
                f"size {wanted[0]} and {wanted[1]} layers: set them back, or begin anew with another --out"
            )

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
        if (found := self._best()) is not None:
            with written_aside(self._folder / GROWN) as aside:
                export(*found, aside, "huggingface", str(self._target))
                if not self.is_head:
                    lend_tokenizer(self._target, aside)

    def _best(self) -> tuple[dict[str, torch.Tensor], Description] | None:
        """The newest drafter, unless the one that engines used last is better; None: the one that was given is, or
        there is no other.
        """
        newest = read_folder(self._folder, find_newest(self._folder))
        used = read_folder(self._folder, USED_NAME)
        if newest is None or (used is None and self.is_fresh):
            return newest
        return newest if drafter_growth.may_replace(newest[1].agreement, newest[1].used_agreement) else used


def _method_of(folder: Path) -> MethodName:
    """A method that grows what is in a folder."""
    if not is_draft_head(folder):
        return "osd"
    return "eagle3" if read_fused_layers(folder) else "eagle"


class AdaptiveRollouts(Rollouts):
    """Rollouts with training sessions beside those of train steps, and a newer drafter in the next one."""

    def __init__(
        self, rollouts: Rollouts, engine: GrowingEngines, drafter: AdaptiveDrafter, sessions: Sessions
    ) -> None:
        """rollouts: carry out what is run on `engine`."""
        super().__init__(engine, rollouts.record, rollouts.watcher, rollouts.interruption)
        self._rollouts, self._engine, self._sessions = rollouts, engine, sessions
        self._drafter, self._link = drafter, drafter.link
        self._growth = Growth()
        self._made: Description | None = None
        self._lesson: tuple[int, list[Sample]] | None = None
        self._beside = ThreadPoolExecutor(1, "drafter-samples")  # gathers while the learner is at work
        self._gathering: tuple[DrafterStep, Future[tuple[list[Sample], float]]] | None = None
        self._link.stop()
        used = self._link.used()
        self._is_used = used is not None or not drafter.is_fresh
        if used is not None:
            engine.push_drafter(used[0])
        elif drafter.is_fresh:
            engine.drop_drafter()

    def push_weights(self, weights: Iterable[tuple[str, Any]], version: int | None) -> int:
        self.settle()
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
        self.settle()
        if step is None:
            return self._rollouts.run(requests, params, step, journal)
        is_new, before = self._swap(), self._engine.drafter_score()
        pays = self._growth.pays
        self._collect(len(requests) if pays else 0)
        if pays:
            self._sessions.open(step)
        try:
            rollout = self._rollouts.run(requests, params, step, journal)
        finally:
            self._sessions.close()
        score = self._engine.drafter_score() - before
        self._is_used = self._is_used and not score.alarms
        self._growth = drafter_growth.observe(self._growth, score.acceptance, is_new)
        made = self._made
        told = DrafterStep(
            t_s=self.record.now_s(),
            step=step,
            version=self._engine.drafter_version,
            tried=score.tried,
            right=score.right,
            agreement=None if made is None else made.agreement,
            first_agreement=None if made is None else made.first_agreement,
            trained_s=made.trained_s if made else 0.0,
            trained_tokens=made.trained_tokens if made else 0,
        )
        self._gathering = told, self._beside.submit(self._gather, rollout.responses)
        return rollout

    def settle(self) -> None:
        if self._gathering is None:
            return
        (told, gathering), self._gathering = self._gathering, None
        samples, collection_s = gathering.result()
        self._lesson = told.step, samples
        collected_tokens = sum(sample.num_tokens for sample in samples) if self._drafter.is_head else 0
        self.record.write(replace(told, collected_tokens=collected_tokens, collection_s=collection_s))

    def close(self) -> None:
        """The run is over, or has failed, and the engines go next: wait for what is being gathered, and give it up."""
        self._beside.shutdown(cancel_futures=True)

    def _collect(self, num_responses: int) -> None:
        """Have the engines keep hidden states of a rollout of so many responses; 0: of none. A small language model
        learns without.
        """
        if self._drafter.is_head:
            least = LEAST_RESPONSES / max(num_responses, LEAST_RESPONSES)
            share = max(self._drafter.section.states_share, least) if num_responses else 0.0
            self._engine.collect_states(share, STATES_BYTES)

    def _gather(self, responses: Sequence[Response]) -> tuple[list[Sample], float]:
        """What there is to learn from after a rollout, and how long its steps have spent on keeping it, seconds. The
        engines, which have nothing else to do meanwhile, keep no more.
        """
        if self._drafter.is_head:
            samples, collection_s = self._engine.take_samples(), self._engine.collection_s()
            self._engine.collect_states(0.0, STATES_BYTES)
            return samples, collection_s
        return [
            Sample(ids, len(response.request.prompt), torch.empty(len(ids), 0))
            for response in responses
            if response.tokens
            for ids in (torch.tensor((*response.request.prompt, *response.tokens)),)
        ], 0.0

    def _swap(self) -> bool:
        """Give the engines the newest drafter, if it is no worse than the one that they have.

        Returns whether there was a new one: training that makes nothing but worse ones brings nothing.
        """
        found = self._link.take()
        if found is None:
            return False
        weights, self._made = found
        present = self._made.used_agreement if self._is_used else None
        if not drafter_growth.may_replace(self._made.agreement, present):
            return True
        self._engine.push_drafter(weights)
        self._link.use()
        self._is_used = True
        return True

"""What a model runner of vLLM's has to do for Paceline, and what passes between it and the scheduler.

vLLM has two model runners. The fast loop, the scheduler, the worker and the KV connector know neither; each runner's
own part stands behind this interface (v1/runner.py, v2/runner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.engine.compat import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from paceline.engine.multipath.layout import PathPlan
from paceline.engine.state_collector import StateCollector
from paceline.types import DraftOrder, Int32Array, Int64Array, ModelDrafts


class Runner(Protocol):
    """vLLM's model runner with Paceline's part in it.

    In every step it verifies the draft tokens of `SchedulerOutput.scheduled_spec_decode_tokens` and the alternatives of
    `order_of`: each row is decided by the dice, and a request takes what is decided as far as its drafts equal it.
    Requests that get no token are told by `report_undrawable`; those whose drafts gave NaN, for which the step shall
    not count, by `report_withdrawn`. Where `order_of` asks for it, the model drafter drafts after the step, and its
    drafts are given out by vLLM's `take_draft_token_ids` as `FreshDrafts`.

    V1 does all of it. V2 is never sent alternatives; what a withdrawn step leaves on the device goes with the request,
    which the scheduler preempts.
    """

    drafter: Any
    """The Proposer."""
    collector: Any
    """The StateCollector that keeps hidden states, None while there is none."""

    def make_collector(self, share: float, max_bytes: int) -> StateCollector:
        """One for this runner. Raises ConfigError for values out of range."""

    def get_model(self) -> Any:
        """The target; vLLM's own method."""

    def seal_model(self) -> None:
        """Put what Paceline wraps around the target's layers onto it; called again after every change of weights."""


@dataclass(frozen=True, slots=True)
class AheadDrafts:
    """Drafts made while the step before was under way: where a request's tokens of that step are the first ones of a
    path, the rest of that is verified, else nothing, or what the model drafter has made. Which, the device finds out.
    """

    names: list[str]
    """Requests, by id."""
    starts: Int64Array  # [num_requests] tokens of each that the draft was made behind
    tokens: Int32Array  # [num_requests, num_paths, most]
    num_tokens: Int32Array  # [num_requests, num_paths]
    keeps: NDArray[np.bool_]  # [num_requests] whether else the model drafter's, which are there, are verified


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What the scheduler asks of the runner in one step, beside what vLLM's own message says."""

    drafts: DraftOrder | None = None
    """What the model drafter shall do after the step; None: nothing."""
    paths: PathPlan | None = None
    """Draft paths beyond one per request; None: there are none."""
    stained: tuple[Sequence[int], ...] = ()
    """KV blocks of requests whose last step gave NaN, to be cleared before somebody else has them."""
    ahead: AheadDrafts | None = None
    """V2, with async scheduling: what `scheduled_spec_decode_tokens` counts, but for what the model drafter has left on
    the device."""


@dataclass
class FreshDrafts(DraftTokenIds):  # type: ignore[misc]
    """vLLM's message from worker to scheduler, with the model drafts as arrays beside it."""

    drafts: ModelDrafts


def give_order(output: SchedulerOutput, order: StepOrder) -> None:
    """Send an order along with vLLM's message to the runner."""
    output.paceline_order = order


def order_of(output: SchedulerOutput) -> StepOrder:
    """The order that came with the message; an empty one for a step that Paceline's scheduler did not make."""
    order: StepOrder = getattr(output, "paceline_order", None) or StepOrder()
    return order


def report_drafts(output: ModelRunnerOutput, drafts: ModelDrafts | None) -> None:
    """Send along what the model drafter made after the step before, where steps overlap."""
    output.paceline_drafts = drafts


def drafts_of(output: ModelRunnerOutput) -> ModelDrafts | None:
    """What the model drafter made after the step before; None for nothing."""
    drafts: ModelDrafts | None = getattr(output, "paceline_drafts", None)
    return drafts


def report_undrawable(output: ModelRunnerOutput, causes: dict[str, str]) -> None:
    """Send along the requests of the step that have no next token, by id, and why."""
    output.paceline_undrawable = causes


def undrawable_of(output: ModelRunnerOutput) -> dict[str, str]:
    """The requests that have no next token, by id, and why."""
    causes: dict[str, str] = getattr(output, "paceline_undrawable", {})
    return causes


def report_withdrawn(output: ModelRunnerOutput, names: list[str]) -> None:
    """Send along the requests, by id, for which the step does not count, because their drafts gave NaN."""
    output.paceline_withdrawn = names


def withdrawn_of(output: ModelRunnerOutput) -> list[str]:
    """The requests for which the step does not count, by id."""
    names: list[str] = getattr(output, "paceline_withdrawn", [])
    return names

"""Help for stragglers in the simulated fleet, decided by the live fleet's own function (`planning.help`).

A worker that has fallen free drafts ahead for the worker that is predicted to end last, where that ends it sooner, and
takes chunks again when it gets some. The prediction is told what live workers tell: step times, tokens per step and
acceptance as they are, lengths as dispatch expects them. Owned by the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.control.controller import HELP_S, Controller
from paceline.planning.help import Drafting, Ends, Help, Helper, Load, decide_help
from paceline.sim.costs import Drafter
from paceline.sim.race import RacedFleet
from paceline.sim.simulated_worker import SimulatedWorker
from paceline.sim.speculation import Speculation

_FAR_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Helpers:
    """How free workers help."""

    drafter: Drafter
    """That they run."""
    row: int
    """Its row of the acceptance rates."""
    helped: Callable[[], Speculation]
    """How a worker speculates that is drafted for."""
    home: Callable[[], Speculation]
    """How it speculates alone."""
    switch_s: float = 0.1
    """Until a free worker drafts."""


class HelpedFleet(RacedFleet, Protocol):
    """What helping needs of its fleet."""

    names: tuple[str, ...]
    controller: Controller


class Helping:
    """Who helps whom in one rollout."""

    def __init__(self, settings: Helpers, fleet: HelpedFleet) -> None:
        self._settings, self._fleet = settings, fleet
        self._pairs: dict[int, int] = {}  # helper -> helped
        self._last_s = -math.inf
        self.num_helps = 0

    def run(self, now_s: float) -> None:
        """Bring free workers and stragglers together, twice a second."""
        for helper, helped in list(self._pairs.items()):
            if self._fleet.workers[helped].is_free:
                self._end(helper, now_s)
        idle = [worker.number for worker in self._fleet.workers if worker.is_free]
        idle = [number for number in idle if number not in self._pairs]
        if not idle:
            return
        if now_s < self._last_s + HELP_S:
            return
        self._last_s = now_s
        self._begin(idle, now_s)
        self._fleet.call_again(now_s + HELP_S)

    def needed(self, worker: int, now_s: float) -> None:
        """A worker gets a chunk: it helps nobody any more."""
        if worker in self._pairs:
            self._end(worker, now_s)

    def _begin(self, idle: list[int], now_s: float) -> None:
        for worker in self._fleet.workers:
            self._fleet.advance(worker, now_s)
            self._fleet.schedule(worker)
        loads = {worker.number: self._load(worker) for worker in self._fleet.workers if worker.num_running}
        ends, numbers = Ends(), {self._fleet.names[number]: number for number in loads}
        for name, number in numbers.items():
            ends.put(name, loads[number].end_s)
        for helper in idle:
            latest = ends.latest()
            if latest is None or numbers[latest] in self._pairs.values():
                return
            helped = self._fleet.workers[numbers[latest]]
            drafting = Drafting(
                float(self._settings.drafter.token.seconds(helped.num_running)),
                float(helped.acceptance[self._settings.row].mean()),
            )
            choice = decide_help(
                loads[helped.number], Helper(ahead=(drafting,), switch_s=self._settings.switch_s)
            )
            if choice.kind is not Help.DRAFT:
                return
            self._pairs[helper] = helped.number
            self.num_helps += 1
            ends.put(latest, choice.end_s)
            self._change(helped, self._settings.helped(), now_s)

    def _end(self, helper: int, now_s: float) -> None:
        self._change(self._fleet.workers[self._pairs.pop(helper)], self._settings.home(), now_s)

    def _change(self, worker: SimulatedWorker, speculation: Speculation, now_s: float) -> None:
        self._fleet.advance(worker, now_s)
        worker.speculation = speculation
        worker.look_again()
        self._fleet.schedule(worker)

    def _load(self, worker: SimulatedWorker) -> Load:
        """What a worker has left to do, as the live controller would hear of it."""
        fleet = self._fleet
        count = worker.num_running
        tokens = worker.tokens
        prompts = fleet.work.prompt_tokens[worker.responses // fleet.work.group_size]
        rests = np.array(
            [
                fleet.controller.expected_rest(fleet.names[worker.number], home.chunk, int(have))
                if (home := fleet.running.get(response)) is not None
                else 1
                for response, have in zip(worker.responses.tolist(), tokens.tolist(), strict=True)
            ],
            dtype=np.float64,
        )
        plan = worker.plan
        contexts = tokens + prompts
        near_s, far_s = worker.costs.step.by_tokens.seconds(
            np.array([count, count * (1 + _FAR_TOKENS)])
        ).tolist()
        token_s = (far_s - near_s) / (count * _FAR_TOKENS)
        context_s = worker.costs.step.context_s * float(contexts.sum())
        base_s = near_s - token_s * count + context_s
        tokens_per_step = plan.sum_tokens / count
        step_tokens = 1.0 + plan.drafted_tokens / count
        round_s = plan.base_s + plan.context_s * float(contexts.sum())
        order = np.argsort(-rests, kind="stable")
        return Load(
            rests[order] / tokens_per_step,
            contexts[order],
            tokens_per_step,
            step_tokens,
            base_s,
            token_s,
            max(round_s - base_s - token_s * step_tokens * count, 0.0),
            worker.number in self._pairs.values(),
        )

"""Rollout workers as Ray actors: calls go out, answers come back as events. Decides nothing.

Every present worker has one `report` call on its way at all times; a call that fails is the loss of its worker.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from paceline.config import FleetSettings
from paceline.control.events import Order, Reported, WeightsLoaded, WorkerEvent, WorkerLost, WorkerUp
from paceline.fleet.cluster import actor_options
from paceline.fleet.rollout_worker import EngineSpec, Facts, Pace, RolloutWorker

LOGGER = logging.getLogger(__name__)

REPORT_WAIT_S = 1.0
"""A report is answered after so long even if nothing has happened."""

FAREWELL_S = 5.0
"""Time for engines to shut down by themselves before they are killed."""


@dataclass(frozen=True, slots=True)
class _Call:
    kind: Literal["start", "load", "report", "order"]
    worker: str
    life: int


@dataclass(slots=True)
class _Actor:
    handle: Any
    life: int
    process: int | None = None


class Actors:
    """The actors of a fleet, by worker. Close it."""

    def __init__(self, spec: EngineSpec, settings: FleetSettings) -> None:
        self._spec = spec
        self._pace = Pace(settings.progress_ms / 1e3, settings.workers)
        self._class = ray.remote(**actor_options(settings, spec.vllm))(RolloutWorker)
        self._actors: dict[str, _Actor] = {}
        self._calls: dict[Any, _Call] = {}
        self._settings: dict[str, tuple[Any, ...]] = {}  # what workers were told last, by method
        self.vocab_size = 0
        """The model's, once a worker has been up."""
        self.kv_pool_obstacle: str | None = None
        """Why the engines go without the fleet's KV pool, once a worker has been up."""
        self.invariance_gap: str | None = None
        """The engines', once a worker has been up."""

    @property
    def calls(self) -> Iterable[Any]:
        """Ray references of what is being waited for."""
        return self._calls.keys()

    def process(self, worker: str) -> int | None:
        """Process id of a worker's engine, on its own node; None before it is up."""
        return actor.process if (actor := self._actors.get(worker)) else None

    def start(self, worker: str, life: int) -> None:
        """Start an engine; what was there before is killed."""
        self._kill(worker)
        handle = self._class.remote(self._spec, self._pace)
        self._actors[worker] = _Actor(handle, life)
        self._calls[handle.start.remote()] = _Call("start", worker, life)

    def stop(self, worker: str, life: int) -> None:
        """Kill an engine of this life, if it is still there."""
        if worker in self._actors and self._actors[worker].life == life:
            self._kill(worker)

    def load(self, worker: str, life: int, weights: Any, version: int) -> None:
        """Load weights, given as a Ray reference of what `pack_weights` made."""
        ref = self._actors[worker].handle.load_weights.remote(weights, version)
        self._calls[ref] = _Call("load", worker, life)

    def order(self, worker: str, orders: Sequence[Order], params: Any) -> None:
        """Run and cancel chunks."""
        actor = self._actors[worker]
        self._calls[actor.handle.take.remote(orders, params)] = _Call("order", worker, actor.life)

    def tell_all(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker that is up, without waiting for it."""
        for actor in self._actors.values():
            if actor.process is not None:
                getattr(actor.handle, method).remote(*arguments)

    def settle(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker without waiting for it, and of those that come up later too."""
        self._settings[method] = arguments
        self.tell_all(method, *arguments)

    def ask(self, worker: str, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of a worker and wait for what it returns; None where it fails or takes longer. That the worker
        is lost then is told by `calls`.
        """
        method = getattr(self._actors[worker].handle, name)
        return _get(method.remote(*arguments), worker, name, timeout_s)

    def ask_all(self, name: str, *, timeout_s: float) -> list[Any]:
        """Call a method of every worker that is up and wait for what they return, without those where it fails or that
        have not answered when `timeout_s` are over for all.
        """
        until_s = time.monotonic() + timeout_s
        refs = {
            worker: getattr(actor.handle, name).remote()
            for worker, actor in self._actors.items()
            if actor.process is not None
        }
        answers = [
            _get(ref, worker, name, max(until_s - time.monotonic(), 0.0)) for worker, ref in refs.items()
        ]
        return [answer for answer in answers if answer is not None]

    def take(self, ref: Any) -> WorkerEvent | None:
        """One of `calls` has been answered: what it tells, if anything.

        Where this is interrupted the call stays, so that the worker is heard the next time.
        """
        call = self._calls[ref]
        worker, life = call.worker, call.life
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self.stop(worker, life)
            del self._calls[ref]
            return WorkerLost(worker, life, _reason(error))
        actor = self._actors.get(worker)
        if call.kind in {"start", "report"} and actor is not None and actor.life == life:
            report = actor.handle.report.options(concurrency_group="reports").remote(REPORT_WAIT_S)
            self._calls[report] = _Call("report", worker, life)
        del self._calls[ref]
        if call.kind == "order":
            return None
        if call.kind == "load":
            return WeightsLoaded(worker, life, answer)
        if call.kind == "report":
            return Reported(worker, life, answer)
        if actor is not None and actor.life == life:
            actor.process, self.vocab_size = answer.process, answer.vocab_size
            self._note_obstacle(answer.kv_pool_obstacle)
            self.invariance_gap = answer.invariance_gap
            for method, arguments in self._settings.items():
                getattr(actor.handle, method).remote(*arguments)
        return _up(worker, life, answer)

    def _note_obstacle(self, obstacle: str | None) -> None:
        if obstacle is not None and self.kv_pool_obstacle is None:
            LOGGER.warning("chunks that move are prefilled again, for want of a KV pool: %s", obstacle)
            self.kv_pool_obstacle = obstacle

    def close(self) -> None:
        """Shut all engines down."""
        farewells = [
            actor.handle.stop.remote() for actor in self._actors.values() if actor.process is not None
        ]
        if farewells:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(farewells, num_returns=len(farewells), timeout=FAREWELL_S)
        for worker in list(self._actors):
            self._kill(worker)
        self._calls.clear()

    def _kill(self, worker: str) -> None:
        actor = self._actors.pop(worker, None)
        if actor is not None:
            ray.kill(actor.handle)


def _get(ref: Any, worker: str, name: str, timeout_s: float) -> Any:
    """What a worker's method returns; None where it fails or takes longer."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        LOGGER.warning("worker %s did not %s: %s", worker, name.replace("_", " "), _reason(error))
        return None


def _up(worker: str, life: int, facts: Facts) -> WorkerUp:
    return WorkerUp(
        worker, life, 0, facts.num_kv_blocks, facts.block_tokens, facts.max_concurrency, facts.draft_addresses
    )


def _reason(error: BaseException) -> str:
    """The first line of what ended a worker."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__

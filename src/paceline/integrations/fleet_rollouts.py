"""Watched rollouts on a fleet: what rollouts.py does on one engine. Called by training_run.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.fleet.rollout import Fleet
from paceline.integrations.interruption import Interruption
from paceline.integrations.randomness import unchanged_randomness
from paceline.integrations.rollouts import Rollout, Rollouts, Watcher
from paceline.record import RecordWriter
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams


class FleetRollouts(Rollouts):
    """Rollouts on a fleet; engine steps are recorded by worker."""

    def __init__(
        self, fleet: Fleet, record: RecordWriter, watcher: Watcher, interruption: Interruption
    ) -> None:
        super().__init__(fleet, record, watcher, interruption)
        self._fleet = fleet

    def run(self, requests: Sequence[RolloutRequest], params: SamplingParams, step: int | None) -> Rollout:
        fleet = self._fleet
        fleet.board.take_steps()
        begin_s = self.record.now_s()
        responses: dict[int, Response] = {}
        ends_s = [0.0] * len(requests)
        num_tokens = 0
        try:
            with unchanged_randomness():
                fleet.submit(requests, params)
                while fleet.num_unfinished:
                    self._interruption.check()
                    finished, now_s = fleet.advance(), self.record.now_s()
                    for one in finished:
                        responses[one.index], ends_s[one.index] = one.response, now_s
                    num_tokens += self._note_steps(now_s, step)
                    num_running = len(requests) - len(responses)
                    self._watcher.show_rollout(num_running, len(requests), num_tokens, now_s - begin_s)
        finally:
            fleet.abandon()
        return Rollout(tuple(responses[index] for index in range(len(requests))), begin_s, tuple(ends_s))

    def _note_steps(self, now_s: float, step: int | None) -> int:
        """Record what workers told of: their steps ended one after another up to about now. Returns the tokens."""
        steps = self._fleet.board.take_steps()
        lasted_s: defaultdict[str, float] = defaultdict(float)
        for worker, one in steps:
            lasted_s[worker] += one.seen.step_s
        for worker, (seen, num_tokens) in steps:
            begin_s = max(now_s - lasted_s[worker], 0.0)
            lasted_s[worker] -= seen.step_s
            if step is not None:
                self.record.add_step(begin_s, seen, num_generated_tokens=num_tokens, step=step, worker=worker)
        return sum(one.num_tokens for _, one in steps)

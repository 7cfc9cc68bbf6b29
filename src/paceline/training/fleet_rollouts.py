"""Watched rollouts on a fleet: what rollouts.py does on one engine, with rewards while others still run, and what ran
where.

Called by training_run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.config import RewardSettings
from paceline.errors import EngineError
from paceline.fleet.chunk_log import ChunkSpan
from paceline.fleet.fleet import Finished, Fleet
from paceline.fleet.recording import FleetRecording
from paceline.fleet.rewards import Reward
from paceline.record import RecordWriter
from paceline.tasks import Row, Task
from paceline.terminal.interruption import Interruption
from paceline.terminal.meter import RolloutMeter
from paceline.training.randomness import unchanged_randomness
from paceline.training.rollouts import Rollout, Rollouts, Watcher
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.fleet.journal import Journal


class TaskReward:
    """A task's reward as a reward function: finds the row of a response by its prompt.

    Prompts that several different rows have, and those of no row, are not known; the trainer scores their responses.
    """

    def __init__(self, task: Task, tokenizer: Any, rows: Sequence[Row]) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._rows: dict[tuple[int, ...], Row] = {}
        unclear = set()
        for row, prompt in zip(rows, tokenizer([row["prompt"] for row in rows])["input_ids"], strict=True):
            if self._rows.setdefault(tuple(prompt), row) != row:
                unclear.add(tuple(prompt))
        for ids in unclear:
            del self._rows[ids]

    def knows(self, prompt: tuple[int, ...]) -> bool:
        """Whether responses to the prompt can be scored."""
        return prompt in self._rows

    def __call__(self, index: int, response: Response) -> float:
        row = self._rows.get(response.request.prompt)
        if row is None:
            return 0.0
        text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
        return float(self._task.reward(text, row))


class FleetRollouts(Rollouts):
    """Rollouts on a fleet; engine steps are recorded by worker."""

    def __init__(
        self,
        fleet: Fleet,
        record: RecordWriter,
        watcher: Watcher,
        interruption: Interruption,
        reward: TaskReward | None,
    ) -> None:
        """reward: the function that the fleet scores with."""
        super().__init__(fleet, record, watcher, interruption)
        self._fleet = fleet
        self._reward = reward

    def run(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        step: int | None,
        journal: Journal | None = None,
    ) -> Rollout:
        fleet = self._fleet
        recording = FleetRecording(fleet, self.record, step)
        chunks: list[ChunkSpan] = []
        done: dict[int, Finished] = {}
        ends_s = [0.0] * len(requests)
        meter = RolloutMeter(len(requests))
        num_alarms = fleet.drafter_score().alarms
        try:
            with unchanged_randomness():
                fleet.submit(requests, params, journal=journal)
                while fleet.num_unfinished:
                    self.interruption.check()
                    finished, now_s = fleet.advance(), self.record.now_s()
                    for one in finished:
                        done[one.index], ends_s[one.index] = one, now_s
                    steps = recording.take_steps(now_s)
                    meter.observe(one.seen for one in steps)
                    meter.count(sum(one.num_tokens for one in steps), len(finished))
                    chunks += recording.take_chunks()
                    self.watcher.show_rollout(meter)
        finally:
            fleet.abandon()
        recording.end()
        self._note_alarms(num_alarms)
        ordered = [done[index] for index in range(len(requests))]
        responses = tuple(one.response for one in ordered)
        return Rollout(
            responses, recording.begin_s, tuple(ends_s), self._take_rewards(ordered), tuple(chunks)
        )

    def _take_rewards(self, finished: Sequence[Finished]) -> tuple[float | None, ...]:
        """The rewards; what failed is noted in the record. Raises EngineError for a failed response if there is no
        `failure_reward`.
        """
        rewards = [self._known_reward(one) for one in finished]
        if self._reward is None and not any(rewards):
            return ()
        return self._note_failures(rewards)

    def _fail(self, index: int, failure: str) -> Reward:
        """The reward of a failed response, where no reward worker says it."""
        value = (self._fleet.settings.rewards or RewardSettings()).failure_reward
        if value is None:
            raise EngineError(
                f"response {index} {failure}; it has no reward: set fleet.rewards.failure_reward to go on with a number"
            )
        return Reward(value, f"it {failure}")

    def _known_reward(self, finished: Finished) -> Reward | None:
        """What the fleet scored, and what a response that failed gets; None: the trainer scores it."""
        failure = finished.response.failure
        if failure is not None and finished.reward is None:
            return self._fail(finished.index, failure)
        known = self._reward
        if failure is not None:
            return finished.reward
        return (
            finished.reward if known is not None and known.knows(finished.response.request.prompt) else None
        )

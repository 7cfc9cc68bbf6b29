"""Watched rollouts on a fleet: what rollouts.py does on one engine, with rewards while others still run, and what ran
where.

Called by training_run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.fleet.chunk_log import ChunkSpan
from paceline.fleet.rollout import Finished, Fleet
from paceline.integrations.fleet_course import FleetCourse
from paceline.integrations.interruption import Interruption
from paceline.integrations.randomness import unchanged_randomness
from paceline.integrations.rollouts import Rollout, Rollouts, Watcher
from paceline.record import Note, RecordWriter
from paceline.tasks import Row, Task
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams


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

    def run(self, requests: Sequence[RolloutRequest], params: SamplingParams, step: int | None) -> Rollout:
        fleet = self._fleet
        course = FleetCourse(fleet, self.record, step)
        chunks: list[ChunkSpan] = []
        done: dict[int, Finished] = {}
        ends_s = [0.0] * len(requests)
        num_tokens = 0
        try:
            with unchanged_randomness():
                fleet.submit(requests, params)
                while fleet.num_unfinished:
                    self._interruption.check()
                    finished, now_s = fleet.advance(), self.record.now_s()
                    for one in finished:
                        done[one.index], ends_s[one.index] = one, now_s
                    num_tokens += sum(one.num_tokens for one in course.take_steps(now_s))
                    chunks += course.take_chunks()
                    num_running = len(requests) - len(done)
                    self._watcher.show_rollout(num_running, len(requests), num_tokens, now_s - course.begin_s)
        finally:
            fleet.abandon()
        ordered = [done[index] for index in range(len(requests))]
        responses = tuple(one.response for one in ordered)
        return Rollout(responses, course.begin_s, tuple(ends_s), self._take_rewards(ordered), tuple(chunks))

    def _take_rewards(self, finished: Sequence[Finished]) -> tuple[float | None, ...]:
        """The rewards; what failed is noted in the record."""
        known = self._reward
        if known is None:
            return ()
        rewards = [one.reward if known.knows(one.response.request.prompt) else None for one in finished]
        failures = [reward.failure for reward in rewards if reward is not None and reward.failure is not None]
        if failures:
            text = f"{len(failures)} of {len(rewards)} responses have no reward of their own: {failures[0]}"
            self.record.write(Note(t_s=self.record.now_s(), text=text))
        return tuple(None if reward is None else reward.value for reward in rewards)

"""A fleet's rollout on the run clock: what its workers tell, written into a record as it comes.

Called once after every `Fleet.advance`, by training/fleet_rollouts.py and the command `rollout --record`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.fleet.status import describe_sharing_trouble
from paceline.planning.help import Help
from paceline.record import ChunkDone, DrafterSession, HelpDone, Note, RecordWriter

if TYPE_CHECKING:
    from paceline.control.events import WorkerStep
    from paceline.fleet.chunk_log import ChunkSpan
    from paceline.fleet.fleet import Fleet
    from paceline.fleet.help_log import HelpSpan, TrainingSpan


class FleetRecording:
    """One rollout; make it before requests are submitted."""

    def __init__(self, fleet: Fleet, record: RecordWriter, step: int | None) -> None:
        """step: train step that engine steps are recorded for; None records none."""
        self._fleet, self._record, self._step = fleet, record, step
        fleet.board.take_steps()
        fleet.chunks.take()
        fleet.helps.take()
        fleet.helps.take_training()
        self._shared = fleet.board.draft_sharing
        self.begin_s = record.now_s()
        self._ahead_s = (
            self.begin_s - time.monotonic()
        )  # the same for all chunks: one may end when another begins

    def take_steps(self, now_s: float) -> list[WorkerStep]:
        """Engine steps since the last call; recorded as if they had ended one after another up to about `now_s`."""
        steps = self._fleet.board.take_steps()
        lasted_s: defaultdict[str, float] = defaultdict(float)
        for worker, one in steps:
            lasted_s[worker] += one.seen.step_s
        for worker, (seen, num_tokens) in steps:
            begin_s = max(now_s - lasted_s[worker], 0.0)
            lasted_s[worker] -= seen.step_s
            if self._step is not None:
                self._record.add_step(
                    begin_s, seen, num_generated_tokens=num_tokens, step=self._step, worker=worker
                )
        return [one for _, one in steps]

    def end(self) -> None:
        """The rollout has ended: record what free workers did, and note what was wrong with the draft server."""
        helps, sessions = self._fleet.helps.take(), self._fleet.helps.take_training()
        if self._step is not None:
            self._record_free_workers(self._step, helps, sessions)
        trouble = describe_sharing_trouble(self._fleet.board.draft_sharing - self._shared)
        if trouble is not None:
            self._record.write(Note(t_s=self._record.now_s(), text=trouble))

    def _record_free_workers(
        self, step: int, helps: Sequence[HelpSpan], sessions: Sequence[TrainingSpan]
    ) -> None:
        drafters = self._fleet.board.drafters
        for one in helps:
            begin_s, end_s = self._times(one)
            done = HelpDone(
                t_start_s=begin_s,
                t_end_s=end_s,
                step=step,
                worker=one.worker,
                helped=one.helped,
                kind=one.kind.value,
                drafter=drafters[one.drafter] if one.kind is Help.DRAFT and len(drafters) > 1 else "",
                outcome=one.outcome,
                num_leads=one.num_leads,
            )
            self._record.write(done)
        for session in sessions:
            begin_s, end_s = self._times(session)
            worker, core_s = session.worker, session.core_s
            self._record.write(
                DrafterSession(t_start_s=begin_s, t_end_s=end_s, step=step, worker=worker, core_s=core_s)
            )

    def _times(self, one: HelpSpan | TrainingSpan) -> tuple[float, float]:
        """Begin and end by the record's clock."""
        return round(one.start_s + self._ahead_s, 6), round(one.end_s + self._ahead_s, 6)

    def take_chunks(self) -> list[ChunkSpan]:
        """Chunks that have ended since the last call."""
        ahead_s = self._ahead_s
        return [
            replace(one, start_s=one.start_s + ahead_s, end_s=one.end_s + ahead_s)
            for one in self._fleet.chunks.take()
        ]


def describe_chunk(chunk: ChunkSpan, step: int, group: int, sample: int) -> ChunkDone:
    """The chunk as an event of the record."""
    return ChunkDone(
        t_start_s=round(chunk.start_s, 6),
        t_end_s=round(chunk.end_s, 6),
        step=step,
        group=group,
        sample=sample,
        worker=chunk.worker,
        start=chunk.start,
        tokens=chunk.num_tokens,
        finish_reason=chunk.finish_reason,
    )

"""Builds the record of a simulated training run on a fleet: responses in chunks, on workers with few places.

Also a script: `python tests/builders/fleet_record.py FOLDER` writes 6 steps on 4 workers, of which one is killed once.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import RecordConfig
from paceline.record import (
    ChunkDone,
    Event,
    Header,
    Machine,
    Phases,
    RecordWriter,
    ResponseDone,
    RunEnd,
    TrainStep,
    measure_tail,
)
from paceline.types import StepObservation

TOKEN_S = 0.01
DOWN_S = 1.5


@dataclass
class FleetRun:
    """A run to be recorded; `build` writes it, `rollout` gives the events of one step."""

    num_steps: int = 6
    num_groups: int = 12
    group_size: int = 8
    workers: int = 4
    places: int = 6
    """Responses that a worker decodes at once."""
    chunk_tokens: int = 64
    max_tokens: int = 800
    kill_in_step: int = 4
    """The first worker is killed in it; 0: never."""
    seed: int = 5
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def build(self, run_dir: Path) -> Path:
        """Write `run_dir/record.jsonl`; returns `run_dir`."""
        header = Header(
            machine=Machine(cpu="Example CPU 9000", cores=2, memory_bytes=24 * 2**30),
            versions={"paceline": "0.1.0"},
            started_unix_s=1_760_000_000.0,
            model="countdown-10m",
            task="Countdown on a fleet",
            num_steps_planned=self.num_steps,
        )
        begin_s = 1.5
        with RecordWriter.create(run_dir, header, RecordConfig(bucket_ms=50.0)) as writer:
            for step in range(1, self.num_steps + 1):
                events = self.rollout(step, begin_s)
                end_s = max(event.t_end_s for event in events)
                chunks = [event for event in events if isinstance(event, ChunkDone)]
                self._write_engine_steps(writer, chunks, begin_s, end_s, step)
                for event in events:
                    writer.write(event)
                writer.write(self._train_step(step, events, begin_s, end_s))
                begin_s = end_s + 2.0
            writer.write(RunEnd(t_s=begin_s, reason="finished"))
        return run_dir

    def _write_engine_steps(
        self, writer: RecordWriter, chunks: list[ChunkDone], begin_s: float, end_s: float, step: int
    ) -> None:
        for worker in {chunk.worker for chunk in chunks}:
            own = [chunk for chunk in chunks if chunk.worker == worker]
            for tick in range(math.ceil((end_s - begin_s) / 0.1)):
                at_s = begin_s + 0.1 * tick
                running = sum(chunk.t_start_s <= at_s < chunk.t_end_s for chunk in own)
                if running:
                    seen = StepObservation(running, 0, 0, 0, 0.1)
                    writer.add_step(at_s, seen, num_generated_tokens=running, step=step, worker=worker)

    def _train_step(
        self, step: int, events: list[ChunkDone | ResponseDone], begin_s: float, end_s: float
    ) -> TrainStep:
        responses = [event for event in events if isinstance(event, ResponseDone)]
        return TrainStep(
            step=step,
            t_start_s=begin_s,
            phases=Phases(rollout_s=end_s - begin_s, train_s=1.9),
            tokens=sum(response.response_tokens for response in responses),
            tail_s=measure_tail([response.t_end_s for response in responses]),
        )

    def rollout(self, step: int, begin_s: float) -> list[ChunkDone | ResponseDone]:
        """The chunks of one step in the order of their ends, then its responses."""
        shape = (self.num_groups, self.group_size)
        means = [120 + 300 * self.random.random() for _ in range(shape[0])]
        lengths = {
            (group, sample): min(
                int(self.random.lognormvariate(math.log(means[group]), 0.5)) + 1, self.max_tokens
            )
            for group in range(shape[0])
            for sample in range(shape[1])
        }
        killed_s = begin_s + 3.0 if step == self.kill_in_step else math.inf
        chunks = self._run_chunks(step, begin_s, lengths, killed_s)
        ends_s = {(chunk.group, chunk.sample): chunk.t_end_s for chunk in chunks}
        responses = [
            ResponseDone(
                t_start_s=begin_s,
                t_end_s=ends_s[group, sample],
                step=step,
                group=group,
                sample=sample,
                prompt_tokens=11,
                response_tokens=length,
                num_steps=length,
                finish_reason="length" if length == self.max_tokens else "stop",
                reward=float(self.random.random() < 0.4),
            )
            for (group, sample), length in lengths.items()
        ]
        return [*chunks, *responses]

    def _run_chunks(
        self, step: int, begin_s: float, lengths: dict[tuple[int, int], int], killed_s: float
    ) -> list[ChunkDone]:
        """Whatever place is free first runs what waits longest."""
        waiting = deque((response, 0) for response in lengths)
        free = [
            (begin_s, place, f"w{worker}") for place in range(self.places) for worker in range(self.workers)
        ]
        heapq.heapify(free)
        running: list[tuple[float, tuple[int, int], int]] = []  # (end, response, tokens then)
        chunks: list[ChunkDone] = []
        while waiting or running:
            if not waiting or (running and running[0][0] <= free[0][0]):
                _, response, have = heapq.heappop(running)
                if have < lengths[response]:
                    waiting.appendleft((response, have))
                continue
            at_s, place, worker = heapq.heappop(free)
            response, have = waiting.popleft()
            at_s = max(
                at_s, max((c.t_end_s for c in chunks if (c.group, c.sample) == response), default=at_s)
            )
            end = min(have + self.chunk_tokens, lengths[response])
            end_s = at_s + (end - have) * TOKEN_S
            reason = "length" if end < lengths[response] or end == self.max_tokens else "stop"
            back_s = end_s
            if worker == "w0" and at_s < killed_s < end_s:
                end = have + int((killed_s - at_s) / TOKEN_S)
                end_s, back_s, reason = killed_s, killed_s + DOWN_S, "lost"
            chunk = ChunkDone(
                t_start_s=at_s,
                t_end_s=end_s,
                step=step,
                group=response[0],
                sample=response[1],
                worker=worker,
                start=have,
                tokens=end - have,
                finish_reason=reason,
            )
            chunks.append(chunk)
            heapq.heappush(running, (end_s, response, end))
            heapq.heappush(free, (back_s, place, worker))
        return sorted(chunks, key=lambda chunk: chunk.t_end_s)


def total_tokens(events: list[Event]) -> dict[tuple[int, int, int], int]:
    """Tokens of all chunks of each response, by step, group and sample."""
    totals: dict[tuple[int, int, int], int] = {}
    for event in events:
        if isinstance(event, ChunkDone):
            place = (event.step, event.group, event.sample)
            totals[place] = totals.get(place, 0) + event.tokens
    return totals


if __name__ == "__main__":
    print(FleetRun().build(Path(sys.argv[1])))

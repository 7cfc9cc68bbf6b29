"""Builds the record of a simulated training run: long-tailed responses, deeper drafts as the batch thins.

Also a script: `python tests/unit/recorded_run.py FOLDER` writes a run of 30 steps with 64 responses each.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config import RecordConfig
from paceline.record import (
    Comparison,
    Evaluation,
    Failure,
    Header,
    Machine,
    Note,
    Phases,
    RecordWriter,
    ResponseDone,
    RunEnd,
    TrainStep,
    measure_tail,
)
from paceline.types import StepObservation

MACHINE = Machine(cpu="Example CPU 9000", cores=2, memory_bytes=24 * 2**30)
VERSIONS = {"paceline": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "trl": "1.16.0", "vllm": "0.32.0"}
CONFIG = {
    "model": {"path": "checkpoints/countdown-10m", "dtype": "bfloat16"},
    "task": {"name": "countdown", "numbers": 3, "targets": [10, 100]},
    "train": {"algorithm": "grpo", "learning_rate": 1e-05, "group_size": 16, "prompts_per_step": 4},
    "engine": {"drafter": "suffix", "budget": "fitted", "max_draft_tokens": 16},
}


@dataclass
class SimulatedRun:
    """A run to be recorded; `build` writes it."""

    num_steps: int = 30
    num_responses: int = 64
    group_size: int = 16
    max_tokens: int = 1024
    num_steps_planned: int | None = None
    seed: int = 7
    compared: bool = True
    end: str | None = "finished"
    task: str = "Countdown, 3 numbers"

    def build(self, run_dir: Path) -> Path:
        """Write `run_dir/record.jsonl`; returns `run_dir`."""
        self.random = np.random.default_rng(self.seed)
        self.clock_s = 1.5
        header = Header(
            machine=MACHINE,
            versions=VERSIONS,
            started_unix_s=1_760_000_000.0,
            config=CONFIG,
            model="countdown-10m",
            task=self.task,
            num_steps_planned=self.num_steps_planned or self.num_steps,
        )
        with RecordWriter.create(run_dir, header, RecordConfig(bucket_ms=50.0)) as writer:
            self._evaluate(writer, 0)
            for step in range(1, self.num_steps + 1):
                self._train_step(writer, step)
            if self.compared and self.num_steps:
                self._compare(writer)
            if self.end:
                writer.write(RunEnd(t_s=self.clock_s, reason=self.end))
        return run_dir

    def _skill(self, step: int) -> float:
        return 0.22 + 0.5 * (1 - math.exp(-step / 12))

    def _evaluate(self, writer: RecordWriter, step: int) -> float:
        solved = int(self.random.binomial(200, self._skill(step)))
        writer.write(
            Evaluation(t_s=self.clock_s, step=step, solve_rate=solved / 200, n=200, tokens_mean=190.0)
        )
        return 1.9

    def _train_step(self, writer: RecordWriter, step: int) -> None:
        begin_s = self.clock_s
        responses = self._rollout(writer, step)
        for response in responses:
            writer.write(response)
        rollout_s = self.clock_s - begin_s
        train_s = 1.1 + 0.2 * self.random.random()
        evaluated = step % 5 == 0
        self.clock_s += train_s + 0.25
        eval_s = self._evaluate(writer, step) if evaluated else 0.0
        self.clock_s += eval_s
        if step == 11:
            writer.write(
                Note(t_s=self.clock_s, text="Budget policy refitted the step-time model <after 4 096 steps>.")
            )
        if step == 17:
            writer.write(Failure(t_s=self.clock_s, text="One reward call timed out after 5 s; scored 0."))
        rewards = np.array([r.reward for r in responses], dtype=float)
        writer.write(
            TrainStep(
                step=step,
                t_start_s=begin_s,
                phases=Phases(rollout_s, 0.12, train_s, 0.09, eval_s, 0.04),
                tokens=sum(r.response_tokens for r in responses),
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std()),
                tail_s=measure_tail([r.t_end_s for r in responses]),
                metrics={
                    "loss": 0.02 * math.exp(-step / 9) + 0.004 * self.random.standard_normal(),
                    "kl": 0.0008 * step + 0.0004 * self.random.random(),
                    "grad_norm": 0.9 + 0.3 * self.random.random(),
                    "learning_rate": 1e-5,
                },
            )
        )

    def _rollout(self, writer: RecordWriter, step: int) -> list[ResponseDone]:
        """Decode until all responses are done; returns them."""
        size = self.num_responses
        draw = self.random.lognormal(math.log(110 + 2 * step), 0.75, size)
        lengths = np.clip(draw, 8, self.max_tokens).astype(int)
        done, counts = np.zeros(size, dtype=int), np.zeros((size, 3), dtype=int)
        begin_s, responses = self.clock_s, []
        chance = 0.55 + 0.25 * (1 - math.exp(-step / 8))
        while (alive := np.flatnonzero(done < lengths)).size:
            width = int(np.clip(96 // alive.size, 0, 8))
            hits = self.random.geometric(1 - chance, alive.size) - 1
            accepted = np.minimum(np.minimum(hits, width), lengths[alive] - done[alive] - 1)
            done[alive] += accepted + 1
            counts[alive] += np.stack([np.ones(alive.size), np.full(alive.size, width), accepted], 1).astype(
                int
            )
            step_s = 0.0042 + 0.00022 * alive.size * (1 + width) * (1 + 0.1 * self.random.random())
            generated = int(alive.size + accepted.sum())
            seen = StepObservation(int(alive.size), width * int(alive.size), int(accepted.sum()), 0, step_s)
            writer.add_step(self.clock_s, seen, num_generated_tokens=generated, step=step, worker="0")
            self.clock_s += step_s
            ended = alive[done[alive] >= lengths[alive]]
            responses += [
                self._response(step, i, int(lengths[i]), begin_s, counts[i]) for i in ended.tolist()
            ]
        return responses

    def _response(self, step: int, i: int, length: int, begin_s: float, counts: np.ndarray) -> ResponseDone:
        cut = length >= self.max_tokens
        return ResponseDone(
            t_start_s=begin_s,
            t_end_s=self.clock_s,
            step=step,
            group=(step << 8) + i // self.group_size,
            sample=i % self.group_size,
            prompt_tokens=31,
            response_tokens=length,
            num_steps=int(counts[0]),
            drafted=int(counts[1]),
            accepted=int(counts[2]),
            finish_reason="length" if cut else "stop",
            reward=0.0 if cut else float(self.random.random() < self._skill(step)),
            worker="0",
        )

    def _compare(self, writer: RecordWriter) -> None:
        begin_s = self.clock_s
        self.clock_s += 15.9
        writer.write(
            Comparison(
                t_s=begin_s,
                step=self.num_steps,
                responses=128,
                tokens=51_200,
                plain_s=9.41,
                accelerated_s=6.47,
                plain_tail_s=4.1,
                accelerated_tail_s=1.7,
                diverged_tokens=0,
            )
        )


if __name__ == "__main__":
    print(SimulatedRun().build(Path(sys.argv[1])))

"""What a training run does around the trainer: rollouts, rewards, evaluations, comparisons, record, progress.

The StepRunner is the trainer's engine: it generates and takes weights, measures both and passes them on. Training
steps are numbered from 1; a step is one rollout and `batch.updates` optimizer updates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.dice import derive_key
from paceline.fleet.recording import describe_chunk
from paceline.record import Comparison, Evaluation, Phases, ResponseDone, TrainStep
from paceline.tasks import Row, Task
from paceline.terminal.interruption import Interrupted, Interruption
from paceline.terminal.progress import Progress
from paceline.training.checkpoints import checkpoint_at, keep_newest, seal
from paceline.training.randomness import read_randomness, unchanged_randomness, write_randomness
from paceline.training.recipe import Recipe
from paceline.training.rollout_journals import RolloutJournals
from paceline.training.rollouts import Rollout, Rollouts
from paceline.training.run_folder import Past
from paceline.types import Response, RolloutRequest

SOLVED = 1.0
EVALUATION_WORD = 1 << 30
"""Put in front of the prompt where keys of evaluations are derived: apart from all training keys."""


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    steps: int
    reason: str
    """`finished` or `interrupted`."""
    solve_rates: dict[int, float]
    """Held-out solve rate by step."""
    comparisons: list[Comparison]
    acceptance_length: float
    """Tokens per response and engine step, over all training rollouts of this session."""
    phases_s: dict[str, float]
    report: Path

    @property
    def speed_up(self) -> float | None:
        """Median over the compared rollouts of plain seconds over accelerated seconds."""
        ratios = [c.plain_s / c.accelerated_s for c in self.comparisons if c.accelerated_s > 0]
        return statistics.median(ratios) if ratios else None

    @property
    def compared_tokens(self) -> int:
        """Tokens that were generated both ways."""
        return sum(c.tokens for c in self.comparisons)

    @property
    def diverged_tokens(self) -> int:
        """Of the compared tokens, those that differed: 0, or something is broken."""
        return sum(c.diverged_tokens or 0 for c in self.comparisons)


@dataclass(slots=True)
class _Step:
    """What is known of the training step that is running."""

    begin_s: float
    phases: dict[str, float] = field(default_factory=dict)
    rollout: Rollout | None = None
    rewards: list[float] = field(default_factory=list)


class StepRunner:
    """Stands between the trainer and the engine; `trainer` is set once it is built."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        tokenizer: Any,
        held_out: Sequence[Row],
        rollouts: Rollouts,
        progress: Progress,
        interruption: Interruption,
        past: Past,
        journals: RolloutJournals,
    ) -> None:
        self.recipe = recipe
        self.trainer: Any = None
        self.interrupted = False
        self.solve_rates = dict(past.solve_rates)
        self.comparisons = list(past.comparisons)
        self._task = task
        self._tokenizer = tokenizer
        self._held_out = held_out
        self._record = record = rollouts.record
        self._rollouts = rollouts
        self._progress = progress
        self._interruption = interruption
        self._journals = journals
        self._step = _Step(record.now_s())
        self._randomness: Any = None
        self._num_tokens = self._num_decodes = 0
        self._phases_s: dict[str, float] = {}

    # -- called by the trainer

    def generate(self, requests: Sequence[RolloutRequest], params: Any) -> list[Response]:
        """The trainer's rollout; on steps that are compared, once with and once without drafts."""
        step = self._current_step()
        self._progress.show_phase("rollout")
        every = self.recipe.compare.every
        if every and (step - 1) % every == 0:
            rollout = self._compare(requests, params, step)
        else:
            with self._phase("rollout"), closing(self._journals.open(step, params)) as journal:
                rollout = self._rollouts.run(requests, params, step, journal)
                if journal.failure is not None:
                    self._progress.say(journal.failure)
        self._step.rollout = rollout
        self._progress.show_phase("training")
        return list(rollout.responses)

    def _compare(self, requests: Sequence[RolloutRequest], params: Any, step: int) -> Rollout:
        begin_s = self._record.now_s()
        plain_first = (len(self.comparisons) % 2) == 1
        rollout, comparison = self._rollouts.compare(requests, params, step, plain_first)
        self._add_phase("rollout", rollout.wall_s)
        self._add_phase("other", self._record.now_s() - begin_s - rollout.wall_s)
        self._record.write(comparison)
        self.comparisons.append(comparison)
        ratio = comparison.plain_s / comparison.accelerated_s
        self._progress.say(
            f"step {step}: rollout without drafts {comparison.plain_s:.1f} s, with {comparison.accelerated_s:.1f} s "
            f"({ratio:.2f}x), {comparison.diverged_tokens} of {comparison.tokens} tokens differ"
        )
        return rollout

    def reward(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """TRL reward function: the task's reward of each completion."""
        with self._phase("reward"):
            names = [name for name, values in columns.items() if isinstance(values, list)]
            rewards = [
                self._task.reward(text, {name: columns[name][i] for name in names})
                if known is None
                else known
                for i, (text, known) in enumerate(
                    zip(completions, self._known_rewards(len(completions)), strict=True)
                )
            ]
        self._step.rewards = rewards
        return rewards

    def _known_rewards(self, count: int) -> Sequence[float | None]:
        """Rewards of the step's rollout that came while it ran."""
        rollout = self._step.rollout
        return rollout.rewards if rollout is not None and len(rollout.rewards) == count else [None] * count

    def begin(self) -> None:
        """Training begins or goes on: evaluate what the past has not."""
        self._evaluate_if_due(self.trainer.state.global_step // self.recipe.batch.updates)
        self._close_step()

    def note_checkpoint(self) -> None:
        """The trainer has saved its state: older ones go, and rollouts up to it will not be asked for again."""
        updates, folder = int(self.trainer.state.global_step), Path(self.trainer.args.output_dir)
        seal(checkpoint_at(folder, updates))
        keep_newest(folder, self.recipe.output.keep)
        self._journals.forget(updates // self.recipe.batch.updates)

    def keep_randomness(self) -> None:
        """Remember the random generators between two steps, to undo what an interrupted step draws."""
        self._randomness = read_randomness()

    def restore_randomness(self) -> None:
        """Set the random generators back to the last `keep_randomness`."""
        if self._randomness is not None:
            write_randomness(self._randomness)

    def check_interruption(self) -> None:
        """Raise Interrupted if the user wants to stop, but not between two updates of a step: a checkpoint does not
        hold the rollout that the later ones need.
        """
        if int(self.trainer.state.global_step) % self.recipe.batch.updates == 0:
            self._interruption.check()

    def push_weights(self, weights: Iterable[tuple[str, Any]], *, version: int | None = None) -> int:
        """Give the engine the trainer's weights; returns the policy version."""
        with self._phase("push_weights"), unchanged_randomness():
            return self._rollouts.push_weights(self._journals.watch(weights), version)

    @property
    def vllm_engine(self) -> Any:
        """The vLLM engine behind the rollouts."""
        return self._rollouts.engine.vllm_engine

    def end_update(self, train_s: float, metrics: Mapping[str, Any]) -> bool:
        """An optimizer update has ended; after the last one of a step, evaluate, record and show it.

        Returns whether the run shall stop here because the user wants it.
        """
        self._add_phase("train", train_s)
        updates = int(self.trainer.state.global_step)
        if updates % self.recipe.batch.updates:
            return False
        self._rollouts.settle()
        with suppress(Interrupted):  # the step itself is complete: record it, then stop
            self._evaluate_if_due(updates // self.recipe.batch.updates)
        self._finish_step(updates // self.recipe.batch.updates, metrics)
        self.interrupted = self._interruption.wanted
        return self.interrupted

    # -- evaluation

    def _evaluate_if_due(self, step: int) -> None:
        due = step % self.recipe.evaluation.every == 0 or step == self.recipe.steps
        if self._held_out and due and step not in self.solve_rates:
            with self._phase("eval"):
                self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        generation = self.trainer.vllm_generation
        generation.sync_weights()
        self._progress.show_phase("evaluation")
        rollout = self._rollouts.run(self._evaluation_requests(), generation.sampling_params(), None)
        texts = self._tokenizer.batch_decode([r.tokens for r in rollout.responses], skip_special_tokens=True)
        rewards = [self._task.reward(text, row) for text, row in zip(texts, self._held_out, strict=True)]
        solve_rate = sum(reward >= SOLVED for reward in rewards) / len(rewards)
        self._record.write(
            Evaluation(
                t_s=self._record.now_s(),
                step=step,
                solve_rate=solve_rate,
                n=len(rewards),
                tokens_mean=rollout.num_tokens / len(rewards),
            )
        )
        self.solve_rates[step] = solve_rate
        self._progress.show_evaluation(step, solve_rate, len(rewards))

    def _evaluation_requests(self) -> list[RolloutRequest]:
        prompts = self._tokenizer([row["prompt"] for row in self._held_out])["input_ids"]
        seed = self.recipe.evaluation.seed
        return [
            RolloutRequest(
                prompt=tuple(prompt),
                max_tokens=self.recipe.lengths.response_tokens,
                key=derive_key(seed, (EVALUATION_WORD, *prompt), 0),
            )
            for prompt in prompts
        ]

    # -- bookkeeping

    def _current_step(self) -> int:
        """Number of the step that is running, from 1."""
        return int(self.trainer.state.global_step) // self.recipe.batch.updates + 1

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        inner_s = sum(self._step.phases.values())
        begin_s = self._record.now_s()
        try:
            yield
        finally:
            nested_s = sum(self._step.phases.values()) - inner_s
            self._add_phase(name, self._record.now_s() - begin_s - nested_s)

    def _add_phase(self, name: str, seconds: float) -> None:
        self._step.phases[name] = self._step.phases.get(name, 0.0) + max(seconds, 0.0)

    def now_s(self) -> float:
        """The run clock."""
        return self._record.now_s()

    def measured_s(self) -> float:
        """Seconds of the running step that belong to a phase other than training."""
        return sum(seconds for name, seconds in self._step.phases.items() if name != "train")

    def _finish_step(self, number: int, metrics: Mapping[str, Any]) -> None:
        step = self._step
        end_s = self._record.now_s()
        known_s = sum(step.phases.values())
        self._add_phase("other", end_s - step.begin_s - known_s)
        phases = Phases(**{f"{name}_s": seconds for name, seconds in step.phases.items()})
        if step.rollout is not None:
            self._record_rollout(number, step, phases, metrics)
        self._close_step()

    def _close_step(self) -> None:
        for name, seconds in self._step.phases.items():
            self._phases_s[name] = self._phases_s.get(name, 0.0) + seconds
        self._step = _Step(self._record.now_s())

    def _record_rollout(self, number: int, step: _Step, phases: Phases, metrics: Mapping[str, Any]) -> None:
        rollout = step.rollout
        assert rollout is not None
        size = self.recipe.batch.group_size
        for chunk in rollout.chunks:
            sample = rollout.responses[chunk.index].request.sample
            self._record.write(describe_chunk(chunk, number, chunk.index // size, sample))
        for i, response in enumerate(rollout.responses):
            reward = step.rewards[i] if i < len(step.rewards) else None
            self._record.write(_describe(response, rollout, i, number, i // size, reward))
        reward_mean = statistics.fmean(step.rewards) if step.rewards else None
        self._record.write(
            TrainStep(
                step=number,
                t_start_s=step.begin_s,
                phases=phases,
                tokens=rollout.num_tokens,
                reward_mean=reward_mean,
                reward_std=statistics.pstdev(step.rewards) if step.rewards else None,
                tail_s=rollout.tail_s,
                acceptance_length=rollout.acceptance_length,
                metrics=_numbers(metrics),
            )
        )
        self._num_tokens += rollout.num_tokens
        self._num_decodes += sum(response.num_steps for response in rollout.responses)
        self._progress.show_step(
            number,
            reward=reward_mean,
            num_tokens=rollout.num_tokens,
            rollout_s=rollout.wall_s,
            train_s=phases.train_s,
            acceptance_length=rollout.acceptance_length,
        )

    def summarize(self, reason: str, report: Path) -> Summary:
        """The run in numbers."""
        return Summary(
            steps=int(self.trainer.state.global_step) // self.recipe.batch.updates,
            reason=reason,
            solve_rates=dict(sorted(self.solve_rates.items())),
            comparisons=self.comparisons,
            acceptance_length=self._num_tokens / max(self._num_decodes, 1),
            phases_s=self._phases_s,
            report=report,
        )


def _describe(
    response: Response, rollout: Rollout, index: int, step: int, group: int, reward: float | None
) -> ResponseDone:
    return ResponseDone(
        t_start_s=rollout.begin_s,
        t_end_s=rollout.ends_s[index],
        step=step,
        group=group,
        sample=response.request.sample,
        prompt_tokens=len(response.request.prompt),
        response_tokens=len(response.tokens),
        num_steps=response.num_steps,
        drafted=response.num_draft_tokens,
        accepted=response.num_accepted_tokens,
        finish_reason=response.finish_reason,
        reward=reward,
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        name: None if value is None or value != value else float(value)
        for name, value in metrics.items()
        if value is None or isinstance(value, int | float)
    }

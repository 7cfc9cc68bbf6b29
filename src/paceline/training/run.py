"""A training run from a recipe: TRL trains, a RolloutEngine rolls out, everything is recorded.

Owns the order of things. Invariant: an interrupted and resumed run has the tokens, gradients and weights of an
uninterrupted one; a checkpoint holds the state between two steps, and all keys derive from the step. Called by
the `train` command.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.config import EngineSettings, RewardSettings
from paceline.engine.compiled import check_compiler
from paceline.engine.rollout_engine import RolloutEngine, check_checkpoint, prepare_environment
from paceline.engine.rungs import measure_ladder
from paceline.errors import ConfigError, PacelineError, TrainingError
from paceline.garbage import uncollected
from paceline.record import (
    FILE_NAME,
    Failure,
    Header,
    Note,
    RecordWriter,
    RunEnd,
    describe_machine,
    describe_versions,
)
from paceline.record.decisions import DECISIONS_FOLDER
from paceline.record.ladder_file import FILE_NAME as LADDER
from paceline.record.ladder_file import read_ladder
from paceline.tasks import Row, load_task
from paceline.terminal.interruption import Interrupted, Interruption
from paceline.terminal.progress import Progress
from paceline.training.checkpoints import checkpoint_at, is_complete, latest_checkpoint, remove, step_of
from paceline.training.policy import load_policy, load_tokenizer
from paceline.training.recipe import Recipe, check_resumable
from paceline.training.rollout_journals import RolloutJournals
from paceline.training.run_folder import (
    CHECKPOINTS,
    POLICY,
    Past,
    check_folder,
    clear_folder,
    read_past,
)
from paceline.training.step_runner import StepRunner, Summary

if TYPE_CHECKING:
    from paceline.fleet.fleet import Fleet
    from paceline.training.adaptive_rollouts import AdaptiveDrafter, AdaptiveRollouts
    from paceline.training.fleet_rollouts import TaskReward
    from paceline.training.rollouts import Rollouts, Watcher


class TrainingRun:
    """One `paceline train`. Build it (everything is checked), then `run()` it once.

    Raises a PacelineError for everything that can be found wrong before the engine starts.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        console: Console,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        check_folder(folder, resume=resume, overwrite=overwrite)
        self.recipe = recipe
        self.folder = folder
        self._console = console
        self._overwrite = overwrite
        self._resume = resume and (folder / FILE_NAME).is_file()
        self._past = read_past(folder) if self._resume else Past()
        if self._resume:
            check_resumable(recipe, self._past.config)
        if recipe.engine.compiled:
            check_compiler()
        prepare_environment()
        self._task = load_task(recipe.task.name, **recipe.task.options)
        model = check_checkpoint(recipe.model)
        for drafter in recipe.engine.drafter_folders:
            check_checkpoint(drafter)
        if self._resume and recipe.engine.chooses_drafter and (folder / LADDER).exists():
            read_ladder(folder / LADDER, recipe.engine.drafter_names)
        self._tokenizer = load_tokenizer(model)
        self._train_rows = self._task.train_rows(recipe.task.problems, recipe.task.seed)
        self._held_out = self._choose_held_out()
        self._check_prompts()
        self._arguments = self._build_arguments()
        self._journals = RolloutJournals(folder)
        self._fleet_reward: TaskReward | None = None

    def _choose_held_out(self) -> list[Row]:
        evaluation = self.recipe.evaluation
        if not evaluation.problems:
            return []
        return self._task.held_out_rows(evaluation.problems, evaluation.seed)

    def _encode(self, rows: Sequence[Row]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer([row["prompt"] for row in rows])["input_ids"]
        return ids

    def _check_prompts(self) -> None:
        limit = self.recipe.lengths.prompt_tokens
        for rows, kind in ((self._train_rows, "training"), (self._held_out, "held-out")):
            longest = max(map(len, self._encode(rows)), default=0) if rows else 0
            if longest > limit:
                raise ConfigError(
                    f"a {kind} prompt has {longest} tokens, lengths.prompt_tokens is {limit}: raise it"
                )

    @uncollected()
    def _build_arguments(self) -> Any:
        import torch

        from paceline.training.trl_arguments import trainer_arguments

        return trainer_arguments(self.recipe, self.folder / CHECKPOINTS, not torch.cuda.is_available())

    def _warn(self) -> None:
        """Say what will take much longer than it need."""
        from paceline.training.trl_arguments import emulates_bfloat16

        if emulates_bfloat16(self._arguments):
            self._console.print(
                "warning: this processor has no bfloat16 arithmetic, so training steps take tens of times as long: "
                "set optimizer.precision=auto"
            )

    # -- the run

    def run(self, *, tell_fd: int = 2) -> Summary:
        """Train to the end, or until Ctrl-C or SIGTERM. Raises PacelineError when something fails on the way.

        tell_fd: file descriptor that the answer to these goes to.
        """
        self._warn()
        record = self._open_record()
        try:
            with (
                self._start_drafter() as drafter,
                self._start_engine(drafter) as engine,
                Progress(self._console, self.recipe.steps) as progress,
                Interruption(tell_fd) as interruption,
                ExitStack() as beside,
            ):
                if engine.invariance_gap is not None:
                    record.write(Note(t_s=record.now_s(), text=engine.invariance_gap))
                rollouts: Rollouts
                if drafter is not None:
                    growing = self._grow_drafter(engine, record, progress, interruption, drafter)
                    rollouts = beside.enter_context(closing(growing))
                else:
                    rollouts = self._make_rollouts(engine, record, progress, interruption)
                if self.recipe.engine.chooses_drafter:
                    rollouts = self._choose_drafters(rollouts, engine)
                runner = StepRunner(
                    self.recipe,
                    self._task,
                    self._tokenizer,
                    self._held_out,
                    rollouts,
                    progress,
                    interruption,
                    self._past,
                    self._journals,
                )
                runner.trainer = trainer = self._build_trainer(runner)
                reason = self._train(trainer, runner)
            record.write(RunEnd(t_s=record.now_s(), reason=reason))
        except BaseException as error:
            self._note_failure(record, error)
            raise
        finally:
            record.close()
        return runner.summarize(reason, self._report())

    def _open_record(self) -> RecordWriter:
        if self._resume:
            return RecordWriter.resume(self.folder, self.recipe.record)
        header = Header(
            machine=describe_machine(),
            versions=describe_versions(),
            started_unix_s=time.time(),
            config=self.recipe.recorded(),
            model=Path(self.recipe.model).name,
            task=self.recipe.task.name,
            num_steps_planned=self.recipe.steps,
        )
        return RecordWriter.create(
            self.folder,
            header,
            self.recipe.record,
            overwrite=self._overwrite,
            clear=partial(clear_folder, self.folder),
        )

    def _start_drafter(self) -> AbstractContextManager[AdaptiveDrafter | None]:
        section = self.recipe.adaptive_drafter
        if section is None:
            return nullcontext()
        from paceline.training.adaptive_rollouts import AdaptiveDrafter

        return AdaptiveDrafter(self.recipe, section, self.folder)

    def _start_engine(self, drafter: AdaptiveDrafter | None) -> RolloutEngine | Fleet:
        recipe, capacity = self.recipe, self.recipe.capacity
        options: dict[str, Any] = {
            "dtype": capacity.dtype,
            "max_model_len": recipe.context_tokens,
            "max_num_seqs": capacity.max_num_seqs,
            "kv_cache_bytes": capacity.kv_cache_mib << 20,
            **capacity.vllm,
        }
        settings = self._engine_settings()
        if drafter is not None:
            settings = settings.model_copy(update={"model_drafter": str(drafter.model.resolve())})
        if recipe.fleet is None:
            self._console.print("starting the engine")
            return RolloutEngine(recipe.model, settings, **options)
        from paceline.fleet.fleet import Fleet
        from paceline.training.fleet_rollouts import TaskReward

        self._console.print(f"starting {recipe.fleet.workers} engines")
        if recipe.fleet.rewards is not None:
            self._fleet_reward = TaskReward(self._task, self._tokenizer, [*self._train_rows, *self._held_out])
        return Fleet(
            recipe.model,
            recipe.fleet,
            settings,
            reward=self._fleet_reward,
            renews_drafter=drafter is not None,
            **options,
        )

    def _make_rollouts(
        self,
        engine: RolloutEngine | Fleet,
        record: RecordWriter,
        watcher: Watcher,
        interruption: Interruption,
    ) -> Rollouts:
        if isinstance(engine, RolloutEngine):
            from paceline.training.rollouts import WatchedRollouts

            return WatchedRollouts(engine, record, watcher, interruption)
        from paceline.training.fleet_rollouts import FleetRollouts

        return FleetRollouts(engine, record, watcher, interruption, self._fleet_reward)

    def _grow_drafter(
        self,
        engine: RolloutEngine | Fleet,
        record: RecordWriter,
        watcher: Watcher,
        interruption: Interruption,
        drafter: AdaptiveDrafter,
    ) -> AdaptiveRollouts:
        """Rollouts beside which the drafter is trained."""
        from paceline.training.adaptive_rollouts import AdaptiveRollouts
        from paceline.training.drafter_sessions import FleetSessions, Sessions, TailSessions

        sessions: Sessions
        if isinstance(engine, RolloutEngine):
            watcher = sessions = TailSessions(drafter.link, drafter.section.max_running, record, watcher)
        else:
            sessions = FleetSessions(engine, drafter.link)
        rollouts = self._make_rollouts(engine, record, watcher, interruption)
        return AdaptiveRollouts(rollouts, engine, drafter, sessions)

    def _choose_drafters(self, rollouts: Rollouts, engine: RolloutEngine | Fleet) -> Rollouts:
        """The same, each step with the best drafter by the draft ladder."""
        from paceline.training.ladder_rollouts import LadderRollouts

        names = self.recipe.engine.drafter_names
        if isinstance(engine, RolloutEngine):
            return LadderRollouts(rollouts, names, partial(measure_ladder, engine), self.folder)
        return LadderRollouts(rollouts, names, engine.measure_ladder, self.folder, engine.use_ladder)

    def _engine_settings(self) -> EngineSettings:
        if not self.recipe.record.decisions:
            return self.recipe.engine
        folder = (self.folder / DECISIONS_FOLDER).resolve()
        return self.recipe.engine.model_copy(update={"decision_log": str(folder)})

    def _build_trainer(self, runner: StepRunner) -> Any:
        with uncollected():
            from datasets import Dataset
            from transformers import PrinterCallback

            from paceline.integrations.trl import trainers as trl
            from paceline.training.hooks import TrainingHooks

        fleet = self.recipe.fleet
        kind = trl.RLOOTrainer if self.recipe.algorithm.name == "rloo" else trl.GRPOTrainer
        trainer = kind(
            model=load_policy(self.recipe.model, self.recipe.context_tokens, self._arguments.use_cpu),
            args=self._arguments,
            reward_funcs=runner.reward,
            train_dataset=Dataset.from_list(self._train_rows),
            processing_class=self._tokenizer,
            callbacks=[TrainingHooks(runner)],
            engine=runner,
            run_seed=self.recipe.seed,
            failure_reward=((fleet and fleet.rewards) or RewardSettings()).failure_reward,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _train(self, trainer: Any, runner: StepRunner) -> str:
        """Returns "finished" or "interrupted"; saves a checkpoint of the last finished step either way.

        Raises TrainingError where the trainer ends before the last step by itself.
        """
        checkpoint = latest_checkpoint(self.folder / CHECKPOINTS) if self._resume else None
        try:
            if checkpoint is not None and step_of(checkpoint) >= self._arguments.max_steps:
                self._complete(trainer, runner, checkpoint)
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Interrupted:
            self._save_between_steps(trainer, runner)
            return "interrupted"
        if runner.interrupted:
            return "interrupted"
        done, planned = int(trainer.state.global_step), self._arguments.max_steps
        if done < planned:
            raise TrainingError(
                f"the trainer ended after {done} of {planned} updates: its log says why, --resume goes on from the "
                "last checkpoint"
            )
        trainer.save_model(str(self.folder / POLICY))
        self._journals.clear()
        return "finished"

    def _complete(self, trainer: Any, runner: StepRunner, checkpoint: Path) -> None:
        """Finish a run whose last step is in a checkpoint already; TRL would train beyond it."""
        from transformers import TrainerState

        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        runner.begin()

    def _save_between_steps(self, trainer: Any, runner: StepRunner) -> None:
        """Save the state at the end of the last finished update; what an unfinished one drew is undone."""
        done = int(trainer.state.global_step)
        checkpoint = checkpoint_at(self.folder / CHECKPOINTS, done)
        if done and not is_complete(checkpoint):
            remove(checkpoint)
            runner.restore_randomness()
            trainer._save_checkpoint(trainer.model, trial=None)
            runner.note_checkpoint()

    def _note_failure(self, record: RecordWriter, error: BaseException) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        try:
            if not stopped:
                record.write(Failure(t_s=record.now_s(), text=f"{type(error).__name__}: {error}"))
            record.write(RunEnd(t_s=record.now_s(), reason="interrupted" if stopped else "failed"))
        except PacelineError:  # the record cannot be written: the first error is the one to show
            return

    def _report(self) -> Path:
        from paceline.report import build_report

        return build_report(self.folder)

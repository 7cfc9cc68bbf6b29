"""Where a StepRunner is hooked into the trainer: a transformers TrainerCallback that only forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from paceline.training.step_runner import StepRunner


class TrainingHooks(TrainerCallback):  # type: ignore[misc]
    """Forwards the trainer's events; measures what of an update is not rollout, reward or weight push."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._begin_s = 0.0
        self._measured_s = 0.0
        self._train_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.save_steps = args.save_steps  # a checkpoint brings what the run had before
        self._runner.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runner.keep_randomness()
        self._runner.check_interruption()
        self._begin_s = self._runner.now_s()
        self._measured_s = self._runner.measured_s()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runner.check_interruption()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runner.keep_randomness()
        other_s = self._runner.measured_s() - self._measured_s
        self._train_s = self._runner.now_s() - self._begin_s - other_s

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._runner.note_checkpoint()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}):  # the summary at the end of training
            return
        if self._runner.end_update(self._train_s, logs or {}):
            control.should_training_stop = True
            control.should_save = True

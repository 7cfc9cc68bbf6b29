"""A run's end of its spot trainer: starts and stops it, tells it lessons, takes the drafters that it saves.

Nothing here waits for the trainer. It is stopped by the kernel, wherever it is: no pack has to be finished. One that
was killed is started again when it may train next, and goes on from its newest checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from paceline.distillation.checkpoints import CheckpointWriter
from paceline.distillation.export import drafter_weights
from paceline.distillation.packing import Sample
from paceline.distillation.spot import LESSON, SpotSettings, make_lesson, read_drafter
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import FILE_NAME, USED_NAME, Description, read_folder
from paceline.drafting.child_process import ChildProcess

LEAST_LIFE_S = 60.0
"""A trainer that ended sooner, and was not killed, could not load what it needs."""


class SpotLink:
    """Owns the process. It runs at first, to load what it needs. Close it."""

    def __init__(self, settings: SpotSettings) -> None:
        self._folder = Path(settings.folder)
        text = msgspec.json.encode(settings).decode()
        module = "paceline.distillation.spot_process"
        self._child = ChildProcess(
            "drafter's trainer", module, (text,), {"OMP_NUM_THREADS": "1"}, LEAST_LIFE_S
        )
        self._lessons = CheckpointWriter(self._folder / LESSON)
        self._used = CheckpointWriter(self._folder / USED_NAME)
        self._taken: tuple[dict[str, Tensor], Description] | None = None
        self._taken_ns = 0
        self._begun: tuple[int, float | None] = self.pid, None

    @property
    def pid(self) -> int:
        """Process id of the present trainer."""
        return self._child.pid

    def resume(self) -> None:
        """Let it train."""
        self._child.check()
        self._child.send(signal.SIGCONT)
        self._begun = self.pid, self._child.core_s()

    def pause(self) -> float | None:
        """Stop it now.

        Returns the processor time that it has used since `resume`, seconds; None if it did not run all the while, as it
        had ended before or has ended meanwhile.
        """
        self._child.send(signal.SIGSTOP)
        (pid, before_s), now_s = self._begun, self._child.core_s()
        return None if before_s is None or now_s is None or pid != self.pid else now_s - before_s

    def teach(self, step: int, policy: Mapping[str, Tensor], samples: Sequence[Sample]) -> None:
        """Tell it a lesson (`make_lesson`); copied here, written in the background. Raises RecordError."""
        self._lessons.save(*make_lesson(step, policy, samples))

    def take(self) -> tuple[dict[str, Tensor], Description] | None:
        """Weights and description of the drafter that it saved last; None if that was taken before."""
        try:
            saved_ns = (self._folder / FILE_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if saved_ns == self._taken_ns:
            return None
        self._taken_ns = saved_ns
        if (found := read_folder(self._folder)) is None:
            return None
        tensors, made = found
        self._taken = {name: one for name, one in tensors.items() if name.startswith(NETWORK)}, made
        return drafter_weights(tensors, made.method), made

    def use(self) -> None:
        """The engines draft with what was taken last: the trainer measures it beside what it makes from now on, and a
        resumed run finds it. Copied here, written in the background. Raises RecordError.
        """
        if self._taken is not None:
            tensors, made = self._taken
            self._used.save(tensors, made.note())

    def used(self) -> tuple[dict[str, Tensor], Description] | None:
        """The drafter that engines used last, before the run was resumed too; None before the first."""
        return read_drafter(self._folder, USED_NAME)

    def close(self) -> None:
        """End it. What it has saved stays."""
        self._child.close()
        self._lessons.close()
        self._used.close()

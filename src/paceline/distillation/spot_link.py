"""A run's end of its spot trainers: starts and stops them, tells them lessons, takes the drafters that they save.

Nothing here waits for a trainer. It is stopped by the kernel, wherever it is: no pack has to be finished. One that was
killed is started again when it may train next, and goes on from the newest checkpoint. A disk that refuses costs what
the drafter would have learned, and no more.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import Tensor

from paceline.distillation import team
from paceline.distillation.checkpoints import CheckpointWriter
from paceline.distillation.export import drafter_weights
from paceline.distillation.packing import Sample
from paceline.distillation.spot import LESSON, SpotSettings, make_lesson, read_drafter
from paceline.distillation.trainer import NETWORK
from paceline.distillation.training_folder import (
    USED_NAME,
    Description,
    find_newest,
    names_in,
    read_folder,
)
from paceline.drafting.child_process import ChildProcess
from paceline.errors import EngineError, RecordError

LOGGER = logging.getLogger(__name__)

LEAST_LIFE_S = 60.0
"""A trainer that ended sooner, or had saved nothing yet, and was not killed, cannot do its work."""


class SpotLink:
    """Owns the processes, each of which trains while somebody lends it cores. Those at work together train one drafter
    (team.py). They run at first, to load what they need. Close it.
    """

    def __init__(self, settings: SpotSettings, num_trainers: int = 1) -> None:
        self._folder = Path(settings.folder)
        team.clear(self._folder)
        settings = msgspec.structs.replace(settings, num_trainers=num_trainers)
        if num_trainers > 1:  # nobody trains before there is a session, apart from the others
            team.write_json(self._folder / team.SESSION, team.Session(0, ()))
        self._children = [_start(settings, index) for index in range(num_trainers)]
        self._lent: dict[str, int] = {}  # trainers at work, by who lends them cores
        self._session = 0
        self._lessons = CheckpointWriter(self._folder / LESSON)
        self._used = CheckpointWriter(self._folder / USED_NAME)
        self._taken: tuple[dict[str, Tensor], Description] | None = None
        self._taken_id = "", 0
        self._begun: dict[int, tuple[int, float | None]] = {}

    @property
    def num_trainers(self) -> int:
        """Trainers that can be at work at once."""
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        """Process ids of the present trainers."""
        return [child.pid for child in self._children]

    def resume(self, lender: str, leader: str) -> None:
        """Let a trainer train on the cores of `lender`. leader: whose trainer leads from here on.

        Raises EngineError where all are at work.
        """
        free = [index for index in range(self.num_trainers) if index not in self._lent.values()]
        if not free:
            raise EngineError(f"all {self.num_trainers} trainers are at work: {lender} cannot lend its cores")
        index = min(
            free, key=lambda one: (self._children[one].core_s() is None, one)
        )  # those that live first
        child = self._children[index]
        self._lent[lender] = index
        child.check()
        self._call(leader)
        child.send(signal.SIGCONT)
        self._begun[index] = child.pid, child.core_s()

    def pause(self, lender: str, leader: str | None) -> float | None:
        """Stop the trainer on the cores of `lender` now. leader: whose trainer leads those that are left.

        Returns the processor time that it has used since `resume`, seconds; None if it did not run all the while, as it
        had ended before or has ended meanwhile.
        """
        if lender not in self._lent:
            return None
        index = self._lent.pop(lender)
        child = self._children[index]
        self._call(leader)
        child.send(signal.SIGSTOP)
        (pid, before_s), now_s = self._begun[index], child.core_s()
        return None if before_s is None or now_s is None or pid != child.pid else now_s - before_s

    def stop(self) -> None:
        """Stop all, which have run to load what they need."""
        for child in self._children:
            child.send(signal.SIGSTOP)

    def _call(self, leader: str | None) -> None:
        """Tell those at work who they are; a single trainer is alone whatever happens."""
        if self.num_trainers == 1:
            return
        self._session += 1
        names = sorted(self._lent, key=lambda name: name != leader)
        session = team.Session(self._session, tuple(self._lent[name] for name in names))
        try:
            team.write_json(self._folder / team.SESSION, session)
        except OSError as error:  # they train apart from each other, which is no reason to end a rollout
            LOGGER.warning("cannot tell the drafter's trainers who they are: %s", error)

    def teach(self, step: int, policy: Mapping[str, Tensor], samples: Sequence[Sample]) -> None:
        """Tell them a lesson (`make_lesson`); copied here, written in the background."""
        with _told("a lesson"):
            self._lessons.save(*make_lesson(step, policy, samples))

    def take(self) -> tuple[dict[str, Tensor], Description] | None:
        """Weights and description of the newest drafter that was saved; None if that was taken before."""
        name = find_newest(self._folder)
        try:
            saved = name, (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if saved == self._taken_id:
            return None
        self._taken_id = saved
        if (found := read_folder(self._folder, name)) is None:
            return None
        tensors, made = found
        self._taken = {name: one for name, one in tensors.items() if name.startswith(NETWORK)}, made
        return drafter_weights(tensors, made.method), made

    def use(self) -> None:
        """The engines draft with what was taken last: the trainer measures it beside what it makes from now on, and a
        resumed run finds it. Copied here, written in the background.
        """
        if self._taken is not None:
            tensors, made = self._taken
            with _told("the drafter that is used"):
                self._used.save(tensors, made.note())

    def used(self) -> tuple[dict[str, Tensor], Description] | None:
        """The drafter that engines used last, before the run was resumed too; None before the first."""
        return read_drafter(self._folder, USED_NAME)

    def close(self) -> None:
        """End them. What they have saved stays."""
        for child in self._children:
            child.close()
        with _told("the last lesson"):
            self._lessons.close()
        with _told("the drafter that is used"):
            self._used.close()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Warn of a disk that refuses, which is no reason to end a run."""
    try:
        yield
    except RecordError as error:
        LOGGER.warning("%s is not kept for the drafter's training: %s", what, error)


def _start(settings: SpotSettings, index: int) -> ChildProcess:
    text = msgspec.json.encode(msgspec.structs.replace(settings, index=index)).decode()
    folder = Path(settings.folder)  # where a leader saves what all have learned
    return ChildProcess(
        "drafter's trainer",
        "paceline.distillation.spot_process",
        (text,),
        {"OMP_NUM_THREADS": "1"},
        LEAST_LIFE_S,
        lambda started_ns: any((folder / name).stat().st_mtime_ns > started_ns for name in names_in(folder)),
    )

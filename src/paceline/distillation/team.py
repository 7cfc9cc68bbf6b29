"""Several trainers of one drafter: who trains together now, and how what each learns reaches all (TLT 4.2).

Who lends its cores to training takes them back in the middle of anything: the kernel stops the trainer, which may go on
in a second or never. So nobody waits for one that has left the session, and what it has missed it is sent when it
comes back. Through the run's folder:

    session.json      from the run: number and members of the present session, the leader first
    present-I.json    from trainer I: the session that it has heard of, and its process
    round.json        from the leader, the first that is there: who trains together from here on, and where they meet

A round begins with the leader's drafter, its optimizers' state among it, for everyone. In every step each learns from
responses that it has drawn, and the gradients are averaged by response tokens (torch.distributed, gloo). Who comes
later waits for the next round, which the leader calls between two steps. When session or round change, what is under
way is given up: a step then counts for those that have taken it, and the next round begins with what the leader has.

TLT leaves open how members join and leave. Rounds are the smallest that bears a member which stops inside a collective
call: gloo knows no way out of one but to drop the group.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import torch
from torch import Tensor
from torch import distributed as dist

SESSION, ROUND, PRESENT = "session.json", "round.json", "present-{}.json"
HOST = "127.0.0.1"
MEETING_S = 5.0
"""Longest time to meet in; then the leader calls another round."""
ALONE_S = 20.0
"""After a meeting to which not all came the leader trains alone for so long."""
LOST_S = 30.0
"""After so long a collective call fails where nothing else says that a member is gone."""
POLL_S = 0.001
"""Between two looks whether a collective call has ended."""
PAUSE_S = 0.02
"""Between two looks whether there is a round."""

T = TypeVar("T")


class Session(msgspec.Struct, frozen=True):
    """Who may train."""

    number: int
    members: tuple[int, ...]
    """Trainers by index, the leader first."""


class Present(msgspec.Struct, frozen=True):
    """A trainer that has heard of a session."""

    session: int
    process: int


class Round(msgspec.Struct, frozen=True):
    """Who trains together."""

    session: int
    number: int
    members: tuple[int, ...]
    port: int
    """Of the leader's store, where they meet."""


class Changed(Exception):
    """Somebody has come or gone: what was under way counts no more."""


class Team:
    """A trainer's place among the others. One per process; a trainer that nobody has put in a session is alone."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder, self._index = folder, index
        self._session: Session | None = None
        self._leader: int | None = None
        self._round: Round | None = None
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self._seen: dict[str, tuple[int, int]] = {}  # which file it was when it was read
        self._failed: tuple[int, ...] = ()  # members of the last round to which not all came
        self._alone_s = 0.0  # until when the leader does not call these again
        self._left: list[tuple[Any, ...]] = []  # groups that were dropped inside a call, until that has ended

    @property
    def leads(self) -> bool:
        """Whether others follow this trainer, or nobody is there."""
        return self._session is None or self._leader == self._index

    @property
    def size(self) -> int:
        """Trainers of the present round."""
        return 1 if self._group is None or self._round is None else len(self._round.members)

    def join(
        self, tell: Callable[[], bytes], hear: Callable[[bytes], None], lead: Callable[[], None]
    ) -> bool:
        """Take part in the present round, or in the next one; False where there is none for this trainer yet.

        tell: the leader's state. hear: take over that of another leader. lead: this trainer leads from here on.
        """
        if (session := self._news(SESSION, Session)) is not None:
            self._leave()
            self._session, self._leader, self._failed = session, None, ()
            if self._index in session.members:
                present = Present(session.number, os.getpid())
                write_json(self._folder / PRESENT.format(self._index), present)
        if self._session is None:
            return True
        if self._index not in self._session.members:
            time.sleep(PAUSE_S)
            return False
        leader = next(
            index for index in self._session.members if index == self._index or self._is_alive(index)
        )
        if leader != self._leader:
            self._leave()
            self._leader = leader
            if self.leads:
                lead()
        return self._call(tell) if self.leads else self._follow(hear)

    def average(
        self, parameters: Sequence[Tensor], num_decided: int, num_tokens: int, seconds: float
    ) -> tuple[int, float]:
        """Give every parameter the gradient of all trainers' response tokens together.

        num_decided: response tokens that this trainer's gradients are the mean of; 0: it has none. num_tokens: with
        their prompts. seconds: that it has spent on them. Returns the last two of all trainers. Raises Changed where
        that cannot be.
        """
        if self._group is None:
            return num_tokens, seconds
        parts = [
            torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() * num_decided for p in parameters
        ]
        flat = torch.cat([*parts, torch.tensor([float(num_decided), float(num_tokens), seconds])])
        self._wait(self._group.allreduce([flat]), flat)
        decided, total, spent_s = flat[-3:].tolist()
        if decided:
            for parameter, part in zip(
                parameters, flat.split([*(p.numel() for p in parameters), 3]), strict=False
            ):
                parameter.grad = (part / decided).view_as(parameter)
        return int(total), spent_s

    def _call(self, tell: Callable[[], bytes]) -> bool:
        """As the leader: go on with the present round, unless others have come or one has died."""
        assert self._session is not None
        others = (
            index for index in self._session.members if index != self._index and self._is_present(index)
        )
        members = (self._index, *others)
        if self._round is not None and self._round.members == members:
            return True
        if self._round is not None and members == self._failed and time.monotonic() < self._alone_s:
            return True
        number = 1 if self._round is None else self._round.number + 1
        self._leave()
        if len(members) == 1:
            self._round = Round(self._session.number, number, members, 0)
            return True
        self._store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=MEETING_S), wait_for_workers=False)
        self._round = Round(self._session.number, number, members, self._store.port)
        write_json(self._folder / ROUND, self._round)
        try:
            self._meet(self._round)
            state = torch.frombuffer(bytearray(tell()), dtype=torch.uint8)
            self._send(torch.tensor([len(state)]))
            self._send(state)
        except Changed:
            self._leave()
            self._round = Round(self._session.number, number, (self._index,), 0)
            self._failed, self._alone_s = members, time.monotonic() + ALONE_S
            return False
        return True

    def _follow(self, hear: Callable[[bytes], None]) -> bool:
        """As another member: go on with the present round, or begin with the next one that has a place for it."""
        assert self._session is not None
        if (found := self._news(ROUND, Round)) is not None:
            self._leave()
            if found.session == self._session.number and self._index in found.members:
                self._round = found
                try:
                    self._store = dist.TCPStore(
                        HOST, found.port, None, False, timedelta(seconds=MEETING_S), wait_for_workers=False
                    )
                    self._meet(found)
                    length = torch.zeros(1, dtype=torch.int64)
                    self._send(length)
                    state = torch.zeros(int(length), dtype=torch.uint8)
                    self._send(state)
                except (Changed, RuntimeError):
                    self._leave()
                    return False
                hear(state.numpy().tobytes())
        if self._group is None:
            time.sleep(PAUSE_S)
            return False
        return True

    def _meet(self, round_: Round) -> None:
        """Make the group. Raises Changed where not all have come in time."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=MEETING_S)
        place = round_.members.index(self._index)
        store = dist.PrefixStore(f"round {round_.number}", self._store)
        try:
            group = dist.ProcessGroupGloo(store, place, len(round_.members), options)
        except RuntimeError as error:
            raise Changed from error
        group._set_default_timeout(timedelta(seconds=LOST_S))
        self._group = group

    def _send(self, tensor: Tensor) -> None:
        """From the leader to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(self._group.broadcast([tensor], options), tensor)

    def _wait(self, work: Any, *tensors: Tensor) -> None:
        """Until a call has ended. Raises Changed where it has failed, or session or round are other ones."""
        while not work.is_completed():
            if self._is_other():
                self._left.append((self._group, self._store, work, *tensors))
                self._leave()
                raise Changed
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            self._leave()
            raise Changed from error

    def _leave(self) -> None:
        """Be in no round."""
        self._left = [one for one in self._left if not one[2].is_completed()]
        self._group = self._store = self._round = None

    def _is_other(self) -> bool:
        """Whether the session, or the round of another one's, is no longer that which was read last."""
        names = (SESSION,) if self.leads else (SESSION, ROUND)
        return any(file_id(self._folder / name) != self._seen.get(name, NONE) for name in names)

    def _is_present(self, index: int) -> bool:
        """Whether a trainer has heard of the session, and lives."""
        assert self._session is not None
        found = read_json(self._folder / PRESENT.format(index), Present)
        return found is not None and found.session == self._session.number and is_alive(found.process)

    def _is_alive(self, index: int) -> bool:
        """Whether a trainer has heard of any session, and lives: it will hear of this one."""
        found = read_json(self._folder / PRESENT.format(index), Present)
        return found is not None and is_alive(found.process)

    def _news(self, name: str, kind: type[T]) -> T | None:
        """What a file holds, if it is another one than that which was read last."""
        try:
            with (self._folder / name).open("rb") as file:
                found = _id_of(os.fstat(file.fileno()))
                text = file.read()
        except FileNotFoundError:
            return None
        if found == self._seen.get(name, NONE):
            return None
        self._seen[name] = found
        return msgspec.json.decode(text, type=kind)


NONE = (0, 0)
"""No file."""


def file_id(path: Path) -> tuple[int, int]:
    """Tells a file from the one whose place it has taken."""
    try:
        return _id_of(path.stat())
    except FileNotFoundError:
        return NONE


def _id_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_ino, stat.st_mtime_ns


def write_json(path: Path, value: msgspec.Struct) -> None:
    """In one move: whoever reads finds the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(msgspec.json.encode(value))
    now_ns = time.time_ns()  # finer than what the file system writes, so that no two files are taken for one
    os.utime(fresh, ns=(now_ns, now_ns))
    fresh.replace(path)


def read_json(path: Path, kind: type[T]) -> T | None:
    """None where there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def is_alive(process: int) -> bool:
    """Whether a process runs or is stopped, not where it has ended."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clear(folder: Path) -> None:
    """Remove what is left of the sessions of an earlier run."""
    for pattern in (SESSION, ROUND, PRESENT.format("*")):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)

"""What does harm to a fleet while it rolls out: processes that are killed, files of its KV pool that are damaged."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.fleet.fleet import Finished, Fleet
from paceline.fleet.journal import Journal
from paceline.types import RolloutRequest


def roll_out(
    fleet: Fleet,
    requests: Sequence[RolloutRequest],
    params: Any,
    meanwhile: Callable[[], object] = lambda: None,
    journal: Journal | None = None,
) -> list[Finished]:
    """One rollout, with `meanwhile` called all the time; every response must come once."""
    found: dict[int, Finished] = {}
    fleet.submit(requests, params, journal=journal)
    while fleet.num_unfinished:
        meanwhile()
        for finished in fleet.advance(0.02):
            assert finished.index not in found, "a response came twice"
            found[finished.index] = finished
    return [found[index] for index in range(len(requests))]


@dataclass
class Chaos:
    """Kills a process now and then, engines only while another one is up."""

    fleet: Fleet
    rng: random.Random
    left: Counter[str]
    """Kills to come of "engine", "draft" and "reward"."""
    next_s: float = 0.0
    killed: set[int] = field(default_factory=set)

    def strike(self) -> None:
        """Kill something if it is time to; cheap ones more often."""
        now_s = time.monotonic()
        kinds = [kind for kind, count in self.left.items() if count]
        if not kinds or now_s < self.next_s:
            return
        self.next_s = now_s + self.rng.uniform(0.05, 1.5)
        kind = self.rng.choice(kinds)
        process = getattr(self, f"_{kind}")()
        if process is None or process in self.killed:  # dead already, and nobody knows yet
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            self.killed.add(process)
            self.left[kind] -= 1

    def wait_for_losses(self, count: int) -> None:
        """Until the fleet has noticed that it lost so many engines in all; a kill may fall on a rollout's end."""
        deadline_s = time.monotonic() + 60
        while self.count_losses() < count:
            assert time.monotonic() < deadline_s, f"{self.count_losses()} losses instead of {count}"
            self.fleet.advance()
        assert self.count_losses() == count

    def count_losses(self) -> int:
        """Engines that the fleet has lost."""
        return sum(status.num_losses for status in self.fleet.board.workers.values())

    def _engine(self) -> int | None:
        busy = [s.name for s in self.fleet.board.workers.values() if s.state == "up" and s.num_running]
        up = [s.name for s in self.fleet.board.workers.values() if s.state == "up"]
        return self.fleet._actors.process(self.rng.choice(busy)) if busy and len(up) > 1 else None

    def _draft(self) -> int | None:
        server = self.fleet._draft_server
        assert server is not None
        return server.child.pid if server.child._process.poll() is None else None

    def _reward(self) -> int | None:
        assert self.fleet._rewards is not None
        return self.rng.choice(self.fleet._rewards.processes) if self.fleet._rewards.processes else None


class Saboteur:
    """A thread that damages half of the files of a KV pool while it is entered: entries, and those being written.

    Each file is looked at once, so what is left whole does not depend on how fast the fleet is.
    """

    def __init__(self, folders: Sequence[Path], rng: random.Random, pause_s: float) -> None:
        self.harms: Counter[tuple[Path, str]] = Counter()
        self._folders, self._rng, self._pause_s = folders, rng, pause_s
        self._seen: set[tuple[Path, int]] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._pause_s):
            for folder in self._folders:
                for file in [*folder.glob("*.kv"), *folder.glob("*.part")]:
                    with contextlib.suppress(FileNotFoundError):
                        self._look_at(folder, file)

    def _look_at(self, folder: Path, file: Path) -> None:
        name = (folder, file.stat().st_ino)
        if name in self._seen:
            return
        self._seen.add(name)
        if self._rng.random() < 0.5:
            harm = self._rng.choice(["flip", "cut", "remove"])
            getattr(self, f"_{harm}")(file)
            self.harms[folder, harm] += 1

    def _flip(self, file: Path) -> None:
        with file.open("r+b") as data:
            place = self._rng.randrange(max(os.fstat(data.fileno()).st_size, 1))
            data.seek(place)
            byte = data.read(1) or b"\0"
            data.seek(place)
            data.write(bytes([byte[0] ^ 1 << self._rng.randrange(8)]))

    def _cut(self, file: Path) -> None:
        with file.open("r+b") as data:
            data.truncate(self._rng.randrange(max(os.fstat(data.fileno()).st_size, 1)))

    def _remove(self, file: Path) -> None:
        file.unlink()

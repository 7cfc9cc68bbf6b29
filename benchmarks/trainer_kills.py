"""Trainers of a drafter killed while they train, some of them while they write: what is lost (TLT 4.2).

    python benchmarks/trainer_kills.py --json benchmarks/results/trainer_kills.json

Two trainers (`--trainers`) learn together from responses of the Countdown policy, in state TRAINING all the while. One
after the other is killed with SIGKILL at a random moment, the leader and the others by turns; `--write-kills` times it
is the leader, while its checkpoint is being written. Each that was killed is let go again, as a fleet does in its next
session. After each kill the folder has to hold a whole checkpoint with no fewer tokens than before it.

A kill was `while it writes` if the killed trainer has left a part of a checkpoint, which is removed before the next
kill, and `at any moment` if not, whatever was meant. `lost_s` is the processor time that the killed leader had used
since the newest checkpoint was written; others lose nothing, as their leader saves. `all_kills` has each kill by
itself. `tokens` are those that the newest checkpoint has learned from in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import parser, print_bars, publish
from pairs import PAIRS

from paceline.distillation.checkpoints import write
from paceline.distillation.fresh_drafter import make_small_model
from paceline.distillation.packing import Sample
from paceline.distillation.spot import LESSON, SpotSettings, make_lesson
from paceline.distillation.spot_link import SpotLink
from paceline.distillation.team import PRESENT, SESSION, Present, Session, is_alive, read_json
from paceline.distillation.training_folder import file_name, find_newest, names_in, read_folder

COLUMNS = ("what", "kills", "leaders", "broken", "fallen", "lost_s_median", "lost_s_most", "tokens")
LOST_S = 10.0
"""The bar: processor time that a kill loses at most."""
POLL_S = 0.002
PATIENCE_S = 120.0


def make_folder(folder: Path, seed: int) -> SpotSettings:
    """A lesson of the policy's own responses, and a new small drafter."""
    from transformers import AutoModelForCausalLM

    policy = PAIRS["countdown"].policy
    prompts = PAIRS["countdown"].draw_prompts(policy, 32, seed)
    model = AutoModelForCausalLM.from_pretrained(policy)
    torch.manual_seed(seed)
    samples = []
    for prompt in prompts:
        made = model.generate(torch.tensor([prompt]), do_sample=True, temperature=1.0, max_new_tokens=192)[0]
        samples.append(Sample(made, len(prompt), torch.empty(len(made), 0)))
    make_small_model(policy, folder / "small", 128, 2, seed)
    (folder / "drafter").mkdir()
    write(folder / "drafter" / LESSON, *make_lesson(1, dict(model.named_parameters()), samples))
    return SpotSettings(
        parent=os.getpid(),
        folder=str(folder / "drafter"),
        target=str(policy),
        method="osd",
        drafter=str(folder / "small"),
        temperature=1.0,
        rate=2e-3,
    )


class Watch:
    """What is known of the trainers from outside."""

    def __init__(self, link: SpotLink, folder: Path) -> None:
        self.link, self.folder = link, folder
        self.saved_ns = 0
        self._saved_core_s: dict[int, float] = {}  # of each trainer then, by process

    def leader(self) -> int:
        """Index of the trainer that leads: the first of the session that is there. One alone writes no round."""
        session = read_json(self.folder / SESSION, Session)
        members = () if session is None else session.members
        return next((index for index in members if self._is_there(index)), 0)

    def core_s(self, index: int) -> float:
        """Processor time of a trainer so far."""
        return self.link._children[index].core_s() or 0.0

    def look(self) -> None:
        """Note when a checkpoint was written last."""
        newest = max(((self.folder / name).stat().st_mtime_ns for name in names_in(self.folder)), default=0)
        if newest > self.saved_ns:
            self.saved_ns = newest
            self._saved_core_s = {pid: self.core_s(index) for index, pid in enumerate(self.link.pids)}

    def lost_s(self, index: int) -> float:
        """Processor time of a leader since then, or since it was started."""
        return max(self.core_s(index) - self._saved_core_s.get(self.link.pids[index], 0.0), 0.0)

    def is_writing(self) -> bool:
        """Whether the leader is writing a checkpoint; what killed trainers have left of theirs is removed."""
        return self._part(self.leader()).exists()

    def remove_part(self, index: int) -> bool:
        """Remove what a trainer that is dead has written of a checkpoint; False if it was not writing any."""
        was_writing = self._part(index).exists()
        self._part(index).unlink(missing_ok=True)
        return was_writing

    def tokens(self) -> int:
        """Of the newest checkpoint; raises CheckpointError where any is broken."""
        for name in names_in(self.folder):
            read_folder(self.folder, name)
        found = read_folder(self.folder, find_newest(self.folder))
        return 0 if found is None else found[1].trained_tokens

    def _part(self, index: int) -> Path:
        return self.folder / f"{file_name(index)}.new"

    def _is_there(self, index: int) -> bool:
        found = read_json(self.folder / PRESENT.format(index), Present)
        return found is not None and is_alive(found.process)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait, and keep looking."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.folder}: nothing happened for {PATIENCE_S:.0f} s")
            self.look()
            time.sleep(POLL_S)


def kill_them(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for the kills at random moments, one for those while a checkpoint was written."""
    from paceline.errors import CheckpointError

    rng = random.Random(options.seed)
    link = SpotLink(make_folder(folder, options.seed), options.trainers)
    watch = Watch(link, folder / "drafter")
    names = [f"w{index}" for index in range(options.trainers)]
    found: dict[str, list[dict[str, Any]]] = {"at any moment": [], "while it writes": []}
    try:
        link.stop()
        for name in names:
            link.resume(name, names[0])
        kinds = ["while it writes"] * options.write_kills
        kinds += ["at any moment"] * (options.kills - options.write_kills)
        rng.shuffle(kinds)
        for number, kind in enumerate(kinds):
            seen_ns = watch.saved_ns
            watch.until(lambda seen_ns=seen_ns: watch.saved_ns > seen_ns)  # type: ignore[misc]
            if kind == "while it writes":
                before = watch.tokens()  # a write may be over before this is
                watch.until(watch.is_writing)
                index = leader = watch.leader()
            else:
                end_s = time.monotonic() + rng.uniform(0.0, 3.0)
                watch.until(lambda end_s=end_s: time.monotonic() >= end_s)  # type: ignore[misc]
                before, leader = watch.tokens(), watch.leader()
                index = (leader + number) % options.trainers
            lost_s, leads, dead = watch.lost_s(index), index == leader, link.pids[index]
            os.kill(dead, signal.SIGKILL)
            try:
                after = watch.tokens()
                row = {
                    "leads": leads,
                    "broken": False,
                    "fallen": after < before,
                    "lost_s": lost_s if leads else 0.0,
                }
            except CheckpointError:
                row = {"leads": leads, "broken": True, "fallen": True, "lost_s": lost_s}
            while link.pids[index] == dead:  # it is gone when all its threads are
                link.pause(names[index], names[0])
                link.resume(names[index], names[0])
                time.sleep(0.02)
            row["in_write"] = watch.remove_part(index)  # the next one has to load before it writes
            found["while it writes" if row["in_write"] else "at any moment"].append(row)
        tokens = watch.tokens()
    finally:
        link.close()
    return [summarise(what, rows, tokens) for what, rows in found.items()]


def summarise(what: str, rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The row of one kind of kills."""
    lost_s = sorted(row["lost_s"] for row in rows if row["leads"]) or [0.0]
    return {
        "what": what,
        "kills": len(rows),
        "leaders": sum(row["leads"] for row in rows),
        "broken": sum(row["broken"] for row in rows),
        "fallen": sum(row["fallen"] for row in rows),
        "lost_s_median": lost_s[len(lost_s) // 2],
        "lost_s_most": lost_s[-1],
        "tokens": tokens,
        "all_kills": rows,
    }


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars: 50 kills, 10 of them during a write, nothing broken, seconds lost."""
    kills, writes = sum(row["kills"] for row in rows), rows[-1]["kills"]
    broken = sum(row["broken"] + row["fallen"] for row in rows)
    lost_s = max(row["lost_s_most"] for row in rows)
    return [
        {"case": "kills", "needed": 50, "reached": kills, "met": kills >= 50},
        {"case": "of them during a write", "needed": 10, "reached": writes, "met": writes >= 10},
        {"case": "checkpoints broken or fallen back", "needed": 0, "reached": broken, "met": not broken},
        {"case": "seconds lost at most", "needed": LOST_S, "reached": lost_s, "met": lost_s <= LOST_S},
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=52)
    made.add_argument("--write-kills", type=int, default=14, help="of them; some miss the moment")
    made.add_argument("--trainers", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    if not 0 <= options.write_kills <= options.kills:
        made.error(f"--write-kills {options.write_kills}: 0 to {options.kills}, which is --kills")
    with tempfile.TemporaryDirectory() as folder:
        rows = kill_them(options, Path(folder))
    bars = check_rows(rows)
    publish("trainer_kills", rows, COLUMNS, options, bars=bars)
    print_bars(bars)


if __name__ == "__main__":
    main()

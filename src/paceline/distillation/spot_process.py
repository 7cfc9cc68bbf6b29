"""The process of a spot trainer: `python -m paceline.distillation.spot_process SETTINGS`.

Before it loads anything it steps behind everything else on the machine. It trains while it runs: whoever started it
stops it with SIGSTOP, in the middle of whatever it does, and lets it go on with SIGCONT (spot_link.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

import msgspec

from paceline.garbage import uncollected

PAUSE_S = 0.05
"""Between two looks for something to learn from."""
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def stand_back() -> None:
    """Run only where a core has nothing else to do; on systems without that, with the lowest weight."""
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_with_parent(parent: int) -> bool:
    """Have the kernel kill this process, stopped or not, when its parent has ended; False if it has already."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    return os.getppid() == parent


def main(text: str) -> None:
    """Train until killed. text: SpotSettings as JSON. Ctrl-C is the parent's business."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = int(msgspec.json.decode(text)["parent"])
    stand_back()
    if not end_with_parent(parent):
        return
    with uncollected():
        import torch

        from paceline.distillation.spot import SpotSettings, SpotTrainer

    torch.set_num_threads(1)
    trainer = SpotTrainer(msgspec.json.decode(text, type=SpotSettings))
    while os.getppid() == parent:
        if not trainer.learn():
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1])

"""What a training run does around the trainer, without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from paceline.terminal.interruption import Interrupted, Interruption
from paceline.training.step_runner import StepRunner


@pytest.mark.parametrize(("global_step", "stops"), [(0, True), (1, False), (2, False), (3, True)])
def test_a_run_stops_where_a_checkpoint_holds_all_of_it(global_step: int, stops: bool) -> None:
    """Three updates train on one rollout, which no checkpoint holds."""
    runner, recipe = StepRunner.__new__(StepRunner), SimpleNamespace(batch=SimpleNamespace(updates=3))
    runner._interruption, runner.recipe = Interruption(), recipe  # type: ignore[assignment]
    state: Any = SimpleNamespace(global_step=global_step)
    runner.trainer = SimpleNamespace(state=state)
    runner.check_interruption()
    runner._interruption.wanted = True
    with pytest.raises(Interrupted) if stops else nullcontext():
        runner.check_interruption()

"""How a training run takes the end of its trainer, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from paceline.errors import TrainingError
from paceline.training.run import TrainingRun


@pytest.mark.parametrize("done", [0, 3, 4])
def test_a_run_has_finished_after_its_last_step_alone(done: int, tmp_path: Path) -> None:
    run, saved = TrainingRun.__new__(TrainingRun), []
    run.folder, run._resume, run._arguments = tmp_path, False, SimpleNamespace(max_steps=4)
    run._journals = SimpleNamespace(clear=lambda: None)  # type: ignore[assignment]
    state = SimpleNamespace(global_step=done)
    trainer = SimpleNamespace(state=state, train=lambda **options: None, save_model=saved.append)
    runner: Any = SimpleNamespace(interrupted=False)
    if done == 4:
        assert run._train(trainer, runner) == "finished"
        assert saved == [str(tmp_path / "policy")]
        return
    with pytest.raises(TrainingError, match=f"the trainer ended after {done} of 4 updates"):
        run._train(trainer, runner)
    assert not saved

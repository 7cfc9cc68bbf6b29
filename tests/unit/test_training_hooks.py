"""What the hooks in the trainer change beside forwarding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from paceline.training.hooks import TrainingHooks


def test_a_resumed_run_saves_as_often_as_its_recipe_says_now() -> None:
    """The checkpoint's state has how often it was before."""
    state, begun = SimpleNamespace(save_steps=10), []
    runner: Any = SimpleNamespace(begin=lambda: begun.append(state.save_steps))
    TrainingHooks(runner).on_train_begin(SimpleNamespace(save_steps=4), state, None)
    assert (state.save_steps, begun) == (4, [4])

"""What a training run does around the trainer, without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from paceline.terminal.interruption import Interrupted, Interruption
from paceline.training.recipe import Recipe
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


def test_an_evaluation_samples_with_the_options_of_training() -> None:
    """Those under `trl:` too."""
    runner = StepRunner.__new__(StepRunner)
    fields = {"task": {"name": "countdown"}, "model": "policy", "steps": 4}
    runner.recipe, options, asked = Recipe.model_validate(fields), object(), []

    def run(requests: Any, params: Any, step: int | None) -> Any:
        asked.append((len(requests), params, step))
        return SimpleNamespace(responses=[SimpleNamespace(tokens=(4,))], num_tokens=1)

    generation = SimpleNamespace(sync_weights=lambda: None, sampling_params=lambda: options)
    runner.trainer = SimpleNamespace(vllm_generation=generation)
    runner._rollouts = SimpleNamespace(run=run)  # type: ignore[assignment]
    runner._record = SimpleNamespace(now_s=lambda: 0.0, write=lambda event: None)  # type: ignore[assignment]
    nothing = lambda *told: None  # noqa: E731
    runner._progress = SimpleNamespace(show_phase=nothing, show_evaluation=nothing)  # type: ignore[assignment]
    runner._task = SimpleNamespace(reward=lambda text, row: 1.0)  # type: ignore[assignment]
    runner._tokenizer, runner._held_out, runner.solve_rates = Tokenizer(), [{"prompt": "1"}], {}
    runner._evaluate(2)
    assert asked == [(1, options, None)]
    assert runner.solve_rates == {2: 1.0}


class Tokenizer:
    """A token a text."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[3] for _ in texts]}

    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        return ["1" for _ in rows]

"""What each algorithm of a recipe becomes in TRL's terms, and what `trl:` may not set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.training import trl_arguments
from paceline.training.recipe import Recipe
from paceline.training.trl_arguments import FOREIGN, OWNED_SAMPLING, emulates_bfloat16, trainer_arguments

pytest.importorskip("trl", reason="TRL is not installed")


def arguments(**sections: Any) -> Any:
    fields: dict[str, Any] = {"task": {"name": "countdown"}, "model": "policy", "steps": 4}
    return trainer_arguments(Recipe.model_validate(fields | sections), Path("/tmp/unused"), on_cpu=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"loss_type": "grpo", "scale_rewards": "group", "epsilon_high": 0.2}),
        ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True}),
        ("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
        ("gspo", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
        ("rloo", {"beta": 0.0, "mask_truncated_completions": False}),
    ],
)
def test_algorithm(name: str, expected: dict[str, Any]) -> None:
    made = arguments(algorithm={"name": name})
    assert {field: getattr(made, field) for field in expected} == expected
    assert made.use_vllm


def test_batch_and_steps_with_several_updates() -> None:
    made = arguments(batch={"prompts": 4, "group_size": 8, "micro_batch": 4, "updates": 2})
    assert made.gradient_accumulation_steps == 4
    assert made.steps_per_generation == 8
    assert made.generation_batch_size == 32
    assert made.max_steps == 8


def test_given_clips_replace_the_papers() -> None:
    made = arguments(algorithm={"name": "dapo", "clip_low": 0.1})
    assert (made.epsilon, made.epsilon_high) == (0.1, 0.1)


def test_extra_fields_pass() -> None:
    assert arguments(trl={"delta": 2.0}).delta == 2.0
    assert arguments(trl={"generation_kwargs": {"min_tokens": 2}}).generation_kwargs == {"min_tokens": 2}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"learning_rate": 1.0}, "the recipe has a section for it"),
        ({"loss_typ": "x"}, "GRPOConfig has no such field"),
        ({"entropy_coeff": 1.0}, "did you mean entropy_coef?"),
        (
            {"vllm_importance_sampling_clip_min": 5.0, "vllm_importance_sampling_clip_max": 3.0},
            "TRL refuses the recipe: vllm_importance_sampling_clip_min",
        ),
        ({"generation_kwargs": ["stop"]}, r"generation_kwargs = \['stop'\]: it must map"),
        *(
            ({"generation_kwargs": {name: 1}}, f"generation_kwargs.{name} = 1: set {own} instead")
            for name, own in OWNED_SAMPLING.items()
        ),
        *(({key: 1}, reason[:20]) for key, reason in FOREIGN.items()),
    ],
)
def test_extra_field_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(trl=extra)


@pytest.mark.parametrize(
    ("precision", "has_bfloat16", "expected"),
    [
        ("auto", True, (True, False)),
        ("auto", False, (False, False)),
        ("bfloat16", True, (True, False)),
        ("bfloat16", False, (True, True)),
        ("float32", False, (False, False)),
    ],
)
def test_bfloat16_where_the_processor_computes_in_it(
    precision: str, has_bfloat16: bool, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_arguments, "computes_bfloat16", lambda on_cpu: has_bfloat16)
    made = arguments(optimizer={"precision": precision})
    assert (made.bf16, emulates_bfloat16(made)) == expected

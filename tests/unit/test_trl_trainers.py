"""What our trainers do differently from TRL's, with an engine that makes up its responses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from tiny_model import make_model

from paceline.errors import ConfigError
from paceline.integrations.trl import trainers as trl
from paceline.integrations.trl.padding import sorting_span
from paceline.integrations.trl.trainers import failed_rows
from paceline.training.policy import load_policy, load_tokenizer
from paceline.types import Response, RolloutRequest

GROUP = 2


class MadeUp:
    """Responses that are a function of their keys."""

    vllm_engine = None

    def generate(self, requests: Sequence[RolloutRequest], params: Any) -> list[Response]:
        return [self.respond(request, random.Random(request.key)) for request in requests]

    def respond(self, request: RolloutRequest, dice: random.Random) -> Response:
        tokens = (*(dice.randint(3, 60) for _ in range(dice.randint(1, 8))), 2)
        logprobs = (-4.0,) * len(tokens)
        return Response(request, tokens, logprobs, "stop", request.key or 0, 0, 0, 0, 0, len(tokens))

    def push_weights(self, weights: Iterable[Any], *, version: int | None = None) -> int:
        return version or 0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"), layers=1, hidden=64)


def make_trainer(
    policy: Path, folder: Path, num_prompts: int = 5, **given: Any
) -> tuple[Any, list[list[str]]]:
    """A trainer with two prompts a step, and the prompts of each step."""
    from datasets import Dataset
    from trl import GRPOConfig

    seen: list[list[str]] = []

    def reward(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts[::GROUP])
        return [float(len(text)) for text in completions]

    options: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 12,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = trl.GRPOTrainer(
        load_policy(policy, 80, True),
        reward,
        GRPOConfig(str(folder), **options | given),
        Dataset.from_list([{"prompt": chr(40 + i) * 3} for i in range(num_prompts)]),
        processing_class=load_tokenizer(policy),
        engine=MadeUp(),
    )
    return trainer, seen


def test_a_resumed_run_sees_the_prompts_of_a_whole_one(policy: Path, tmp_path: Path) -> None:
    """Three passes of two steps, each in another order and without one of five prompts: resumed after each step."""
    trainer, whole = make_trainer(policy, tmp_path / "whole")
    trainer.train()
    assert len(whole) == 6
    expected = dict(trainer.model.named_parameters())
    for done in range(1, 6):
        resumed, seen = make_trainer(policy, tmp_path / "resumed", save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{done}"))
        assert seen == whole[done:], f"after step {done}"
        assert all(weight.equal(expected[name]) for name, weight in resumed.model.named_parameters())


def test_arguments_may_be_given_by_position(tmp_path: Path) -> None:
    from trl import GRPOConfig

    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_enable_sleep_mode=True)
    with pytest.raises(ConfigError, match="vllm_enable_sleep_mode"):
        trl.GRPOTrainer("policy", len, config, engine=MadeUp())
    config.use_vllm = False
    with pytest.raises(ConfigError, match="use_vllm=True"):
        trl.GRPOTrainer("policy", len, config, engine=MadeUp())


@pytest.mark.parametrize(
    ("given", "span"),
    [
        ({}, 4),
        ({"loss_type": "bnpo"}, None),
        ({"top_entropy_quantile": 0.2}, None),
        ({"entropy_coef": 0.05}, None),
        ({"use_adaptive_entropy": True}, None),
        ({"aux_loss_enabled": True}, None),
        ({"gradient_accumulation_steps": 2}, 2),
        ({"gradient_accumulation_steps": 8}, 4),
        ({"gradient_accumulation_steps": 3}, None),
        ({"gradient_accumulation_steps": 6}, None),
    ],
)
def test_rows_change_places_where_no_loss_depends_on_it(given: dict[str, Any], span: int | None) -> None:
    args = {"loss_type": "grpo", "gradient_accumulation_steps": 4, "steps_per_generation": 4} | given
    has_aux = args.pop("aux_loss_enabled", False)
    assert sorting_span(SimpleNamespace(args=SimpleNamespace(**args), aux_loss_enabled=has_aux)) == span


def responded(prompt: tuple[int, ...], tokens: tuple[int, ...], failure: str | None = None) -> Response:
    reason: Any = "error" if failure else "stop"
    request = RolloutRequest(prompt, 9)
    return Response(request, tokens, (-1.0,) * len(tokens), reason, 0, 0, 0, 0, 0, 1, failure=failure)


def test_a_failure_after_a_call_of_a_tool_is_its_row_s() -> None:
    """Rows 1 and 2 called a tool (its answer: 8); the second of them failed, then the first in a third turn."""
    first = [responded((1,), (3, 2)), responded((1,), (4, 2)), responded((1,), (5, 2))]
    second = [responded((1, 4, 2, 8), (6, 2)), responded((1, 5, 2, 8), (7,), "gave NaN")]
    third = [responded((1, 4, 2, 8, 6, 2, 8), (9, 9, 9), "ended its workers")]
    completions = [(3, 2), (4, 2, 8, 6, 2, 8, 9), (5, 2, 8, 7)]  # row 1 was cut to the limit
    assert failed_rows([first, second], completions) == {2: "gave NaN"}
    assert failed_rows([first, second, third], completions) == {1: "ended its workers", 2: "gave NaN"}
    alone = [[responded((1,), (3,), "gave NaN"), responded((1,), (3,))]]
    assert failed_rows(alone, [(3,), (3,)]) == {0: "gave NaN"}

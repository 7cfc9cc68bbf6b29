"""Several draft paths of a model drafter: plain decoding's tokens, and more of them a step than with one path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_head import make_head
from tiny_model import VOCAB, make_model

from paceline.config import BudgetSettings, EngineSettings
from paceline.distillation.target import load_model
from paceline.engine.model_watch import ModelWatch
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import Response, RolloutRequest


@pytest.fixture(scope="module", params=["small model", "draft head"])
def engine(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RolloutEngine]:
    """A drafter that is right most of the time, and a head that nobody has trained."""
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    make_model(target, tie=False)
    if request.param == "small model":
        save_noisy(target, drafter)
    else:
        make_head(drafter, load_model(target))
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(drafter),
        budget=BudgetSettings(policy="fixed", fixed_tokens=5),
        max_draft_tokens=5,
        num_paths=4,
        max_alternatives=64,
    )
    with RolloutEngine(target, settings, dtype="float32", max_model_len=512, kv_cache_bytes=1 << 27) as made:
        yield made


def save_noisy(target: Path, out: Path) -> None:
    """The target with noise on its weights."""
    model = load_model(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std())
    model.save_pretrained(out)


def run(engine: RolloutEngine) -> list[Response]:
    """Contexts that cross the KV blocks of 128 tokens."""
    from vllm import SamplingParams

    rng = np.random.default_rng(4)
    lengths = (5, 20, 60, 100, 118, 127, 128, 180)
    wanted = [
        RolloutRequest((1, *rng.integers(3, VOCAB, length - 1).tolist()), 60, key=length)
        for length in lengths
    ]
    engine.reset_prefix_cache()
    return engine.generate(wanted, SamplingParams(temperature=1.0, ignore_eos=True))


def test_paths_change_no_token_and_win(
    engine: RolloutEngine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWatch, "observe", lambda *_: None)  # the head is as good as dead
    engine.set_drafting(False)
    plain = run(engine)
    engine.set_drafting(True)
    loop, several = engine.scheduler.loop, engine.settings
    num_steps = []
    for num_paths in (1, 4):
        loop._settings = several.model_copy(update={"num_paths": num_paths})
        engine.take_observations()
        drafted = run(engine)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
        assert [r.logprobs for r in drafted] == [r.logprobs for r in plain], "logprobs differ bitwise"
        num_alternatives = sum(step.num_alternatives for step in engine.take_observations())
        assert num_alternatives > 50 if num_paths > 1 else num_alternatives == 0
        num_steps.append(sum(response.num_steps for response in drafted))
    if "small model" in request.node.name:
        assert num_steps[1] < 0.95 * num_steps[0], num_steps

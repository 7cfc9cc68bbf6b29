"""The ladder measured on a running engine: drafters are right as often as wanted, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import make_model
from vllm import SamplingParams

from paceline.config import EngineSettings
from paceline.drafting.synthetic import Play
from paceline.engine.model_steering import ModelSteering
from paceline.engine.rollout_engine import RolloutEngine
from paceline.engine.rungs import measure_ladder
from paceline.errors import ConfigError, EngineError
from paceline.planning.ladder import rate_of
from paceline.types import Response, RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i), 96, key=100 + i) for i in range(4)]


@pytest.fixture(scope="module")
def engine(
    model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    """One drafter is the target, nearly; the other one is random."""
    other = make_model(tmp_path_factory.mktemp("other") / "random", layers=1, hidden=64, seed=9)
    settings = EngineSettings(model_drafter=str(drafter_dir), further_drafters=(str(other),))
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    with RolloutEngine(model_dir, settings, kv_cache_bytes=1 << 26, **sizes) as made:
        yield made


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> list[Response]:
    engine.set_drafting(False)
    responses = engine.generate(REQUESTS, PARAMS)
    engine.set_drafting(True)
    return responses


@pytest.fixture
def never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside so small a target no drafter is worth its time."""
    monkeypatch.setattr(ModelSteering, "advance", lambda *_: True)
    limits = 0.0, np.zeros(1, np.float32), None
    monkeypatch.setattr(ModelSteering, "limits", lambda *_, **__: limits)


def drafting_model(engine: RolloutEngine) -> str:
    """Folder of the model that drafts."""
    found = engine.vllm_engine.collective_rpc(lambda worker: worker.model_runner.drafter._model.checkpoint)
    return str(found[0])


def tokens_of(responses: list[Response]) -> list[tuple[int, ...]]:
    return [response.tokens for response in responses]


def generate_anew(engine: RolloutEngine) -> list[tuple[int, ...]]:
    """Tokens of all requests; the suffix trees, which would know them by now, begin empty."""
    engine.scheduler.loop.forget_tokens()
    return tokens_of(engine.generate(REQUESTS, PARAMS))


@pytest.mark.usefixtures("never_rests")
def test_each_of_the_models_drafts_when_it_is_to(engine: RolloutEngine, plain: list[Response]) -> None:
    settings = engine.settings
    folders = (settings.model_drafter, *settings.further_drafters)
    for place in (0, 1, 0):
        engine.use_drafter(place)
        before = engine.drafter_score()
        assert generate_anew(engine) == tokens_of(plain)
        assert (engine.drafter_score() - before).tried > 20
        assert drafting_model(engine) == folders[place]


@pytest.mark.usefixtures("never_rests")
@pytest.mark.parametrize("place", [0, 1])
def test_a_played_drafter_is_right_as_often_as_wanted(
    engine: RolloutEngine, plain: list[Response], place: int
) -> None:
    known = {one.key: np.array([*one.request.prompt, *one.tokens], np.int32) for one in plain}
    engine.use_drafter(place, Play(known, 0.7))
    before = engine.drafter_score()
    assert generate_anew(engine) == tokens_of(plain)
    score = engine.drafter_score() - before
    assert score.tried > 20
    assert score.acceptance == pytest.approx(0.7, abs=4.5 * np.sqrt(0.21 / score.tried))
    engine.use_drafter(0)


def test_the_ladder_is_measured_and_the_engine_is_as_before(
    engine: RolloutEngine, plain: list[Response]
) -> None:
    told: list[str] = []
    drafter = engine.scheduler.loop.free.drafter
    names, score = engine.settings.drafter_names, engine.drafter_score()
    made = measure_ladder(engine, plain, PARAMS, (0.4, 0.9), told.append)
    ladder = made.ladder
    assert ladder is not None
    assert rate_of(made.tried[names[0]]) > rate_of(made.tried[names[1]]), "one is the target, nearly"
    assert (ladder.batch, ladder.rates) == (4, (0.4, 0.9))
    assert tuple(one.drafter for one in ladder.drafters) == names
    assert all(0.0 < one.speedup[0] <= one.speedup[1] for one in ladder.drafters)
    assert all(one.draft_s > 0.0 for one in ladder.drafters)
    assert all(0.0 < one.lone_draft_s <= one.draft_s for one in ladder.drafters)
    assert len(told) == 4
    assert engine.drafter_score() == score, "played drafters do not count"
    assert engine.scheduler.loop.free.drafter is drafter is not None
    assert engine.scheduler.loop.drafting
    assert tokens_of(engine.generate(REQUESTS, PARAMS)) == tokens_of(plain)


def test_what_cannot_be_chosen_or_measured_is_refused(engine: RolloutEngine, plain: list[Response]) -> None:
    short = [replace(one, tokens=one.tokens[:15]) for one in plain]
    with pytest.raises(EngineError, match="the longest of 4 responses has 15 tokens"):
        measure_ladder(engine, short, PARAMS)
    with pytest.raises(ConfigError, match="1 further_drafters"):
        engine.use_drafter(2)
    engine.submit(0, REQUESTS[0], PARAMS)
    with pytest.raises(EngineError, match="are running"):
        engine.use_drafter(1)
    engine.abort([0], keep_kv=False)

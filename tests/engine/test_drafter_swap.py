"""New weights for the model drafter of a running engine: other drafts, the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plain_tokens import plain_tokens
from tiny_model import make_model
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from paceline.config import EngineSettings
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError, UnsupportedError
from paceline.record.decisions import DecisionReader, find_decisions
from paceline.types import DrafterScore, RolloutRequest

REQUESTS = [RolloutRequest(prompt=(1, 5, 6 + i % 4), max_tokens=96, key=100 + i) for i in range(8)]
PARAMS = SamplingParams(temperature=0.03, ignore_eos=True)
"""Where the target is unsure, shared dice make a drafter that knows nothing agree all the same."""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied: random models with a tied head all repeat the last token."""
    return make_model(tmp_path_factory.mktemp("target"), tie=False)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="module")
def engine(
    model_dir: Path, log_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    """Begins with a drafter that nobody has trained; it is the target's size, so that the target can be pushed."""
    untrained = make_model(tmp_path_factory.mktemp("untrained"), seed=5, tie=False)
    settings = EngineSettings(drafter="none", model_drafter=str(untrained), decision_log=str(log_dir))
    with RolloutEngine(model_dir, settings, dtype="float32", max_model_len=256, max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> list[tuple[int, ...]]:
    return plain_tokens(engine, REQUESTS, PARAMS)


def score_of(engine: RolloutEngine, plain: list[tuple[int, ...]]) -> DrafterScore:
    """Of one rollout, the tokens of which are compared with plain decoding."""
    before = engine.drafter_score()
    engine.reset_prefix_cache()
    assert [response.tokens for response in engine.generate(REQUESTS, PARAMS)] == plain
    return engine.drafter_score() - before


def test_a_swap_changes_drafts_and_no_tokens(
    engine: RolloutEngine, plain: list[tuple[int, ...]], model_dir: Path
) -> None:
    engine.drop_drafter()
    assert score_of(engine, plain) == DrafterScore()
    version = engine.drafter_version
    assert engine.push_drafter(weights_of(model_dir)) == version + 1
    score = score_of(engine, plain)
    assert score.acceptance is not None
    assert score.acceptance > 0.95
    assert score.alarms == 0


def test_a_swap_amid_a_rollout(
    engine: RolloutEngine, plain: list[tuple[int, ...]], model_dir: Path, tmp_path: Path
) -> None:
    engine.reset_prefix_cache()
    both = weights_of(make_model(tmp_path, seed=9, tie=False)), weights_of(model_dir)
    tokens = {}
    for number, event in enumerate(engine.stream(REQUESTS, PARAMS)):
        if number % 40 == 20:
            engine.push_drafter(both[number // 40 % 2])
        if event.response is not None:
            tokens[event.index] = event.response.tokens
    assert [tokens[index] for index in range(len(REQUESTS))] == plain


@pytest.mark.parametrize("kind", ["random", "old", "dropped"])
def test_useless_weights_are_noticed_and_dropped(
    engine: RolloutEngine,
    plain: list[tuple[int, ...]],
    model_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """Random: never trained. Old: of another target. Dropped: what is left after memory was given back."""
    made = {
        "random": lambda: {n: torch.randn_like(w) * w.std() for n, w in weights_of(model_dir).items()},
        "old": lambda: weights_of(make_model(tmp_path, seed=9, tie=False)),
        "dropped": lambda: {n: torch.zeros_like(w) for n, w in weights_of(model_dir).items()},
    }[kind]()
    engine.push_drafter(made)
    caplog.set_level(logging.WARNING)
    logging.getLogger("paceline").propagate = True
    score = sum((score_of(engine, plain) for _ in range(3)), DrafterScore())
    assert score.alarms == 1, score
    assert any("accepts nothing from the model drafter" in line.getMessage() for line in caplog.records)
    assert score_of(engine, plain) == DrafterScore()  # it is gone
    engine.push_drafter(weights_of(model_dir))
    assert score_of(engine, plain).tried > 0


def test_weights_that_do_not_fit_leave_the_old_ones(
    engine: RolloutEngine, plain: list[tuple[int, ...]], model_dir: Path
) -> None:
    whole = weights_of(model_dir)
    version = engine.push_drafter(whole)
    name = next(iter(whole))
    for wrong, why in (
        ({**whole, name: torch.zeros(3, 3)}, "has shape"),
        ({**whole, name: torch.full_like(whole[name], torch.nan)}, "is not finite"),
        ({n: w for n, w in whole.items() if n != name}, "not sent"),
    ):
        with pytest.raises(CheckpointError, match=why):
            engine.push_drafter(wrong)
    assert engine.drafter_version == version
    assert (score_of(engine, plain).acceptance or 0) > 0.95


def test_the_decisions_are_the_same_again(engine: RolloutEngine, log_dir: Path) -> None:
    """Swaps are in the log; written last, as the engine still runs."""
    [path] = find_decisions(log_dir)
    with DecisionReader(path) as reader:
        tallies = replay_engine(reader)
    assert sum(tally.num_planned for tally in tallies) > 100
    assert all(tally.num_different == 0 for tally in tallies)


def test_an_engine_without_its_own_model_drafter_refuses(model_dir: Path) -> None:
    with (
        RolloutEngine(model_dir, EngineSettings(), dtype="float32", max_model_len=64) as bare,
        pytest.raises(UnsupportedError, match="start it with model_drafter"),
    ):
        bare.push_drafter({})

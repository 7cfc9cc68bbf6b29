"""A real engine with everything that decides: its log is planned again without a difference, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_model import VOCAB, make_model

from paceline.config import EngineSettings
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.record.decisions import DecisionReader, find_decisions
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "decisions"


@pytest.fixture(scope="module")
def engine(
    model_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    """The marginal budget over group drafts, a model drafter's and further paths."""
    small = make_model(tmp_path_factory.mktemp("drafter"), layers=1)
    settings = EngineSettings(
        model_drafter=str(small), max_draft_tokens=8, num_paths=3, decision_log=str(folder)
    )
    with RolloutEngine(
        model_dir, settings, dtype="float32", max_model_len=512, max_num_seqs=6, kv_cache_bytes=1 << 28
    ) as made:
        yield made


def generate(engine: RolloutEngine) -> list[Response]:
    """Responses of three groups from a cold start, more than run at once."""
    from vllm import SamplingParams

    rng = np.random.default_rng(4)
    prompts = [(1, *rng.integers(3, VOCAB, 6 + 20 * i).tolist()) for i in range(3)]
    requests = [
        RolloutRequest(prompt, MAX_TOKENS, key=100 * group + sample, group=group, sample=sample)
        for group, prompt in enumerate(prompts)
        for sample in range(4)
    ]
    engine.reset_prefix_cache()
    return engine.generate(requests, SamplingParams(temperature=0.7))


def test_live_decisions_are_the_same_again_and_tokens_are_plain_decodings(
    engine: RolloutEngine, folder: Path
) -> None:
    logged = generate(engine)
    engine.set_drafting(False)
    plain = generate(engine)
    engine.set_drafting(True)
    generate(engine)
    [path] = find_decisions(folder)
    with DecisionReader(path) as reader:
        tallies = {tally.kind: tally for tally in replay_engine(reader)}
        assert not reader.torn
    assert set(tallies) == {"draft budget", "draft paths", "model drafter"}
    assert all(tally.num_planned > 20 for tally in tallies.values())
    assert [tally.first for tally in tallies.values()] == [None] * 3
    assert sum(response.num_draft_tokens for response in logged) > 0
    size = path.stat().st_size
    engine.scheduler.loop._log.close()
    silent = generate(engine)
    assert path.stat().st_size == size
    for other in (plain, silent):
        assert [response.tokens for response in other] == [response.tokens for response in logged]

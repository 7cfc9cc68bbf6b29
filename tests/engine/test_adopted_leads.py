"""What another engine has generated becomes drafts: right, wrong, late or unasked for, no token is another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_tokens import plain_tokens
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i), 50 + 9 * i, sample=i) for i in range(3)]
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RolloutEngine]:
    """Without drafters of its own."""
    settings = EngineSettings(
        drafter="none", adopt_leads=True, budget=BudgetSettings(policy="fixed", fixed_tokens=6)
    )
    with RolloutEngine(
        model_dir, settings, dtype="float32", max_model_len=512, max_num_seqs=4, kv_cache_bytes=1 << 27
    ) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine: RolloutEngine) -> list[Tokens]:
    """Tokens of plain decoding."""
    return plain_tokens(engine, REQUESTS, PARAMS)


def generate(engine: RolloutEngine, leads: dict[int, list[tuple[int, int, Tokens]]]) -> list[Tokens]:
    """leads: by step, (request, index of the first token, tokens)."""
    responses: dict[int, Tokens] = {}
    for step, event in enumerate(engine.stream(REQUESTS, PARAMS)):
        for index, start, tokens in leads.get(step, ()):
            engine.adopt(index, start, tokens)
        if event.response is not None:
            responses[event.index] = event.response.tokens
    return [responses[index] for index in range(len(REQUESTS))]


def test_a_lead_saves_steps_and_changes_no_token(engine: RolloutEngine, wanted: list[Tokens]) -> None:
    engine.take_observations()
    assert generate(engine, {}) == wanted
    plain = engine.take_observations()
    leads = {0: [(1, 0, wanted[1][:30])], 20: [(1, 30, wanted[1][30:48])], 24: [(0, 4, wanted[0][4:25])]}
    engine.reset_prefix_cache()
    assert generate(engine, leads) == wanted
    steps = engine.take_observations()
    adopted = sum(step.num_adopted_tokens for step in steps)
    assert adopted == sum(step.num_accepted_tokens for step in steps) > 30
    assert sum(step.num_requests for step in steps) <= sum(step.num_requests for step in plain) - adopted


def test_a_lead_that_is_wrong_or_elsewhere_changes_no_token(
    engine: RolloutEngine, wanted: list[Tokens]
) -> None:
    wrong = tuple((token + 1) % engine.vocab_size for token in wanted[2])
    leads = {
        0: [(2, 0, wrong), (9, 0, wrong)],
        9: [(2, 40, wanted[2][40:60]), (0, 1, wanted[0][1:2])],
        15: [(2, 0, wanted[2][:50]), (1, 58, wrong[:40])],
    }
    engine.reset_prefix_cache()
    assert generate(engine, leads) == wanted

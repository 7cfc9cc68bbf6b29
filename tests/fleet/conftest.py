"""One fleet of two real engines for all tests of this folder, and one plain engine to compare with.

Engines take 20 to 40 seconds to start, so nobody starts another one but the tests that kill them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from fleet_parts import ENGINE, KV_BYTES, POLICY, Generate, make_score
from local_ray import local_ray

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from paceline.config import BudgetSettings, EngineSettings, FleetSettings, RewardSettings
from paceline.fleet.fleet import Fleet


@pytest.fixture(scope="package")
def ray() -> Iterator[Any]:
    with local_ray() as module:
        yield module


@pytest.fixture(scope="package")
def whole_fleet(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers, small chunks, drafts, a draft server, a reward worker and decision logs."""
    settings = FleetSettings(
        workers=2,
        chunk_tokens=64,
        progress_ms=20.0,
        rewards=RewardSettings(workers=2, max_crashes=50, timeout_s=30.0),
    )
    engine = EngineSettings(
        run_seed=3,
        budget=BudgetSettings(policy="fixed", fixed_tokens=3),
        decision_log=str(tmp_path_factory.mktemp("decisions")),
    )
    with Fleet(POLICY, settings, engine, kv_cache_bytes=KV_BYTES, reward=make_score(), **ENGINE) as made:
        yield made


@pytest.fixture
def fleet(whole_fleet: Fleet) -> Iterator[Fleet]:
    """What a test that failed has left running is none of the next one's."""
    yield whole_fleet
    whole_fleet.abandon()


@pytest.fixture(scope="package")
def plain(little_to_collect: None) -> Iterator[Generate]:
    """A single engine without drafts."""
    from paceline.engine.rollout_engine import RolloutEngine

    settings = EngineSettings(run_seed=3, drafter="none", budget=BudgetSettings(policy="off"))
    with RolloutEngine(POLICY, settings, kv_cache_bytes=1 << 29, **ENGINE) as engine:
        yield engine.generate


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Countdown problems."""
    from transformers import AutoTokenizer

    from paceline.tasks import load_task

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rows = load_task("countdown").train_rows(12, 5)
    return [tuple(tokenizer(row["prompt"])["input_ids"]) for row in rows]

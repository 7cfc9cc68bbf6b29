"""An engine whose keys and values cannot be moved does without a pool that is not required."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from second_engine import SecondEngine
from tiny_model import VOCAB

from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.types import KvPoolCounters, RolloutRequest

OPTIONS = {"dtype": "float32", "max_model_len": 512, "kv_cache_bytes": 1 << 27}
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention"],
}


@pytest.fixture
def windowed(model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with a sliding window."""
    folder = tmp_path / "windowed"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | WINDOW))
    return folder


@pytest.fixture
def pool() -> Iterator[KvPoolSettings]:
    folder = tempfile.mkdtemp(prefix="paceline-kv-", dir="/dev/shm")
    yield KvPoolSettings(directory=folder, memory_bytes=1 << 24)
    shutil.rmtree(folder)


def test_it_does_without_a_pool_that_is_not_required(windowed: Path, pool: KvPoolSettings) -> None:
    settings = EngineSettings(
        kv_pool=pool.model_copy(update={"required": False}),
        budget=BudgetSettings(policy="fixed", fixed_tokens=4),
    )
    engine = SecondEngine(windowed, settings, **OPTIONS)
    try:
        engine.ready()
        prompts = np.random.default_rng(3).integers(3, VOCAB, (4, 90)).tolist()
        wanted = [RolloutRequest((1, *prompt), 150, key=key) for key, prompt in enumerate(prompts)]
        whole = engine.generate(wanted, ignore_eos=True)
        cut = engine.generate([replace(one, max_tokens=70) for one in wanted], ignore_eos=True).responses
        rest = [replace(one, generated=part.tokens) for one, part in zip(wanted, cut, strict=True)]
        moved = engine.generate(rest, ignore_eos=True)
        assert [r.tokens for r in moved.responses] == [r.tokens for r in whole.responses]
        assert moved.counters == KvPoolCounters()
        assert moved.prefilled > whole.prefilled
    finally:
        engine.close()

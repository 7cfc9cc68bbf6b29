"""Naive disaggregation: drafter and target work by turns, with the tokens of plain decoding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from plain_tokens import plain_tokens
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i), 80) for i in range(3)]
WINDOW = 3


def test_steps_wait_for_whole_windows_and_little_is_wasted(model_dir: Path, drafter_dir: Path) -> None:
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(drafter_dir),
        draft_worker=True,
        draft_by_turns=True,
        draft_window=WINDOW,
        budget=BudgetSettings(policy="fixed", fixed_tokens=WINDOW),
    )
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    with RolloutEngine(model_dir, settings, kv_cache_bytes=1 << 26, **sizes) as engine:
        wanted = plain_tokens(engine, REQUESTS, PARAMS)
        deadline_s, whole = time.monotonic() + 240.0, 0.0
        while whole < 0.7 and time.monotonic() < deadline_s:  # it may still be loading its model
            engine.take_observations()
            assert [response.tokens for response in engine.generate(REQUESTS, PARAMS)] == wanted
            steps = [step for step in engine.take_observations() if not step.num_prefill_tokens]
            whole = sum(step.num_draft_tokens == WINDOW * step.num_requests for step in steps) / len(steps)
        assert whole >= 0.7
        assert sum(step.num_model_tokens for step in steps) > 20
        counts = engine.scheduler.loop.ahead.links[0].counts
        assert counts.num_branches == 0
        assert counts.num_wasted <= (WINDOW - 1) / WINDOW * counts.num_drafted

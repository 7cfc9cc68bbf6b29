"""An engine whose responses change between coupled and decoupled: the tokens are those of plain decoding."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from plain_tokens import plain_tokens
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine import draft_ahead
from paceline.engine.loop_replay import replay_engine
from paceline.engine.rollout_engine import RolloutEngine
from paceline.record.decisions import DecisionReader, WindowsLine, find_decisions
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [RolloutRequest((1, 5, 9, 13 + i // 2), 60 + 9 * i, sample=i % 2) for i in range(6)]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_bytes": 1 << 27,
}


def test_changes_of_window_and_mode_change_no_token(
    model_dir: Path, drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(drafter_dir),
        draft_worker=True,
        draft_window=4,
        reconfigure_steps=16,
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        decision_log=str(tmp_path),
    )
    measured = itertools.cycle([1e-9] * 20 + [0.002] * 20 + [10.0] * 20)  # seconds of a draft token
    monkeypatch.setattr(draft_ahead._Worker, "level_s", property(lambda _: next(measured)))
    with RolloutEngine(model_dir, settings, **SIZES) as engine:
        wanted = plain_tokens(engine, REQUESTS, PARAMS)
        windows = engine.scheduler.loop.ahead._workers[0].windows
        deadline_s = time.monotonic() + 240.0
        accepted = 0
        while time.monotonic() < deadline_s and (windows.num_changes < 20 or accepted < 100):
            assert [response.tokens for response in engine.generate(REQUESTS, PARAMS)] == wanted
            accepted += sum(step.num_model_tokens for step in engine.take_observations())
        assert windows.num_changes >= 20
        assert accepted >= 100
        assert windows._drafts == {}, "nothing is kept of responses that have ended"
    [log] = find_decisions(tmp_path)
    with DecisionReader(log) as reader:
        plans = [line for line in reader if isinstance(line, WindowsLine)]
    assert {is_coupled for plan in plans for is_coupled in plan.is_coupled} == {True, False}
    with DecisionReader(log) as reader:
        tallies = {tally.kind: tally for tally in replay_engine(reader)}
    assert tallies["draft windows"].num_planned == len(plans)
    assert all(tally.num_different == 0 for tally in tallies.values())

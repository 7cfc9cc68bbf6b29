"""An engine that shares drafts generates the same tokens, whatever other workers say."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.client import DraftClient
from paceline.drafting.server import DraftServer
from paceline.engine.keys import prompt_group
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import RolloutRequest

PROMPT = tuple(range(3, 23))
KEYS = range(100, 106)


def test_tokens_are_the_same_and_more_are_accepted(model_dir: Path) -> None:
    """The other worker tells the very responses that will be generated here, and garbage as well."""
    requests = [RolloutRequest(PROMPT, 120, key=key) for key in KEYS]
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    group = prompt_group(PROMPT)
    server = DraftServer("tcp://127.0.0.1:0", secret=None)
    threading.Thread(target=server.serve, daemon=True).start()
    options = {"max_model_len": 256, "max_num_seqs": 8}
    budget = BudgetSettings(policy="fixed", fixed_tokens=4)  # whatever a step takes on a busy machine
    with RolloutEngine(model_dir, EngineSettings(budget=budget), **options) as engine:
        alone = engine.generate(requests, params)
    other = DraftClient([server.address], interval_ms=2.0)
    garbage = np.random.default_rng(0).integers(3, 60, 200).tolist()
    for key, tokens in enumerate([*(response.tokens for response in alone), garbage]):
        other.watch(group, key)
        other.report(group, key, 0, tokens)
    settings = EngineSettings(draft_servers=(server.address,), budget=budget)
    with RolloutEngine(model_dir, settings, **options) as engine:
        warm = RolloutRequest(PROMPT, 40, key=1)
        deadline_s = time.monotonic() + 20
        forest = engine.scheduler.loop.free.drafter
        while not forest.count(group, garbage[:8]):  # until the first news have arrived
            engine.generate([warm], params)
            assert time.monotonic() < deadline_s
        shared = engine.generate(requests, params)
    other.close()
    assert [r.tokens for r in shared] == [r.tokens for r in alone]
    assert sum(r.num_accepted_tokens for r in shared) > sum(r.num_accepted_tokens for r in alone)

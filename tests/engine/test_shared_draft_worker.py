"""Two engines and one draft worker: each has the tokens of plain decoding, and both are drafted for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from plain_tokens import plain_tokens
from vllm import SamplingParams

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.draft_worker import serve
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
REQUESTS = [
    [RolloutRequest((1, 5, 9, 13 + i), 70 + 9 * i, sample=i) for i in range(3)],
    [RolloutRequest((2, 6, 10, 17 + i), 90 - 9 * i, sample=i) for i in range(3)],
]
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def engines(
    model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RolloutEngine]]:
    """The second one is reached as from another machine."""
    secret = tmp_path_factory.mktemp("shared") / "secret"
    secret.write_text("sixteen bytes or more")
    settings = EngineSettings(
        draft_secret_file=str(secret),
        drafter="none",
        model_drafter=str(drafter_dir),
        draft_help=True,
        draft_window=4,
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
    )
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    with ExitStack() as made:
        yield [
            made.enter_context(RolloutEngine(model_dir, one, kv_cache_bytes=1 << 27, **sizes))
            for one in (settings, settings.model_copy(update={"draft_interface": "lo"}))
        ]


@pytest.fixture(scope="module")
def wanted(engines: list[RolloutEngine]) -> list[list[Tokens]]:
    """Tokens of plain decoding."""
    found = []
    for engine, requests in zip(engines, REQUESTS, strict=True):
        found.append(plain_tokens(engine, requests, PARAMS))
    return found


def generate(engines: list[RolloutEngine]) -> list[list[Tokens]]:
    """By turns."""
    found: list[dict[int, Tokens]] = [{} for _ in engines]
    streams = [engine.stream(requests, PARAMS) for engine, requests in zip(engines, REQUESTS, strict=True)]
    for events in zip_longest(*streams):
        for own, event in zip(found, events, strict=True):
            if event is not None and event.response is not None:
                own[event.index] = event.response.tokens
    return [[own[index] for index in sorted(own)] for own in found]


def test_one_worker_drafts_for_two_engines(engines: list[RolloutEngine], wanted: list[list[Tokens]]) -> None:
    addresses = [address for engine in engines for address in engine.draft_addresses]
    assert [address.partition(":")[0] for address in addresses] == ["ipc", "tcp"]
    [worker], stop = engines[0].make_draft_workers(), threading.Event()
    thread = threading.Thread(
        target=serve, args=(worker, addresses, lambda: not stop.is_set(), 0.01), daemon=True
    )
    thread.start()
    links = [engine.scheduler.loop.ahead.links[0] for engine in engines]
    try:
        for _ in range(40):
            for engine in engines:
                engine.take_observations()
            assert generate(engines) == wanted
            accepted = [
                sum(step.num_model_tokens for step in engine.take_observations()) for engine in engines
            ]
            if min(accepted) > 20 and min(link.counts.num_drafted for link in links) > 100:
                break
        assert min(accepted) > 20
        assert all(link.counts.num_wasted > 0 for link in links), "each hears of its own rejections"
    finally:
        stop.set()
        thread.join()
    assert generate(engines) == wanted, "nobody drafts any more"

"""A second engine in a process of its own, for tests in which responses move from one engine to another."""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.config import EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import KvPoolCounters, Response, RolloutRequest


@dataclass(frozen=True)
class Outcome:
    """What an engine has made of some requests."""

    responses: list[Response]
    prefilled: int
    counters: KvPoolCounters
    num_loaded: int
    """Compiled models that the process has loaded from vLLM's compile cache."""


def generate(engine: RolloutEngine, requests: list[RolloutRequest], **options: Any) -> Outcome:
    """Generate from an empty prefix cache and count the tokens that are prefilled."""
    from vllm import SamplingParams
    from vllm.compilation.counter import compilation_counter

    engine.reset_prefix_cache()
    engine.take_observations()
    responses = engine.generate(requests, SamplingParams(**{"temperature": 1.0, **options}))
    prefilled = sum(step.num_prefill_tokens for step in engine.take_observations())
    loaded = compilation_counter.num_aot_artifacts_loaded
    return Outcome(responses, prefilled, engine.kv_pool_counters(), loaded)


class SecondEngine:
    """Starts the engine; `ready` waits for it."""

    def __init__(self, model: Path, settings: EngineSettings, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, settings, options), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        assert self._receive() == "ready"

    def generate(self, requests: list[RolloutRequest], policy_version: int = 0, **options: Any) -> Outcome:
        self._pipe.send((requests, policy_version, options))
        found: Outcome = self._receive()
        return found

    def _receive(self) -> Any:
        found = self._pipe.recv()
        if isinstance(found, str) and found != "ready":
            raise AssertionError(f"the second engine failed:\n{found}")
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.join(20)


def _serve(pipe: Connection, model: Path, settings: EngineSettings, options: dict[str, Any]) -> None:
    try:
        with RolloutEngine(model, settings, **options) as engine:
            pipe.send("ready")
            while True:
                requests, version, sampling = pipe.recv()
                if version != engine.policy_version:
                    engine.set_policy_version(version)
                pipe.send(generate(engine, requests, **sampling))
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())

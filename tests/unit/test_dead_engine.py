"""An engine that dies while it runs: who steps it is told, and every other error comes as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.rollout_engine import RolloutEngine, _Pending
from paceline.engine.token_outputs import Grown
from paceline.errors import EngineError
from paceline.types import RolloutRequest

pytest.importorskip("vllm", reason="vLLM is not installed")


def failing(error: Exception, is_failed: bool = False) -> RolloutEngine:
    """An engine with two running responses, whose next step brings a token of the first one and then raises, as all
    other calls do that reach vLLM.
    """

    def step() -> Iterator[Grown]:
        yield Grown("a", (7,), (-0.5,), None)
        raise error

    def die(*_: object, **__: object) -> None:
        raise error

    engine = object.__new__(RolloutEngine)
    inside: Any = SimpleNamespace(
        model_executor=SimpleNamespace(is_failed=is_failed),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
        reset_prefix_cache=die,
        collective_rpc=die,
    )
    outputs: Any = SimpleNamespace(step=step, add=die)
    engine._engine, engine._outputs = inside, outputs
    engine.settings, engine._is_torn, engine._tickets = None, False, itertools.count()
    engine.vocab_size, engine.max_model_len, engine.policy_version = 9, 64, 0
    requests = {name: RolloutRequest((1, 2), 20) for name in ("a", "b")}
    engine._pending = {
        name: _Pending(index, request, name) for index, (name, request) in enumerate(requests.items())
    }
    return engine


def test_a_dead_engine_is_told_with_its_cause() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    dead = EngineDeadError()
    with pytest.raises(EngineError, match=r"has died .*build the engine anew .* the 2 others") as found:
        failing(dead).step()
    assert found.value.__cause__ is dead


def test_an_engine_without_one_of_its_workers_is_dead_too() -> None:
    with pytest.raises(EngineError, match=r"has died .RuntimeError: cancelled.: .* stay"):
        failing(RuntimeError("cancelled"), is_failed=True).step()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), TypeError("no int"), ValueError("no")])
def test_other_errors_come_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as found:
        failing(error).step()
    assert found.value is error


def submit(engine: RolloutEngine) -> None:
    from vllm import SamplingParams

    engine.submit(2, RolloutRequest((1, 2), 20), SamplingParams())


def push_weights(engine: RolloutEngine) -> None:
    engine._pending.clear()
    engine.push_weights([])


CALLS = [submit, push_weights, RolloutEngine.reset_prefix_cache, RolloutEngine.take_samples]


@pytest.mark.parametrize("call", CALLS)
def test_a_dead_engine_is_told_whatever_is_asked_of_it(call: Callable[[RolloutEngine], object]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    dead = EngineDeadError()
    with pytest.raises(EngineError, match=r"has died .EngineDeadError.*build the engine anew") as found:
        call(failing(dead))
    assert found.value.__cause__ is dead
    other = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as kept:
        call(failing(other))
    assert kept.value is other

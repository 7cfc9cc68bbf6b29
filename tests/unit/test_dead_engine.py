"""An engine that dies while it runs: who steps it is told, and every other error comes as it is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.rollout_engine import RolloutEngine, _Pending
from paceline.engine.token_outputs import Grown
from paceline.errors import EngineError
from paceline.types import RolloutRequest

pytest.importorskip("vllm", reason="vLLM is not installed")


def failing(error: Exception, is_failed: bool = False) -> RolloutEngine:
    """An engine with two running responses, whose next step brings a token of the first one and then raises."""

    def step() -> Iterator[Grown]:
        yield Grown("a", (7,), (-0.5,), None)
        raise error

    engine = object.__new__(RolloutEngine)
    inside: Any = SimpleNamespace(model_executor=SimpleNamespace(is_failed=is_failed))
    outputs: Any = SimpleNamespace(step=step)
    engine._engine, engine._outputs = inside, outputs
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

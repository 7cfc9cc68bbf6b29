"""Which endings of a response are failures."""

from __future__ import annotations

import pytest

from paceline.engine.rollout_engine import RolloutEngine, _Pending
from paceline.types import RolloutRequest


@pytest.mark.parametrize(
    ("reason", "has_failed"),
    [("stop", False), ("length", False), ("abort", False), ("repetition", False), ("error", True)],
)
def test_only_an_error_is_a_failure(reason: str, has_failed: bool) -> None:
    engine = object.__new__(RolloutEngine)
    engine.settings, engine.policy_version = None, 0
    response = engine._finish(_Pending(0, RolloutRequest((1, 2), 20), "a", [7], [-0.5]), reason)
    assert response.finish_reason == reason
    assert (response.failure is not None) == has_failed

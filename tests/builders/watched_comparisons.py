"""Whether a comparison with plain rollouts compares what it should."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.training.rollouts import Rollouts


def watch_comparisons(patch: pytest.MonkeyPatch, kind: type[Rollouts]) -> list[dict[bool, int]]:
    """Draft tokens of the plain rollout (True) and of the other one, of each comparison from now on."""
    compared: list[dict[bool, int]] = []
    rollouts: dict[bool, int] = {}
    run, compare = kind.run, kind.compare

    def watched_run(self: Any, requests: Any, params: Any, step: int | None, *more: Any) -> Any:
        rollout = run(self, requests, params, step, *more)
        rollouts[step is None] = sum(response.num_draft_tokens for response in rollout.responses)
        return rollout

    def watched_compare(self: Any, *given: Any) -> Any:
        rollouts.clear()
        found = compare(self, *given)
        compared.append(dict(rollouts))
        return found

    patch.setattr(kind, "run", watched_run)
    patch.setattr(kind, "compare", watched_compare)
    return compared

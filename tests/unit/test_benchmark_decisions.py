"""What the benchmark of decisions plays: a draft worker that is nobody's child, and a fleet whose workers help."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decisions


@pytest.mark.parametrize("every", [0, 1])
def test_a_step_with_drafts_of_a_worker_is_timed(every: int) -> None:
    step = decisions.step_of_draft_worker(2, every, num_steps=3)
    assert 0.0 < step.windows_ms < step.all_ms
    assert 0.0 < step.waiting_ms < step.all_ms


def test_a_worker_that_lost_its_helper_gets_another_one() -> None:
    decide = decisions.help_decision(8)
    [order] = decide()  # type: ignore[misc]
    assert isinstance(order, decisions.DraftFor)

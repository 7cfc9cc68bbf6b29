"""Training on vLLM's model runner V2 beside a drafter that grows from nothing: the same policy as without.

One process runs everything (interpreted_training.py), because Triton has to be prepared before anything imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interpreted_run import MARKS, run_interpreted

HERE = Path(__file__).parent
pytestmark = MARKS


@pytest.fixture(scope="module")
def made(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the runs, by way of drafting."""
    folder = tmp_path_factory.mktemp("training")
    return run_interpreted(HERE / "interpreted_training.py", policy_dir, folder, folder=folder, timeout_s=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("way", ["osd", "overlapped"])
def test_a_drafter_grows_and_the_policy_stays_the_same(made: dict[str, Any], way: str) -> None:
    """A small model, and a head behind steps that overlap: swapped in, used, and no token changed."""
    assert made[way]["responses"] == made["plain"]["responses"]
    assert made[way]["is_same_policy"]
    assert made[way]["versions"][-1] >= 1
    assert made[way]["tried"] > 0
    assert (made[way]["collected_tokens"] > 0) == (way != "osd")

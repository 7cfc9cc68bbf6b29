"""Blocks of engines hold the coupled pair, and a row says how near it came to what the protocol gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.planning.window import decoupled_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decoupled


def test_every_system_is_in_one_block_beside_the_coupled_pair() -> None:
    blocks = list(decoupled.blocks(list(decoupled.SYSTEMS)))
    assert all(block[0] == decoupled.COUPLED and len(block) <= decoupled.MAX_ENGINES for block in blocks)
    others = [system for block in blocks for system in block[1:]]
    assert sorted([decoupled.COUPLED, *others]) == sorted(decoupled.SYSTEMS)


def result(repetition: int = 0, **changes: Any) -> dict[str, Any]:
    """A rollout of one response: D is 2 ms, V 20 ms and 1 ms for each token beyond the first, p = 0.8."""
    found = {
        "tokens_per_s": 90.0, "full_tokens_per_s": 100.0, "ratio": 1.2, "repetition": repetition,
        "acceptance_length": 3.0, "wasted_tokens": 5, "branches": 0, "branch_hits": 0, "wait_s": 0.1,
        "model_share": 1.0, "d_over_v": 0.1, "acceptance_rate": 0.8, "draft_s": 0.002,
        "verified": [(1, 0.020), (5, 0.024), (9, 0.028)], "ids": [(1, 2, 3)],
    }  # fmt: skip
    return {**found, **changes}


def test_the_chain_is_compared_with_the_protocol_at_its_window() -> None:
    row = decoupled.summarise(decoupled.CHAIN, 1, 0.1, 8, {decoupled.CHAIN: [result()]})
    verify_s, draft_s = 0.028, 8 * 0.002
    given = float(decoupled_tokens(0.8, 8, draft_s / verify_s)) / verify_s
    assert row["of_protocol"] == pytest.approx(100.0 / given)
    at_best = decoupled.summarise(decoupled.DECOUPLED, 1, 0.1, 8, {decoupled.DECOUPLED: [result()]})
    assert at_best["of_protocol"] <= row["of_protocol"]
    assert "of_protocol" not in decoupled.summarise("plain", 1, 0.1, 8, {"plain": [result()]})


def test_tokens_are_compared_with_plain_of_the_same_repetition() -> None:
    own = [result(0), result(1, ids=[(4,)])]
    found = {decoupled.CHAIN: own}
    assert decoupled.summarise(decoupled.CHAIN, 1, 0.1, 8, found)["equal"] is None
    found["plain"] = [result(1, ids=[(4,)]), result(0)]
    assert decoupled.summarise(decoupled.CHAIN, 1, 0.1, 8, found)["equal"]
    found["plain"][0]["ids"] = [(5,)]
    assert not decoupled.summarise(decoupled.CHAIN, 1, 0.1, 8, found)["equal"]


def test_a_drafter_that_supplied_too_little_meets_no_bar() -> None:
    rows = [
        decoupled.summarise(
            decoupled.DECOUPLED, 1, 0.1, 8, {decoupled.DECOUPLED: [result(model_share=share)]}
        )
        for share in (0.5, 0.05)
    ]
    verdicts = [decoupled.check_rows([row])[0] for row in rows]
    assert [one["met"] for one in verdicts] == [True, False]

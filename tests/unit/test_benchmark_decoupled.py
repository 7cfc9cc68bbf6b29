"""Blocks of engines hold the coupled pair, and a row says how near it came to what the protocol gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.planning.window import decoupled_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decoupled


def test_what_is_compared_is_in_one_block_beside_the_coupled_pair() -> None:
    blocks = list(decoupled.blocks(list(decoupled.SYSTEMS)))
    assert all(block[0] == decoupled.COUPLED and len(decoupled.engines(block)) <= 5 for block in blocks)
    assert {system for block in blocks for system in block} == set(decoupled.SYSTEMS)
    parts = {decoupled.CHAIN, decoupled.RECONFIGURED, decoupled.DECOUPLED}
    for compared in (parts, {decoupled.AUTO, *decoupled.REACHED}):
        assert any(compared <= set(block) for block in blocks)
    assert list(decoupled.blocks([decoupled.PLAIN])) == [[decoupled.COUPLED, decoupled.PLAIN]]


def test_plain_is_made_by_an_engine_that_drafts_otherwise() -> None:
    block = [decoupled.COUPLED, decoupled.SUFFIX_ONLY, decoupled.PLAIN]
    assert decoupled.engines(block) == block[:2]
    assert decoupled.maker(decoupled.PLAIN, block) == decoupled.SUFFIX_ONLY
    assert decoupled.engines([decoupled.COUPLED, decoupled.PLAIN])[1] == decoupled.PLAIN


def test_no_block_is_run_in_vain() -> None:
    wanted = [decoupled.DECOUPLED, decoupled.AUTO]
    assert list(decoupled.blocks(wanted)) == [[decoupled.COUPLED, *wanted]]
    assert list(decoupled.blocks([decoupled.DECOUPLED])) == [[decoupled.COUPLED, decoupled.DECOUPLED]]


def result(repetition: int = 0, **changes: Any) -> dict[str, Any]:
    """A rollout of one response: D is 2 ms, V 20 ms and 1 ms for each token beyond the first, p = 0.8."""
    found = {
        "tokens_per_s": 90.0, "full_tokens_per_s": 100.0, "over": {"coupled, one core": 1.2}, "repetition": repetition,
        "acceptance_length": 3.0, "wasted_tokens": 5, "branches": 0, "branch_hits": 0, "wait_s": 0.1,
        "model_share": 1.0, "d_over_v": 0.1, "acceptance_rate": 0.8, "draft_ms": 2.0, "verify_ms": 20.0,
        "mode_changes": 2, "share_ahead": None,
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


def test_the_protocol_may_use_every_window_of_the_engine() -> None:
    cheap = result(draft_ms=0.2, acceptance_rate=0.99)
    verify_s = 0.020 + 0.001 * np.arange(1, 33)
    rates = decoupled_tokens(0.99, np.arange(1, 33), np.arange(1, 33) * 2e-4 / verify_s) / verify_s
    assert rates.argmax() > 8
    assert decoupled.protocol_tokens_per_s(cheap, 1, 8, is_fixed=False) == pytest.approx(rates.max())
    assert decoupled.protocol_tokens_per_s(cheap, 1, 8, is_fixed=True) == pytest.approx(rates[7])


def verdicts(**changes: Any) -> dict[str, bool]:
    """Of two rollouts of the decoupled system, by bar. changes: of the second."""
    over = {decoupled.COUPLED: 1.2, decoupled.CHAIN: 1.1, decoupled.RECONFIGURED: 1.06}
    own = [
        result(repetition, **{"over": over, "mode_changes": 3, "full_tokens_per_s": 200.0, **different})
        for repetition, different in enumerate([{}, changes])
    ]
    found = {decoupled.DECOUPLED: own, decoupled.PLAIN: [result(0), result(1)]}
    row = decoupled.summarise(decoupled.DECOUPLED, 1, 0.1, 8, found)
    assert row["over_chain_range"] == sorted(one["over"][decoupled.CHAIN] for one in own)
    return {bar["case"].partition(", 1 running")[0]: bar["met"] for bar in decoupled.check_rows([row])}


def test_bars_are_met_by_ratios_of_one_repetition() -> None:
    assert set(verdicts().values()) == {True}
    behind = verdicts(over={decoupled.COUPLED: 1.3, decoupled.CHAIN: 1.1, decoupled.RECONFIGURED: 1.02})
    assert [case for case, met in behind.items() if not met] == ["corrections prepared, over reconfigured"]
    assert not verdicts(mode_changes=1)["changes of mode"]


def test_changes_by_auto_are_no_changes_by_algorithm_2() -> None:
    row = {"system": decoupled.AUTO, "running": 4, "cost": 0.1, "mode_changes": 99, "equal": True}
    assert decoupled.check_rows([row]) == []


def test_other_tokens_than_plain_meet_no_bar() -> None:
    assert set(verdicts(ids=[(1, 2, 4)]).values()) == {False}


def test_a_drafter_that_supplied_too_little_meets_no_bar() -> None:
    met = verdicts(model_share=-0.9)
    assert [case for case, one in met.items() if one] == ["changes of mode"]


def test_auto_is_compared_with_the_best_of_each_repetition() -> None:
    ways = {
        decoupled.COUPLED: 2.0,
        decoupled.TWO_THREADS: 0.99,
        decoupled.DECOUPLED: 1.5,
        decoupled.SUFFIX_ONLY: 3.0,
    }
    own = [result(over=ways), result(1, over={**ways, decoupled.DECOUPLED: 0.94})]
    found = {decoupled.AUTO: own, decoupled.PLAIN: [result(0), result(1)]}
    row = decoupled.summarise(decoupled.AUTO, 4, 0.2, 8, found)
    assert row["over_best_range"] == [0.94, 0.99]
    [bar] = [bar for bar in decoupled.check_rows([row]) if "auto" in bar["case"]]
    assert bar["met"] == (row["over_best"] >= 0.95)
    own[0]["over"][decoupled.SUFFIX_ONLY] = 0.8
    [bar] = [
        bar
        for bar in decoupled.check_rows([decoupled.summarise(decoupled.AUTO, 4, 0.2, 8, found)])
        if "auto" in bar["case"]
    ]
    assert not bar["met"]

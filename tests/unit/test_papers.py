"""What counts as a prediction of the papers' numbers: nothing fitted, nothing that follows from what was fitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.sim.scenario import Claim, load_scenario, preset_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from papers import count_predictions, version_of  # noqa: E402

CLAIMS = [(preset, claim) for preset in preset_names() for claim in load_scenario(preset).claims]


def is_whole_rollout(claim: Claim) -> bool:
    """A whole system over veRL, where the preset has its stages too."""
    return claim.text == "rollout" and claim.over == "veRL"


@pytest.mark.parametrize("preset", preset_names())
def test_products_of_stages_are_no_predictions(preset: str) -> None:
    claims = load_scenario(preset).claims
    staged = any(claim.over not in (None, "veRL", "vanilla speculation", "veRL (2x)") for claim in claims)
    for claim in claims:
        if is_whole_rollout(claim) and staged:
            assert claim.standing != "predicted", claim


def test_no_number_that_a_constant_was_chosen_for_is_a_prediction() -> None:
    fitted = {
        ("specactor-dapo-32b", "rollout"),
        ("specactor-dapo-32b", "vanilla speculation"),
        ("specactor-dapo-32b", "twice the GPUs"),
        ("specactor-dapo-32b", "GPU time wasted in veRL"),
        ("tlt-qwen2.5-7b", "end to end on 1 node"),
        ("tlt-qwen2.5-32b", "rollout of 128 requests on one worker"),
        ("seer-qwen2-vl-72b", "idle in veRL"),
        ("seer-qwen2-vl-72b", "preemptions in veRL"),
    }
    fitted |= {(name, text) for name, claim in CLAIMS if "of veRL (s)" in (text := claim.text)}
    assert {(name, claim.text) for name, claim in CLAIMS if claim.standing == "fitted"} == fitted


def test_what_follows_from_the_fitted_rollout_is_no_prediction() -> None:
    standing = {(name, claim.text): claim.standing for name, claim in CLAIMS}
    for text in ("end to end", "over twice the GPUs", "RLHFuse end to end", "fastest-of-N", "best-of-N"):
        assert standing["specactor-dapo-32b", text] == "implied"
    assert standing["specactor-grpo-32b", "end to end"] == "implied"


def test_each_claim_is_of_one_version() -> None:
    for preset, claim in CLAIMS:
        named = {word.rstrip(",:") for word in claim.source.split()} & {"v1", "v2", "v3"}
        assert len(named) == (0 if preset.startswith("tlt") else 1), (preset, claim.text, claim.source)


def row(preset: str, version: str, standing: str, difference: float, gain: float | None) -> dict[str, Any]:
    return {
        "preset": preset,
        "version": version,
        "standing": standing,
        "difference": difference,
        "gain_difference": gain,
    }


def test_predictions_are_counted_for_each_version_on_its_own() -> None:
    claims = [
        row("seer-a", "v3", "predicted", -0.10, -0.40),
        row("seer-a", "v3", "fitted", 0.0, 0.0),
        row("seer-a", "v3", "implied", 0.0, 0.0),
        row("seer-b", "v1", "predicted", 0.14, 0.20),
        row("tlt-a", "only", "predicted", -0.20, None),
    ]
    assert count_predictions(claims) == [
        {"versions": "latest", "predictions": 2, "within_15": 1, "gains": 1, "gains_within_25": 0},
        {"versions": "earlier", "predictions": 1, "within_15": 1, "gains": 1, "gains_within_25": 1},
    ]


def test_the_version_is_the_sources_first_word() -> None:
    assert [
        version_of(source) for source in ("v1 6.2", "v1 5.2: 2.0", "v3", "table 3", "6.3, figure 14")
    ] == [
        "v1",
        "v1",
        "v3",
        "only",
        "only",
    ]

"""Scenarios: the presets that are shipped, inheritance, and files that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from paceline.errors import ConfigError
from paceline.sim.comparison import ClaimResult, judge_claims, run_systems
from paceline.sim.scenario import SYSTEMS, Claim, Scenario, build_system, load_scenario, preset_names

SMALL: dict[str, Any] = {
    "title": "small",
    "gpus": 4,
    "groups": 6,
    "group_size": 4,
    "prompt_tokens": 16,
    "max_tokens": 2000,
    "lengths": {"median_tokens": 300, "sigma": 0.8},
    "engine": {"gpus": 2, "step_ms": [[1, 10.0], [64, 12.0], [256, 30.0]], "kv_tokens": 20000},
    "models": [{"name": "small", "base_ms": 1.0, "acceptance": {"level": 0.7}}],
    "suffix": {"name": "tree", "acceptance": {"level": 0.4, "warm_level": 0.6}},
    "lookup": {"name": "lookup", "acceptance": {"level": 0.3}},
    "phases": {"prepare_share": 0.1, "learn_share": 0.2},
    "systems": ["veRL", "Seer"],
}


def write(folder: Path, name: str = "small.yaml", **changes: Any) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return str(path)


def test_every_preset_loads_and_builds() -> None:
    names = preset_names()
    assert len(names) >= 9
    for name in names:
        scenario = load_scenario(name)
        for system in scenario.systems:
            assert build_system(system, scenario).name == system
        work = scenario.draw(scenario.length_distribution(), 0)
        assert work.num_responses == scenario.groups * scenario.group_size
        for claim in scenario.claims:
            assert claim.of in scenario.systems
            assert claim.over is None or claim.over in scenario.systems
            load_scenario(name, claim.where)


def test_presets_have_the_mean_lengths_of_seer() -> None:
    for name, mean in (("seer-qwen2-vl-72b", 7615), ("seer-moonlight", 22386), ("seer-kimi-k2", 38959)):
        scenario = load_scenario(name)
        drawn = scenario.draw(scenario.length_distribution(), 0).length_tokens
        assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_every_system_runs(tmp_path: Path) -> None:
    changes = {"tlt": {"batch_sizes": [1, 2, 4, 8]}, "specactor": {"naive_draft_gpus": 2}}
    scenario = load_scenario(write(tmp_path, **changes))
    results = run_systems(scenario, list(SYSTEMS))
    assert list(results) == list(SYSTEMS)
    base = results["veRL"]
    assert base.step_s == pytest.approx(base.rollout_s / 0.7)
    for one in results.values():
        assert 0.0 <= one.idle_share < 1.0
        assert one.acceptance_length >= 1.0 - 1e-9


def test_a_scenario_extends_another(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "child.yaml").write_text("extends: small.yaml\nengine: {gpus: 1}\nsystems: [veRL]\n")
    child = load_scenario(str(tmp_path / "child.yaml"))
    assert child.engine.gpus == 1
    assert child.engine.kv_tokens == 20000
    assert child.systems == ("veRL",)


def test_a_source_replaces_the_other_one(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "lengths.json").write_text("[[100, 1.0]]")
    (tmp_path / "child.yaml").write_text("extends: small.yaml\nlengths: {histogram: lengths.json}\n")
    child = load_scenario(str(tmp_path / "child.yaml"))
    assert set(child.draw(child.length_distribution(), 0).length_tokens.tolist()) == {100}


def test_a_scenario_cannot_extend_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_scenario(str(tmp_path / "a.yaml"))


def test_the_first_system_keeps_its_own_phases(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, systems=["RLHFuse", "veRL"]))
    results = run_systems(scenario, scenario.systems)
    assert results["RLHFuse"].step_s <= results["veRL"].step_s


def test_histograms_count_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[[100, 0.5], [200, 0.5]]")
    source = write(tmp_path, lengths={"histogram": "lengths.json", "scale": 3.0})
    scenario = load_scenario(source)
    drawn = scenario.draw(scenario.length_distribution(), 0).length_tokens
    assert set(np.unique(drawn).tolist()) == {300, 600}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": 3}, "did you mean gpus"),
        ({"gpus": 1}, "hold no engine of 2"),
        ({"systems": ["veRl"]}, "'veRl': there are veRL"),
        ({"lengths": {}}, "either median_tokens or histogram"),
        ({"engine": {"step_ms": [[2, 1.0], [1, 2.0]]}}, "must ascend"),
        ({"models": [], "systems": ["veRL", "TLT"]}, "needs models"),
        ({"phases": {"learn_share": 0.6, "prepare_share": 0.5}}, "below 1"),
        ({"claims": [{"text": "x", "of": "y", "paper": 1.0, "source": "z"}]}, "claim 'x' is about 'y'"),
        ({"models": [{**SMALL["models"][0], "tree_level": 0.6}]}, "tree_level 0.6 is below"),
        ({"lengths": {"median_tokens": 9, "scale": 2}}, "scale 2 is a factor on a histogram"),
        ({"lengths": {"median_tokens": 3e9}}, "median_tokens.*3000000000.*2147483647"),
        ({"prompt_tokens": 1 << 31}, "prompt_tokens.*2147483648.*2147483647"),
        ({"max_tokens": 1 << 31}, "max_tokens.*2147483648.*2147483647"),
        ({"seed": 1 << 63}, "seed.*9223372036854775808"),
        ({"seer": {"request_tokens": 129}}, "request_tokens.*129.*128"),
        ({"tlt": {"strategies": [[200, 16]], "batch_sizes": [1]}}, "strategies.*200.*128"),
        ({"tlt": {"strategies": [[2, -1]], "batch_sizes": [1]}}, "strategies.*-1"),
        ({"tlt": {"batch_sizes": [0, 1, 2, 3]}}, "batch_sizes.*0.*1"),
        ({"tlt": {"strategies": [], "batch_sizes": []}}, "strategies.*at least 1 item"),
        ({"extends": "nowhere"}, "neither a scenario file nor a preset"),
    ],
)
def test_wrong_scenarios_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(write(tmp_path, **changes))


def test_a_system_without_room_says_so(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, specactor={"naive_draft_gpus": 3}))
    with pytest.raises(ConfigError, match="no worker fits: an engine takes 2 GPUs"):
        build_system("SpecActor, naive", scenario)


def test_missing_files_are_named() -> None:
    with pytest.raises(ConfigError, match="specactor-dapo-32b"):
        load_scenario("nowhere.yaml")


def claim(**changes: Any) -> Claim:
    return Claim(**{"text": "x", "of": "Seer", "over": "veRL", "paper": 1.5, "source": "y", **changes})


@pytest.mark.parametrize(
    ("paper", "to", "ours", "difference"),
    [
        (2.0, None, 1.0, -0.5),
        (2.0, 2.4, 2.2, 0.0),
        (2.0, 2.4, 3.0, 0.25),
        (2.0, 2.4, 1.0, -0.5),
        (0.2, 0.0, 0.1, 0.0),
        (0.2, 0.0, 0.3, 0.5),
    ],
)
def test_difference_counts_from_the_nearest_end(
    paper: float, to: float | None, ours: float, difference: float
) -> None:
    assert ClaimResult(claim(paper=paper, paper_to=to), ours).difference == pytest.approx(difference)


@pytest.mark.parametrize(
    ("paper", "to", "ours", "difference"),
    [(1.2, None, 1.1, -0.5), (2.0, 2.4, 2.2, 0.0), (1.5, 2.6, 1.25, -0.5), (0.95, None, 0.9, None)],
)
def test_the_gain_is_compared_too_where_there_is_one(
    paper: float, to: float | None, ours: float, difference: float | None
) -> None:
    found = ClaimResult(claim(paper=paper, paper_to=to), ours).gain_difference
    assert found == (None if difference is None else pytest.approx(difference))


@pytest.mark.parametrize(
    ("paper", "ours", "difference"), [(0.0, 0.5, None), (0.0, 0.0, 0.0), (1.5, None, None)]
)
def test_nothing_is_relative_to_nothing(paper: float, ours: float | None, difference: float | None) -> None:
    judged = ClaimResult(claim(paper=paper), ours)
    assert judged.difference == difference
    assert judged.gain_difference is None
    assert judged.difference_text == ("–" if difference is None else "+0 %")


def test_systems_without_a_tail_are_not_compared_by_it(tmp_path: Path) -> None:
    claims = [claim(quantity=one).model_dump() for one in ("tail", "tail_cut", "tail_s")]
    scenario = load_scenario(write(tmp_path, groups=1, group_size=1, claims=claims))
    results = run_systems(scenario, scenario.systems)
    assert [one.tail_s for one in results.values()] == [0.0, 0.0]
    judged = judge_claims(scenario, results, {})
    assert [one.ours for one in judged] == [None, None, 0.0]
    assert [one.ours_text for one in judged] == ["–", "–", "0"]


def test_a_median_replaces_the_scale_of_a_histogram_too(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[[100, 1.0]]")
    write(tmp_path, lengths={"histogram": "lengths.json", "scale": 3.0, "group_correlation": 0.25})
    (tmp_path / "own.yaml").write_text("{extends: small.yaml, lengths: {median_tokens: 9}}")
    lengths = load_scenario(str(tmp_path / "own.yaml")).lengths
    assert (lengths.median_tokens, lengths.scale, lengths.group_correlation) == (9.0, 1.0, 0.25)


def test_a_share_has_no_gain() -> None:
    assert ClaimResult(claim(quantity="tail_cut"), 0.7).gain_difference is None


def test_claims_are_judged_by_their_quantity(tmp_path: Path) -> None:
    quantities = ["rollout", "step", "tail", "tail_cut", "idle_share", "rollout_s"]
    claims = [claim(quantity=one).model_dump() for one in quantities]
    source = write(tmp_path, claims=[*claims, claim(where=("gpus=8",)).model_dump()])
    scenario = load_scenario(source)
    results = run_systems(scenario, scenario.systems)
    judged = judge_claims(scenario, results, {})
    seer, verl = results["Seer"], results["veRL"]
    assert [one.ours for one in judged] == pytest.approx(
        [
            verl.rollout_s / seer.rollout_s,
            verl.step_s / seer.step_s,
            verl.tail_s / seer.tail_s,
            1 - seer.tail_s / verl.tail_s,
            seer.idle_share,
            seer.rollout_s,
        ]
    )


def test_seeds_change_the_responses_and_nothing_else(tmp_path: Path) -> None:
    first = load_scenario(write(tmp_path))
    second = load_scenario(write(tmp_path), ["seed=1"])
    assert isinstance(first, Scenario)
    distribution = first.length_distribution()
    one, other = first.draw(distribution, 0), second.draw(distribution, 0)
    assert one.length_tokens.tolist() != other.length_tokens.tolist()
    assert first.draw(distribution, 0).length_tokens.tolist() == one.length_tokens.tolist()

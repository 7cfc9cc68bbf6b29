"""Whatever an engine lives through under whatever policy, its log is planned again without a difference."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from live_loop import live

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.loop_replay import replay_engine
from paceline.record.decisions import DecisionReader


@st.composite
def engines(draw: st.DrawFn) -> EngineSettings:
    drafter = draw(st.sampled_from(["suffix", "none"]))
    policy = draw(st.sampled_from(["marginal", "marginal", "bandit", "thresholds", "fixed"]))
    num_paths = draw(st.integers(1, 3)) if drafter == "suffix" else 1
    model = draw(st.sampled_from(["somewhere", *([None] if drafter == "suffix" else [])]))
    return EngineSettings(
        drafter=drafter,
        model_drafter=model,
        further_drafters=() if model is None else ("elsewhere",),
        num_paths=num_paths,
        max_alternatives=draw(st.integers(1, 6)),
        budget=BudgetSettings(
            policy=policy,
            max_draft_tokens=draw(st.integers(9 if policy == "bandit" else 0, 10)),
            refresh_steps=draw(st.sampled_from([8, 16, 256])),
            min_gain=draw(st.sampled_from([0.0, 0.01, 0.2])),
            bandit_strategies=draw(
                st.sampled_from([((6, 1, 4), (0, 1, 0)), ((8, num_paths, 12), (5, 1, 12), (2, num_paths, 2))])
            ),
            bandit_batch_sizes=(1, 4),
            bandit_elastic_threshold=draw(st.sampled_from([3, 5, 32])),
            bandit_seed=draw(st.integers(0, 99)),
        ),
    )


@given(engines(), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([1.0, 50.0]))
@settings(max_examples=40)
def test_a_logged_engine_is_replayed_without_a_difference(
    engine: EngineSettings, seed: int, overlaps: bool, drafting: float
) -> None:
    with TemporaryDirectory() as folder:
        logged = engine.model_copy(update={"decision_log": folder})
        proposals = live(logged, seed, 60, overlaps=overlaps, drafting=drafting)
        with DecisionReader(Path(folder) / "engine-1.decisions") as reader:
            tallies = {tally.kind: tally for tally in replay_engine(reader)}
    assert tallies["draft budget"].num_planned == len(proposals)
    assert all(tally.num_different == 0 for tally in tallies.values())
    is_steered = engine.model_drafter is not None and engine.budget.policy != "fixed"
    assert ("model drafter" in tallies) == is_steered
    assert ("draft paths" in tallies) <= (engine.num_paths > 1)

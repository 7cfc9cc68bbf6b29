"""Replays of recorded responses: every policy ends with the same tokens, and suffix trees draft without a model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import replay
from recording import DEPTH, Clock, Rollout

SAMPLES, LENGTH = 4, 96


@pytest.fixture
def rollout() -> Rollout:
    """One group, whose responses all count alike."""
    response = np.arange(LENGTH, dtype=np.int32) % 24
    drafts = np.zeros((SAMPLES, LENGTH, DEPTH))
    return Rollout(
        prompts=[(30, 31, 32)] * SAMPLES,
        keys=[2**63 + number for number in range(SAMPLES)],
        groups=[7] * SAMPLES,
        responses=[response.copy() for _ in range(SAMPLES)],
        tokens=drafts.astype(np.int32),
        cells=drafts.astype(np.int16),
        max_tokens=LENGTH,
        measured_s={},
    )


def test_suffix_trees_alone_draft_what_responses_repeat(rollout: Rollout) -> None:
    step = np.array([0.02, 1e-4, 1e-4, 1e-4, 1e-5, 1e-6, 1e-6])
    recorded = replay.Replay(rollout, Clock(step, np.zeros(3)))
    policy = replay.Policy(replay.SUFFIX, "no drafter is loaded")
    plain = replay.Policy("off", "no drafter is loaded").play(recorded)
    assert (plain.num_steps, plain.num_drafted) == (LENGTH - 1, 0)
    for _ in range(2):  # what was learned of acceptance stays, the responses do not
        found = policy.play(recorded)
        assert found.num_accepted > LENGTH
        assert found.num_decoded + found.num_accepted == SAMPLES * (LENGTH - 1)
        assert found.wall_s < plain.wall_s


def test_a_drafter_that_did_not_record_has_a_measured_time_of_plain_decoding_alone() -> None:
    took = {"off": 3.0, "marginal": 2.0}
    assert replay.measured_with(took, is_recorder=True) == took
    assert replay.measured_with(took, is_recorder=False) == {"off": 3.0}


def test_a_disturbance_makes_the_rollout_before_slower_and_no_other(rollout: Rollout) -> None:
    clock = Clock(np.array([0.02, 1e-4, 1e-4, 1e-4, 1e-5, 1e-6, 1e-6]), np.array([1e-3, 1e-4, 1e-5]))
    usual, slow = (replay.Replay(rollout, clock, slowness) for slowness in (1.0, 3.0))
    for name in ("off", "fixed"):  # a fixed length is not learned
        times = [replay.Policy(name, "no drafter is loaded").play(one).wall_s for one in (usual, slow)]
        assert times[1] == pytest.approx(3 * times[0])
    lengths = range(LENGTH, 0, -30)  # with a tail
    rollout = replace(rollout, responses=[one[:n] for one, n in zip(rollout.responses, lengths, strict=True)])
    rows = replay.compare([rollout, rollout], clock, "no drafter is loaded", disturb=3.0)
    [disturbed] = [row for row in rows if row["policy"] == replay.DISTURBED]
    [marginal] = [row for row in rows if row["policy"] == "marginal"]
    assert disturbed["undisturbed"] == pytest.approx(marginal["wall_s"] / disturbed["wall_s"])
    assert replay.DISTURBED not in {
        row["policy"] for row in replay.compare([rollout] * 2, clock, "none", None)
    }

"""What the benchmarks of a growing drafter's cost and of a policy that moves away read out of runs, and their bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recorded_run import SimulatedRun

from paceline.record import (
    DrafterSession,
    DrafterStep,
    Evaluation,
    RecordReader,
    RecordWriter,
    ResponseDone,
)

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import drafter_cost
import drafter_drift


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Two steps of two responses."""
    with RecordReader(SimulatedRun(num_steps=1).build(tmp_path / "made")) as made:
        header = made.header
    with RecordWriter.create(tmp_path / "run", header) as writer:
        writer.write(Evaluation(t_s=0.0, step=0, solve_rate=0.5, n=8, tokens_mean=4.0))
        for step in (1, 2):
            for sample in (0, 1):
                writer.write(
                    ResponseDone(
                        t_start_s=step,
                        t_end_s=step + 1.0,
                        step=step,
                        group=0,
                        sample=sample,
                        prompt_tokens=4,
                        response_tokens=30 * step,
                        num_steps=20,
                        drafted=50,
                        accepted=30 * step - 20,
                        finish_reason="stop",
                    )
                )
            writer.write(DrafterSession(step, step + 1.0, step, "w0", core_s=0.5 * step))
            writer.write(DrafterStep(t_s=step + 1.0, step=step, version=step, tried=7 * (step - 1)))
        writer.write(Evaluation(t_s=9.0, step=2, solve_rate=0.25, n=8, tokens_mean=4.0))
    return tmp_path / "run"


def test_a_part_of_a_run_has_its_own_acceptance_length(record: Path) -> None:
    run = drafter_drift.Run(record)
    assert [run.acceptance_length(range(step, step + 1)) for step in (1, 2)] == [1.5, 3.0]
    assert run.acceptance_length(range(1, 3)) == 2.25
    assert run.lengths(range(2, 3)) == [(2, 0, 60), (2, 1, 60)]
    assert run.solve_rates == {0: 0.5, 2: 0.25}


@pytest.mark.parametrize(("ratio", "at_end", "met"), [(1.2, 0.5, [True, True]), (1.09, 0.44, [False, False])])
def test_a_drafter_has_to_keep_up_and_the_policy_to_stay_good(
    ratio: float, at_end: float, met: list[bool]
) -> None:
    bars = drafter_drift.check([{"ratio": 2.0}, {"ratio": ratio}], {0: 0.5, 3: 0.1, 6: at_end})
    assert [bar["met"] for bar in bars] == met


def test_what_a_trainer_used_is_read(record: Path) -> None:
    steps, core_s = drafter_cost.read_run(record)
    assert ([step.tried for step in steps], core_s) == ([0, 7], 1.5)


def test_the_interval_is_students() -> None:
    mean, low, high = drafter_cost.interval([1.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert low * high == pytest.approx(4.0)
    assert high == pytest.approx(2.0 * 2.0**12.706, rel=1e-3)
    assert drafter_cost.interval([1.01] * 20) == pytest.approx((1.01, 1.01, 1.01))


def test_costs_are_those_of_the_pairs_that_count() -> None:
    row = {"ratio": 1.02, "accounted_s": 0.1, "rollout_s": 20.0}
    rows = [row | {"ratio": 9.0, "accounted_s": 5.0}, row, row | {"ratio": 1.0}]
    mean, high, share = drafter_cost.summarize(rows, warm_up=1)
    assert (mean, share) == pytest.approx((1.00995, 0.005))
    assert high > 1.02
    assert [bar["met"] for bar in drafter_cost.check(high, share)] == [False, True]

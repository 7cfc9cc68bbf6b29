"""What a run's record tells of a drafter that grew in it, and the bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recorded_run import SimulatedRun

from paceline.record import DrafterSession, DrafterStep, RecordReader, RecordWriter

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import drafter_growth


def test_idle_time_adds_up_over_workers_and_steps(tmp_path: Path) -> None:
    with RecordReader(SimulatedRun(num_steps=1).build(tmp_path / "made")) as made:
        header = made.header
    with RecordWriter.create(tmp_path / "run", header) as writer:
        for step, agreement in ((1, None), (2, 0.25)):
            for worker in ("w0", "w1"):
                begin_s = 10.0 * step
                session = DrafterSession(begin_s, begin_s + 3.0, step, worker, core_s=1.5)
                writer.write(session)
            writer.write(
                DrafterStep(
                    t_s=10.0 * step + 4, step=step, version=step - 1, agreement=agreement, trained_s=step
                )
            )
        writer.write(DrafterSession(30.0, 31.0, 3, core_s=None))  # an older record does not say
        writer.write(DrafterStep(t_s=34.0, step=3, version=1, tried=10, right=4))
    curve = drafter_growth.read_curve(tmp_path / "run")
    assert [(row["step"], row["idle_core_s"], row["agreement"], row["acceptance"]) for row in curve] == [
        (1, 3.0, None, None),
        (2, 6.0, 0.25, None),
        (3, 6.0, None, 0.4),
    ]


@pytest.mark.parametrize(
    ("of_offline", "of_shipped", "used_s", "met"),
    [(0.96, 0.5, 599.0, [True]), (0.94, 0.85, 600.0, [False, True]), (0.95, 0.79, 700.0, [True, False])],
)
def test_each_bar_can_be_missed(of_offline: float, of_shipped: float, used_s: float, met: list[bool]) -> None:
    rows = [
        {"system": system, "of_grown": value}
        for system, value in (("grown", 1.0), ("offline", of_offline), ("shipped", of_shipped))
    ]
    assert [bar["met"] for bar in drafter_growth.check(rows, used_s)] == met

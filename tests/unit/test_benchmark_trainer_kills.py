"""The rows of killed trainers, and the bars that they have to meet."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import trainer_kills

from paceline.distillation.team import PRESENT, SESSION, Present, Session, write_json


def kill(leads: bool, lost_s: float, broken: bool = False, fallen: bool = False) -> dict[str, object]:
    return {"leads": leads, "lost_s": lost_s, "broken": broken, "fallen": fallen}


@pytest.fixture
def watch(tmp_path: Path) -> trainer_kills.Watch:
    """Of two trainers, of which the second one alone is there, and leads."""
    write_json(tmp_path / SESSION, Session(3, (0, 1)))
    write_json(tmp_path / PRESENT.format(1), Present(3, os.getpid()))
    children = [SimpleNamespace(core_s=lambda: 1.0), SimpleNamespace(core_s=lambda: 5.0)]
    return trainer_kills.Watch(SimpleNamespace(pids=[1 << 30, os.getpid()], _children=children), tmp_path)


def test_only_the_leader_s_own_file_is_a_write_of_its(watch: trainer_kills.Watch) -> None:
    of_first, of_second = (watch.folder / f"training{number}.safetensors.new" for number in ("", "-1"))
    assert watch.leader() == 1
    of_first.touch()
    assert not watch.is_writing()
    assert not watch.remove_part(1)
    of_second.touch()
    assert watch.is_writing()
    assert watch.remove_part(1)
    assert not watch.is_writing()
    assert of_first.exists()


def test_what_is_lost_began_with_the_newest_checkpoint_or_with_the_process(
    watch: trainer_kills.Watch,
) -> None:
    (watch.folder / "training-1.safetensors").touch()
    watch.look()
    watch.link._children[1].core_s = lambda: 7.0
    assert (watch.lost_s(0), watch.lost_s(1)) == (0.0, 2.0)
    watch.link.pids[0] += 1  # it was started again
    assert watch.lost_s(0) == 1.0


def test_only_leaders_lose_anything() -> None:
    kills = [kill(True, 1.0), kill(False, 0.0), kill(True, 3.0)]
    row = trainer_kills.summarise("at any moment", kills, 500)
    assert (row["kills"], row["leaders"], row["lost_s_median"], row["lost_s_most"]) == (3, 2, 3.0, 3.0)
    assert row["all_kills"] == kills


@pytest.mark.parametrize(
    ("moments", "writes", "met"),
    [
        ([kill(True, 2.0)] * 40, [kill(True, 2.0)] * 10, [True, True, True, True]),
        ([kill(True, 2.0)] * 41, [kill(True, 2.0)] * 9, [True, False, True, True]),
        ([kill(True, 2.0)] * 39, [kill(True, 2.0)] * 10, [False, True, True, True]),
        ([kill(True, 2.0, broken=True)] * 40, [kill(True, 2.0)] * 10, [True, True, False, True]),
        ([kill(True, 2.0)] * 40, [kill(True, 11.0, fallen=True)] * 10, [True, True, False, False]),
    ],
)
def test_each_bar_can_be_missed(
    moments: list[dict[str, object]], writes: list[dict[str, object]], met: list[bool]
) -> None:
    rows = [trainer_kills.summarise(what, kills, 1) for what, kills in (("a", moments), ("b", writes))]
    assert [bar["met"] for bar in trainer_kills.check_rows(rows)] == met

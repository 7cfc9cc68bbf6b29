"""Of two racing workers the copy and the original are killed by turns, one in a rollout, and only while they race."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.control.helping import Pair, Place
from paceline.planning.help import Help

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import chaos


def make_fleet(kind: Help, copies: list[int]) -> SimpleNamespace:
    """A fleet in which w1 helps w0."""
    pair = Pair(Place("w1", 0), Place("w0", 0), kind)
    controller = SimpleNamespace(
        workers=("w0", "w1"),
        pairs_of=lambda name: [pair] if name == "w1" else [],
        _workers={"w1": SimpleNamespace(copies=copies)},
    )
    return SimpleNamespace(
        _controller=controller, _actors=SimpleNamespace(process={"w0": 100, "w1": 101}.get)
    )


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were killed."""
    found: list[int] = []

    def kill(process: int, number: int) -> None:
        assert number == signal.SIGKILL
        found.append(process)

    monkeypatch.setattr(chaos.os, "kill", kill)
    monkeypatch.setattr(chaos, "MOST_RACE_S", 0.0)
    return found


def test_the_copy_and_the_original_are_killed_by_turns_one_in_a_rollout(killed: list[int]) -> None:
    evidence: list[dict[str, object]] = []
    for _ in range(3):
        killer = chaos.RacerKiller(make_fleet(Help.COPY, [7]), random.Random(0), evidence)
        for _ in range(5):
            killer.strike()
    assert killed == [101, 100, 101]
    assert [one["member"] for one in evidence] == ["copy", "original", "copy"]


def test_a_race_that_begins_anew_costs_no_second_worker(killed: list[int]) -> None:
    killer = chaos.RacerKiller(make_fleet(Help.COPY, [7]), random.Random(0))
    for race in (True, False, True):
        killer.fleet._controller._workers["w1"].copies = [7] if race else []
        for _ in range(3):
            killer.strike()
    assert killed == [101]


@pytest.mark.parametrize(("kind", "copies"), [(Help.DRAFT, [7]), (Help.COPY, [])])
def test_who_does_not_race_is_not_killed(killed: list[int], kind: Help, copies: list[int]) -> None:
    killer = chaos.RacerKiller(make_fleet(kind, copies), random.Random(0))
    for _ in range(5):
        killer.strike()
    assert not killed
    assert not killer.evidence


def test_bars_ask_for_enough_kills_and_no_mistake() -> None:
    calm = {"dtype": "float32", "twice": 0, "missing": 0, "diverged": 0}
    rows = [
        {**calm, "kind": "parts", "engines": 50, "kills": 60, "rewards": 1},
        {**calm, "kind": "racers", "kills": 24},
        {**calm, "kind": "drivers", "kills": 4},
    ]
    assert [(bar["case"], bar["met"]) for bar in chaos.check_rows(rows)] == [
        ("parts, float32: engines", True),
        ("parts, float32: mistakes", False),
        ("racers, float32: kills", False),
        ("racers, float32: mistakes", True),
        ("drivers, float32: mistakes", True),
    ]


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        (["--kills", "60"], 50),
        (["--kills", "40"], 40),
        (["--kills", "120"], 60),
        (["--kills", "10", "--engine-kills", "5"], 5),
    ],
)
def test_half_of_the_killed_or_more_are_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], engines: int
) -> None:
    asked: list[SimpleNamespace] = []

    def run(dtype: str, options: SimpleNamespace) -> list[dict[str, object]]:
        asked.append(options)
        return []

    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["chaos.py", *words, "--dtype", "float32", "--json", str(tmp_path / "found.json")]
    )
    chaos.main()
    assert asked[0].engine_kills == engines >= asked[0].kills / 2


def test_fewer_engines_than_half_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--kills", "10", "--engine-kills", "4"])
    with pytest.raises(SystemExit):
        chaos.main()
    assert "--engine-kills 4: 5 to 10, half of all kills or more" in capsys.readouterr().err
